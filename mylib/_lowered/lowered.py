"""The result of `lower`: a function lowered, and compiled, ahead of time."""

import functools
import os
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu

from .._audit import (
    HloModule,
    Report,
    callbacks_of,
    kernels_of_cudnn,
    memory_of,
    products_by_triton,
    report_of,
)
from .._compat import (
    compilation_cache,
    deserialized,
    devices_of_lowered,
    host_callbacks,
    is_compile_only,
    lacks_code,
    serialized,
)
from .._errors import SavedProgramError, not_here
from .._placement import AnyMesh, bytes_on_each
from ..machines import (
    WITHOUT_TRITON,
    Argument,
    Fit,
    Machine,
    Memory,
    about_kernels,
    out_of_memory,
)
from .files import SavedProgram, compare, program_for, read, write


class Origin(NamedTuple):
    """The function and the arguments from which a program was lowered."""

    # The function's name, and the mesh that it was given.
    name: str
    mesh: AnyMesh | None
    # The arrays that the program takes, with the caller's names.
    arguments: Sequence[Argument]
    # The program before it is compiled, as a jaxpr.
    traced: Any
    # The caller's name of an array that has this name in the program.
    named: Callable[[str], str]
    # Calls the function with the compiled program, which may not have been called before, and
    # these arguments.
    call: Callable[[jax.stages.Compiled, bool, Any, Any], Any]
    # Gets the collectives that `audit` has found.
    audited: Callable[[Report], None]


def argument(name: str, x: Any) -> Argument:
    shape = tuple(x.shape)
    return Argument(name, shape, bytes_on_each(getattr(x, "sharding", None), shape, x.dtype))


@dataclass(frozen=True, eq=False, repr=False)
class Lowered:
    """A function lowered for some arguments; `lowered` is JAX's own object."""

    _origin: Origin
    lowered: jax.stages.Lowered

    def as_text(self) -> str:
        return self.lowered.as_text() or ""

    def compile(self, compiler_options: dict[str, Any] | None = None) -> "Compiled":
        """Compiles it. Raises [`mylib.machines.OutOfMemoryError`][] if the compiler finds that it
        does not fit into the devices' memory, which only the TPU's compiler checks. If the
        GPU's compiler can't make a Triton kernel, a note on its error explains how to avoid it.
        """
        try:
            compiled = self.lowered.compile(compiler_options)
        except jax.errors.JaxRuntimeError as error:
            # Most programs have no kernels, and raise nothing.
            from .._kernels import raise_as_in_compiler

            raise_as_in_compiler(error)
            readable = out_of_memory(error, self._origin.arguments, self._origin.traced)
            if readable is not None:
                raise readable from error
            note = about_kernels(error)
            if note is not None:
                error.add_note(note)
            raise
        return Compiled(self._origin, self.lowered, compiled, compiler_options)

    def load(self, path: str | os.PathLike[str], check: bool = True) -> "Compiled":
        """Takes the executable from a file instead of compiling; see [`mylib.load_compiled`][]."""
        program, executable = read(path)
        compare(path, program, _described(self._origin, self.lowered), check)
        devices = devices_of_lowered(self.lowered)
        if is_compile_only(devices[0]):
            raise not_here(self._origin.name)
        try:
            compiled = deserialized(executable, self.lowered, devices)
        except _NOT_READ as error:
            raise SavedProgramError(
                f"{path} holds no executable that can be loaded: {error}. Compile it again"
            ) from error
        return Compiled(self._origin, self.lowered, compiled, _file=path)


# What JAX and `pickle` raise for a file that something else has written, with the right hash.
_NOT_READ = (
    jax.errors.JaxRuntimeError,
    pickle.PickleError,
    ArithmeticError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    TypeError,
    ValueError,
)
# What they raise for objects in a program that can't be in a file.
_NOT_SERIALISED = (
    pickle.PickleError,
    AttributeError,
    NotImplementedError,
    TypeError,
    ValueError,
)


@dataclass(eq=False, repr=False)
class Compiled:
    """A function compiled ahead of time; `compiled` is JAX's own object."""

    _origin: Origin
    _lowered: jax.stages.Lowered
    compiled: jax.stages.Compiled
    _options: dict[str, Any] | None = None
    # The file that it was read from, if it wasn't compiled here.
    _file: str | os.PathLike[str] | None = None
    _called: bool = field(default=False, init=False)

    @functools.cached_property
    def memory(self) -> Memory:
        """The bytes that it needs on each device."""
        return memory_of(self.compiled, self.as_text(), self._origin.arguments)

    def fits(self, machine: Machine) -> Fit:
        """Whether it fits into the memory of each device of a machine; see `Memory.fits`."""
        return self.memory.fits(machine)

    def as_text(self) -> str:
        return self.compiled.as_text() or ""

    @functools.cached_property
    def _module(self) -> HloModule:
        return HloModule(self.as_text())

    def cost_analysis(self) -> Any:
        """The compiler's own analysis, as JAX returns it: it counts the body of a loop once and no
        collectives, and the compiler has none for GPUs that you don't have. `audit().work` counts
        loops as often as they run.
        """
        return self.compiled.cost_analysis()

    def memory_analysis(self) -> Any:
        """The compiler's own analysis, as JAX returns it; see `memory`."""
        return self.compiled.memory_analysis()

    def audit(self, *, mesh: AnyMesh | None = None, local: Iterable[str] = ()) -> Report:
        """The report of [`mylib.audit`][]: collectives, memory, time."""
        origin = self._origin
        report = report_of(
            self.compiled,
            origin.named,
            mesh=origin.mesh if mesh is None else mesh,
            local=local,
            traced=origin.traced,
            lowered=self._lowered if self._file is None else None,
            options=self._options,
        )
        origin.audited(report)
        return report

    def save(self, path: str | os.PathLike[str]) -> None:
        """Saves the program in a file, for [`mylib.load_compiled`][] on the machine that it was
        compiled for. If several processes have compiled it together, one of their files is enough
        for all; they may also write to the same path.

        **Arguments:**

        - `path`: the file. If it exists, it is replaced in one step and keeps its mode. Links are
            followed; pipes and devices are written to.

        **Raises:**

        `SavedProgramError` if the program calls functions of Python, which can't be saved, or was
        itself read from a file; on CPUs also if JAX has read it from its compilation cache. For
        GPUs that you don't have also if it has kernels that must be chosen by measuring.
        """
        name = self._origin.name
        if self._file is not None:
            raise SavedProgramError(f"{name} was read from {self._file}: copy that file")
        if host_callbacks(self.compiled) and (callbacks := callbacks_of(self._module)):
            calls = "".join(f"\n  {x}" for x in callbacks)
            raise SavedProgramError(
                f"{name} can't be saved, as it calls functions of Python, which are not in its "
                f"program:{calls}\nLeave them out. equinox.error_if can stay"
            )
        device = devices_of_lowered(self._lowered)[0]
        if is_compile_only(device) and device.platform == "gpu":
            _refuse_unmeasured(name, device.device_kind, self._module)
        try:
            executable = serialized(self.compiled)
        except _NOT_SERIALISED as error:
            raise SavedProgramError(f"{name} can't be saved: {error}") from error
        if compilation_cache() is not None and lacks_code(self.compiled, executable):
            raise SavedProgramError(
                f"{name} can't be saved: JAX has read it from its compilation cache, and XLA does "
                "not write the code of a program for CPUs again. Before anything is compiled, "
                "write jax.config.update('jax_compilation_cache_dir', None)"
            )
        write(path, _described(self._origin, self._lowered), executable)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        result = self._origin.call(self.compiled, not self._called, args, kwargs)
        self._called = True
        return result


def call_with(compiled: Compiled, program: Any, args: Any, kwargs: Any) -> Any:
    """Calls a function with another program in place of the compiled one."""
    return compiled._origin.call(program, False, args, kwargs)  # pyright: ignore[reportPrivateUsage]


def _refuse_unmeasured(name: str, kind: str, program: HloModule) -> None:
    """`benchmarks/gpu.py` shows what becomes of such programs."""
    cudnn, triton = kernels_of_cudnn(program), products_by_triton(program)
    faults = [f"\n  {x}: by cuDNN, which fails when the program runs" for x in cudnn]
    faults += [f"\n  {x}: by Triton, 12 to 24 times as long as by cuBLAS" for x in triton]
    if not faults:
        return
    helps = []
    if triton:
        helps.append(f"\nMatrix products: .lower(...).compile({WITHOUT_TRITON})")
    if cudnn:
        helps.append(
            "\nAttention: implementation='xla'. Convolutions, and programs with cuDNN's attention, "
            "are compiled where there is such a GPU"
        )
    raise SavedProgramError(
        f"{name} can't be saved for a {kind} that you don't have: XLA chooses these kernels by "
        f"measuring them on one.{''.join(faults + helps)}"
    )


def _described(origin: Origin, lowered: jax.stages.Lowered) -> SavedProgram:
    """The dependencies of the compiled program."""
    pairs = zip(origin.arguments, jtu.tree_leaves(lowered.in_avals), strict=True)
    return program_for(
        origin.name,
        lowered.as_text() or "",
        (f"{argument.path} {_words(x)}" for argument, x in pairs),
        map(_words, jtu.tree_leaves(lowered.out_info)),
        devices_of_lowered(lowered),
    )


def _words(x: Any) -> str:
    return f"{x.dtype}{[*x.shape]}"

"""The result of `lower`: a function lowered, and compiled, ahead of time."""

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu

from ..._core.compat import (
    compilation_cache,
    deserialized,
    devices_of_lowered,
    host_callbacks,
    is_compile_only,
    lacks_code,
    serialized,
)
from ..._core.errors import SavedProgramError, explained, not_here
from ..._core.placement import AnyMesh, bytes_on_each
from ..._core.status import StatusLine
from ..audit import (
    HloModule,
    Report,
    callbacks_of,
    memory_of,
    report_of,
    tuned_kernels_of,
)
from ..machines import WITHOUT_TRITON, Argument, Fit, Machine, Memory, about_kernels, out_of_memory
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
        """Compiles it. Raises `mylib.machines.OutOfMemoryError` if the compiler finds that it
        does not fit into the devices' memory, which only the TPU's compiler checks. If the
        GPU's compiler can't make a Triton kernel, a note on its error explains how to avoid it.
        """
        try:
            with StatusLine(f"compiling {self._origin.name}"):
                compiled = self.lowered.compile(compiler_options)
        except jax.errors.JaxRuntimeError as error:
            # Most programs have no kernels, and raise nothing.
            from ..._core.kernels import raise_as_in_compiler

            raise_as_in_compiler(error)
            readable = out_of_memory(error, self._origin.arguments)
            if readable is not None:
                raise readable from error
            explained(error, about_kernels(error))
            raise
        return Compiled(self._origin, self.lowered, compiled, compiler_options)

    def load(self, path: str | os.PathLike[str], check: bool = True) -> "Compiled":
        """Takes the executable from a file instead of compiling; see `mylib.load_compiled`."""
        program, executable = read(path)
        compare(path, program, _described(self._origin, self.lowered), check)
        devices = devices_of_lowered(self.lowered)
        if is_compile_only(devices[0]):
            raise not_here(self._origin.name)
        try:
            compiled = deserialized(executable, self.lowered, devices)
        except Exception as error:  # of `pickle`, of anything: something else has written it
            raise SavedProgramError(
                f"{path} holds no executable that can be loaded: {error}. Compile it again"
            ) from error
        return Compiled(self._origin, self.lowered, compiled, _file=path)


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
        """The report of `mylib.audit`: collectives, memory, time."""
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
        """Saves the program in a file, for `mylib.load_compiled` on the machine that it was
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
            raise SavedProgramError(
                f"{name} can't be saved, as it calls functions of Python, which are not in its "
                f"program:{callbacks}\nLeave them out. equinox.error_if can stay"
            )
        device = devices_of_lowered(self._lowered)[0]
        if is_compile_only(device) and device.platform == "gpu":
            if kernels := tuned_kernels_of(self._module):
                raise _untuned(name, device.device_kind, kernels)
        try:
            executable = serialized(self.compiled)
        except Exception as error:  # for objects that can't be in a file
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


def _untuned(name: str, kind: str, kernels: str) -> SavedProgramError:
    """`benchmarks/gpu.py` shows what becomes of such programs."""
    return SavedProgramError(
        f"{name} can't be saved for a {kind} that you don't have: XLA chooses these kernels by "
        "measuring them on one. Without that, those of cuDNN fail when the program runs, and those "
        f"of Triton take 12 to 24 times as long as cuBLAS:{kernels}\n"
        f"Matrix products: .lower(...).compile({WITHOUT_TRITON})\n"
        "Attention: implementation='xla'. Convolutions, and programs with cuDNN's attention, are "
        "compiled where there is such a GPU"
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

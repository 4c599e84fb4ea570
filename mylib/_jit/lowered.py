"""What `lower` of a function returns: the function lowered, and compiled, ahead of time."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu

from .._audit import ProgramMemory, Report, report_of
from .._compat import ran_on_a_description
from .._placement import AnyMesh
from .._tree import Arrays
from ..machines import (
    Argument,
    Fit,
    Machine,
    about_kernels,
    arguments_of,
    out_of_memory,
)
from .arguments import Call
from .naming import add_note, named, names_of
from .program import Program, not_here
from .variants import Variant


class _Origin(NamedTuple):
    """A function, and the call that it was lowered for, without its arguments."""

    program: Program
    variant: Variant
    own: Arrays
    names: list[str]
    arguments: Sequence[Argument]

    def named(self, own: str) -> str:
        return named(own, self.names, self.variant.donated_from)


def lowered_for(call: Call) -> "Lowered":
    lowered, arrays = call.program.lower(call)
    known = names_of(call)
    arguments = arguments_of(known, arrays)
    return Lowered(_Origin(call.program, call.variant, call.own, known, arguments), lowered)


class Lowered:
    """A function lowered for some arguments; `lowered` is JAX's own object."""

    def __init__(self, origin: _Origin, lowered: jax.stages.Lowered):
        self._origin = origin
        self.lowered = lowered

    def as_text(self) -> str:
        return self.lowered.as_text() or ""

    def compile(self, compiler_options: dict[str, Any] | None = None) -> "Compiled":
        """Compiles it. Raises [`mylib.machines.OutOfMemoryError`][] if the compiler finds that it
        does not fit into the devices' memory, which only the TPU's compiler checks. If the
        GPU's compiler can't make a Triton kernel, a note on its error says how to avoid it.
        """
        try:
            compiled = self.lowered.compile(compiler_options)
        except jax.errors.JaxRuntimeError as error:
            readable = out_of_memory(error, self._origin.arguments, self.lowered)
            if readable is not None:
                raise readable from error
            note = about_kernels(error)
            if note is not None:
                error.add_note(note)
            raise
        return Compiled(self._origin, compiled)


class Compiled:
    """A function compiled ahead of time; `compiled` is JAX's own object."""

    def __init__(self, origin: _Origin, compiled: jax.stages.Compiled):
        self._origin = origin
        self._called = False
        self.compiled = compiled

    @functools.cached_property
    def memory(self) -> ProgramMemory:
        """The bytes that it needs on each device."""
        return ProgramMemory.of(self.compiled, self.as_text(), self._origin.arguments)

    def fits(self, machine: Machine) -> Fit:
        """Whether it fits into the memory of each device of a machine; see `Memory.fits`."""
        return self.memory.fits(machine)

    def as_text(self) -> str:
        return self.compiled.as_text() or ""

    def cost_analysis(self) -> Any:
        """The compiler's own analysis, as JAX returns it: it counts the body of a loop once and no
        collectives, and the compiler for GPUs that are not here has none. `audit().work` counts
        loops as often as they run.
        """
        return self.compiled.cost_analysis()

    def memory_analysis(self) -> Any:
        """The compiler's own analysis, as JAX returns it; see `memory`."""
        return self.compiled.memory_analysis()

    def audit(self, *, mesh: AnyMesh | None = None, local: Iterable[str] = ()) -> Report:
        """What the program communicates and holds, as reported by [`mylib.audit`][]."""
        mesh = self._origin.program.mesh if mesh is None else mesh
        return report_of(self.compiled, self._origin.named, mesh=mesh, local=local)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        program, variant, own, *_ = self._origin
        call, parts = program.read(own, args, kwargs)
        if not variant.split.is_of(*parts):
            if any(isinstance(x, jax.ShapeDtypeStruct) for x in jtu.tree_leaves((args, kwargs))):
                raise TypeError(
                    f"{program.name} is called with a jax.ShapeDtypeStruct, which has no numbers: "
                    "it is for compiling only"
                )
            raise TypeError(
                f"{program.name} was compiled for other static arguments, or for another tree "
                "structure: compile it for these, too"
            )
        call.variant = variant
        first, self._called = not self._called, True
        try:
            return program.call(call, self.compiled, first)
        except (AttributeError, RuntimeError) as error:
            if not ran_on_a_description(error):
                raise
            raise not_here(program) from error
        except Exception as error:
            add_note(error, call)
            raise

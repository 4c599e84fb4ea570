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
from .notes import add_note
from .recipe import Call, Prepared, not_here


class _Origin(NamedTuple):
    """A function, its own arrays, and the arguments that it was lowered for."""

    prepared: Prepared
    own: Arrays
    arguments: Sequence[Argument]


def lowered_for(call: Call, own: Arrays) -> "Lowered":
    """A call of a function, lowered. `own` are the arrays of the function itself."""
    lowered, arrays = call.lower(own)
    prepared = call.prepared
    return Lowered(_Origin(prepared, own, arguments_of(prepared.names, arrays)), lowered)


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
        prepared = self._origin.prepared
        mesh = prepared.recipe.mesh if mesh is None else mesh
        return report_of(self.compiled, prepared.named, mesh=mesh, local=local)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        prepared, own, _ = self._origin
        call = prepared.recipe.read(args, kwargs)
        if call.key != prepared.key:
            if any(isinstance(x, jax.ShapeDtypeStruct) for x in jtu.tree_leaves((args, kwargs))):
                raise TypeError(
                    f"{prepared.recipe.name} is called with a jax.ShapeDtypeStruct, which "
                    "has no numbers: it is for compiling only"
                )
            raise TypeError(
                f"{prepared.recipe.name} was compiled for other static arguments, or for "
                "another tree structure: compile it for these, too"
            )
        call.prepared = prepared
        first, self._called = not self._called, True
        try:
            return call(own, self.compiled, first)
        except (AttributeError, RuntimeError) as error:
            if not ran_on_a_description(error):
                raise
            raise not_here(prepared.recipe) from error
        except Exception as error:
            add_note(error, (args, kwargs), prepared.named)
            raise

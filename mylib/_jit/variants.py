"""Calls, and the variants of a function: for each structure of its arguments and their static
leaves.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .._advice import ChangingNumbers, Earlier
from .._tree import Arrays, Split
from .recent import Recent

if TYPE_CHECKING:
    from .donation import Donated
    from .program import Program

# The most variants that are kept for a function: as many as JAX keeps traces.
_MOST = 2048


@dataclass(slots=True, eq=False)
class Call:
    """A call: its arguments, the `arrays` in them and the rest, and the arrays of the function (a
    Module's). If it `is_abstract`, it is only lowered, and arrays may be abstract.
    """

    program: "Program"
    args: Any
    kwargs: Any
    arrays: Arrays
    split: Split
    fun_arrays: Arrays
    is_abstract: bool
    variant: "Variant" = field(init=False)


class Variant:
    """A function for arguments that differ only in arrays, with a `jax.jit` of its own: so JAX's
    programs go with it.
    """

    def __init__(self, split: Split, donated: "Donated | None", jit: Callable[["Variant"], Any]):
        self.split = split.noted()
        self.donated = donated
        self.jitted = jit(self)
        # The arguments whose placements were resolved last, and the results.
        self.resolved: tuple[Any, Any] | None = None
        # The state of the last arguments that needed no moves, and their targets.
        self.in_place: tuple[Any, Any] | None = None
        # Whether it has error checks; None until it is traced.
        self.has_checks: bool | None = None
        # Whether several devices took part in a call.
        self.is_parallel = False
        self.earlier: Earlier = Earlier()
        # What `audit` has found, if it was asked; for `mylib.watch`.
        self.collectives: Any = None


class Variants(Recent[Split, Variant]):
    """The variants of a function."""

    def __init__(self) -> None:
        super().__init__(_MOST)
        # The one that was called last. Usually it is called again.
        self.latest: Variant | None = None
        # Whether it has been told that all devices compute the same.
        self.is_replicated_told = False
        self.numbers: ChangingNumbers = ChangingNumbers()

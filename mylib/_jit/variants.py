"""Calls, and the variants of a function: for each structure of its arguments and their static
leaves.
"""

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .._advice import ChangingNumbers, Earlier
from .._tree import Arrays, Split

if TYPE_CHECKING:
    from .donation import Donated
    from .program import Program

# The most variants that are kept for a function.
_MOST = 256


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
    """A function for arguments that differ only in arrays.

    `key` stands for it among the static arguments of `jax.jit`: JAX never lets go of those, and a
    weak reference keeps no static leaves alive.
    """

    def __init__(self, split: Split, donated: "Donated | None"):
        self.split = split
        self.key: weakref.ref[Variant] = weakref.ref(self)
        self.donated = donated
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


class Variants:
    """The variants of a function. Beyond a number of them all are let go."""

    def __init__(self) -> None:
        self.all: dict[Split, Variant] = {}
        # The one that was called last. Usually it is called again.
        self.latest: Variant | None = None
        # Whether it has been told that all devices compute the same.
        self.is_replicated_told = False
        self.numbers: ChangingNumbers = ChangingNumbers()

    def __len__(self) -> int:
        return len(self.all)

    def is_full(self) -> bool:
        return len(self) >= _MOST

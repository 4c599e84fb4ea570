"""The variants of a function: for each structure of its arguments and their static leaves."""

import weakref
from typing import Any

from .._tree import Split
from .donation import Donated

# The most variants that are kept for a function.
_MOST = 256
# After this many new variants in a row that differ only in Python numbers, there is a warning.
_IN_A_ROW = 10


class Variant:
    """A function for arguments that differ only in arrays.

    `key` stands for it among the static arguments of `jax.jit`: JAX never lets go of those, and a
    weak reference keeps no static leaves alive.
    """

    def __init__(self, split: Split, donated: Donated | None):
        self.split = split
        self.key: weakref.ref[Variant] = weakref.ref(self)
        self.donated = donated
        # The arguments whose placements were resolved last, and the results.
        self.resolved: tuple[Any, Any] | None = None
        # The state of the last arguments that needed no moves, and their targets.
        self.in_place: tuple[Any, Any] | None = None
        # Whether several devices took part in a call.
        self.is_parallel = False
        # Large arrays captured by the last trace, until the warning is given, and where they may
        # come from.
        self.large: list[Any] = []
        self.captured: list[Any] = []
        # The arguments' shardings at the last compilation, and the results of that call.
        self.locations: list[Any] = []
        self.returned: list[weakref.ref[Any]] = []
        # What `audit` has found, if it was asked; for `mylib.watch`.
        self.collectives: Any = None


class Variants:
    """The variants of a function. Beyond a number of them all are let go."""

    def __init__(self) -> None:
        self._known: dict[Split, Variant] = {}
        # The one that was called last. Usually it is called again.
        self.latest: Variant | None = None
        # Whether it has been told that all devices compute the same.
        self.is_replicated_told = False
        self._row = _NumbersInARow()

    def __len__(self) -> int:
        return len(self._known)

    def get(self, split: Split) -> Variant | None:
        variant = self._known.get(split)
        if variant is not None:
            self.latest = variant
        return variant

    def add(self, split: Split, donated: Donated | None) -> tuple[Variant, bool, set[int]]:
        """A new variant, or that of another thread, which was faster; whether there were so many
        that all others were let go; and, once, the leaves whose numbers change at each call.
        """
        changed = self._row.add(split, self.latest)
        is_full = len(self._known) >= _MOST
        if is_full:
            self._known = {}
        self.latest = self._known.setdefault(split, Variant(split, donated))
        return self.latest, is_full, changed


class _NumbersInARow:
    """Variants added by successive calls that differ only in numbers."""

    def __init__(self) -> None:
        self._last: Split | None = None
        self._length = 0
        self._changed: set[int] = set()
        self._is_told = False

    def add(self, split: Split, before: Variant | None) -> set[int]:
        """`before` is the variant that was called before."""
        changed: set[int] = set()
        if before is not None and before.split is self._last:
            changed = split.numbers_changed(before.split)
        if not changed:
            self._length, self._changed = 0, set()
        self._length += 1
        self._changed |= changed
        self._last = split
        if self._length < _IN_A_ROW or self._is_told:
            return set()
        self._is_told = True
        return self._changed

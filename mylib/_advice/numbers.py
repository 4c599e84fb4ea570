"""Warns of a Python number that has a new value, and so compiles anew, at each call."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from .._errors import StaticNumberWarning, warn
from .._tree import Split

# After this many new trees of arguments in a row that differ only in Python numbers.
_IN_A_ROW = 10


class ChangingNumbers:
    """Remembers new trees of a function's arguments as long as each differs from the last one only
    in numbers.
    """

    def __init__(self) -> None:
        # None once the warning was given.
        self._row: list[Split] | None = []

    def look_at(
        self, split: Split, latest: Split | None, name: str, find_names: Callable[[], Sequence[str]]
    ) -> None:
        """Takes note of a new tree, after that of the call before, and warns if it is time."""
        row = self._row
        if row is None:
            return
        is_next = row and latest is row[-1]
        row = [*row, split] if is_next and split.numbers_changed(row[-1]) else [split]
        self._row = row if len(row) < _IN_A_ROW else None
        if self._row is None:
            pairs = pairwise(row)
            changed = set[int]().union(*(new.numbers_changed(old) for old, new in pairs))
            _warn_of(name, find_names(), changed)


def _warn_of(name: str, leaves: Sequence[str], changed: set[int]) -> None:
    texts = ", ".join(leaves[i] for i in sorted(changed))
    warn(
        f"{name} is compiled at each call: its argument {texts} is a Python number, which is "
        f"static, and has a new value each time. Pass jnp.asarray({texts}).",
        StaticNumberWarning,
    )

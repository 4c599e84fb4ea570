"""Warns of a Python number that has a new value, and so compiles anew, at each call."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from ..._core.errors import StaticNumberWarning, folded, warn
from ..._core.tree import Outline

# After this many new trees of arguments in a row that differ only in Python numbers.
_IN_A_ROW = 10
# If this many numbers change at once, they belong to a list, such as a batch.
_MANY = 32


class ChangingNumbers:
    """Remembers new trees of a function's arguments as long as each differs from the last one only
    in numbers.
    """

    def __init__(self) -> None:
        # None once the warning was given.
        self._row: list[Outline] | None = []

    def look_at(
        self,
        outline: Outline,
        latest: Outline | None,
        name: str,
        find_names: Callable[[], Sequence[str]],
    ) -> None:
        """Compares a new tree with that of the call before, and warns after several of them."""
        row = self._row
        if row is None:
            return
        is_next = row and latest is row[-1]
        changed = outline.numbers_changed(row[-1]) if is_next else set[int]()
        row = [*row, outline] if changed else [outline]
        self._row = row if len(row) < _IN_A_ROW and len(changed) < _MANY else None
        if self._row is None:
            pairs = pairwise(row)
            changed = set[int]().union(*(new.numbers_changed(old) for old, new in pairs))
            names = find_names()
            shown = ", ".join(folded([names[i] for i in sorted(changed)]))
            warn(
                f"{name} is compiled at each call, because Python numbers are static, and these "
                f"have new values each time: {shown}. Convert them, or the lists that they are in, "
                "by jnp.asarray.",
                StaticNumberWarning,
            )

"""Rows that differ only by indices, such as those of a model's layers, under one name."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from .._errors import starred, with_stars
from .._tree import KeyPath, name_of


class HasPath(Protocol):
    @property
    def path(self) -> KeyPath: ...

    @property
    def likeness(self) -> Hashable:
        """Rows share a line if these are equal."""
        ...


Path = TypeVar("Path", bound=HasPath)


# The lines of a table: a model may have 100,000 leaves.
LINES = 200


def fold(rows: Iterable[Path], most: int | None) -> list[tuple[str, list[Path]]]:
    """Groups rows that differ only in indices of their paths, under one name: the first `most`
    groups, or all with None.
    """
    alike: dict[Any, list[Path]] = {}
    for row in rows:
        alike.setdefault((starred(name_of(row.path)), row.likeness), []).append(row)
    groups = [([name_of(row.path) for row in group], group) for group in [*alike.values()][:most]]
    labels = [with_stars(names) for names, _ in groups]
    times = Counter(labels)
    return [
        (label if times[label] == 1 else _ends(names), group)
        for label, (names, group) in zip(labels, groups, strict=True)
    ]


def body_of(
    rows: Sequence[Path],
    groups: Sequence[tuple[str, list[Path]]],
    cells: Callable[[str, list[Path]], tuple[str, ...]],
) -> list[tuple[str, ...]]:
    """The lines of a table: one for each group, and a last one that counts the other rows."""
    body = [cells(label, group) for label, group in groups]
    left = len(rows) - sum(len(group) for _, group in groups)
    if left:
        body.append((f"and {left} more", *[""] * (len(body[0]) - 1)))
    return body


def _ends(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"

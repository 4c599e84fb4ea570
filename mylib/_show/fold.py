"""Rows that differ only by indices, such as those of a model's layers, under one name."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import jax.tree_util as jtu

from .._tree import KeyPath, name_of


class HasPath(Protocol):
    @property
    def path(self) -> KeyPath: ...

    @property
    def likeness(self) -> Hashable:
        """Rows share a line if these are equal."""
        ...


Path = TypeVar("Path", bound=HasPath)


# Limits on the lines of a table: named groups, then groups of similar rows.
LINES = 200
_OTHERS = 20


def fold(rows: Iterable[Path], most: int | None = LINES) -> list[tuple[str, list[Path]]]:
    """Groups rows that differ only in indices of their paths, under one name. After the first
    `most` groups, similar rows form one group, whatever their names: a model may have 100,000
    leaves. None for no end.
    """
    alike: dict[Any, list[Path]] = {}
    for row in rows:
        alike.setdefault((_starred(row.path), row.likeness), []).append(row)
    named = [*alike.values()][:most]
    labels = [_common_name(group) for group in named]
    times = Counter(labels)
    groups = [
        (label if times[label] == 1 else _ends(group), group)
        for label, group in zip(labels, named, strict=True)
    ]
    return groups + [(_more(group), group) for group in _unnamed([*alike.values()][len(named) :])]


def _unnamed(groups: Iterable[list[Path]]) -> list[list[Path]]:
    """Similar rows together, the most frequent kind first."""
    alike: dict[Hashable, list[Path]] = {}
    for group in groups:
        alike.setdefault(group[0].likeness, []).extend(group)
    return sorted(alike.values(), key=len, reverse=True)


def _more(rows: Sequence[HasPath]) -> str:
    return f"and {len(rows)} more" if len(rows) > 1 else name_of(rows[0].path)


def body_of(
    groups: Sequence[tuple[str, list[Path]]],
    cells: Callable[[str, list[Path]], tuple[str, ...]],
    most: int | None = LINES,
) -> list[tuple[str, ...]]:
    """The lines of a table, for groups of `fold(rows, most)`. The last line counts the rest."""
    shown = groups if most is None else groups[: most + _OTHERS]
    body = [cells(label, group) for label, group in shown]
    left = sum(len(group) for _, group in groups[len(shown) :])
    if left:
        body.append((f"and {left} more of other kinds", *[""] * (len(body[0]) - 1)))
    return body


def _starred(path: KeyPath) -> str:
    return "".join("[*]" if _is_index(key) else jtu.keystr((key,)) for key in path)


def _is_index(key: Any) -> bool:
    return isinstance(key, jtu.SequenceKey) or (
        isinstance(key, jtu.DictKey) and isinstance(key.key, int)
    )


def _common_name(rows: Sequence[HasPath]) -> str:
    """The common name of the rows' leaves, with a star for each index that differs."""
    levels = zip(*(row.path for row in rows), strict=True)
    parts = [_starred(x[:1]) if len(set(x)) > 1 else jtu.keystr(x[:1]) for x in levels]
    return "".join(parts) or "the array"


def _ends(rows: Sequence[HasPath]) -> str:
    first, last = name_of(rows[0].path), name_of(rows[-1].path)
    return first if len(rows) == 1 else f"{first} ... {last}"

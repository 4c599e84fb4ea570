"""Rows that differ only by indices, such as those of a model's layers, under one name."""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import jax.tree_util as jtu

from .._tree import KeyPath, name_of


class HasPath(Protocol):
    @property
    def path(self) -> KeyPath: ...

    @property
    def likeness(self) -> Hashable:
        """What must be equal in rows that share a line."""
        ...


Path = TypeVar("Path", bound=HasPath)


def fold(rows: Iterable[Path]) -> list[tuple[str, list[Path]]]:
    """Groups rows that differ only in indices of their paths, under one name."""
    alike: dict[Any, list[Path]] = {}
    for row in rows:
        alike.setdefault((_starred(row.path), row.likeness), []).append(row)
    labels = [_common_name(group) for group in alike.values()]
    times = Counter(labels)
    return [
        (label if times[label] == 1 else _ends(group), group)
        for label, group in zip(labels, alike.values(), strict=True)
    ]


def _starred(path: KeyPath) -> str:
    return "".join("[*]" if _is_index(key) else jtu.keystr((key,)) for key in path)


def _is_index(key: Any) -> bool:
    return isinstance(key, jtu.SequenceKey) or (
        isinstance(key, jtu.DictKey) and isinstance(key.key, int)
    )


def _common_name(rows: Sequence[HasPath]) -> str:
    """The common name of the rows' leaves, with a star for each index that differs."""
    levels = zip(*(row.path for row in rows), strict=True)
    return (
        "".join(
            _starred(keys[:1]) if len(set(keys)) > 1 else jtu.keystr(keys[:1]) for keys in levels
        )
        or "the array"
    )


def _ends(rows: Sequence[HasPath]) -> str:
    first, last = name_of(rows[0].path), name_of(rows[-1].path)
    return first if len(rows) == 1 else f"{first} ... {last}"

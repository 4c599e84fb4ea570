"""Rows that differ only by indices, such as those of a model's layers, under one name."""

import os
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from ..errors import starred, with_stars
from ..text import some
from ..tree import name_of
from .moves import Move
from .rows import Row
from .text import BEFORE_KEY

Listed = TypeVar("Listed", Row, Move)
T = TypeVar("T")


# The lines of a table: a model may have 100,000 leaves.
LINES = 200


def fold(rows: Iterable[Listed], most: int | None) -> list[tuple[str, list[Listed]]]:
    """Groups rows that differ only in indices of their paths, under one name: the first `most`
    groups, or all with None.
    """
    alike: dict[Hashable, list[Listed]] = {}
    for row in rows:
        alike.setdefault((starred(name_of(row.path)), row.likeness), []).append(row)
    groups = [([name_of(row.path) for row in group], group) for group in [*alike.values()][:most]]
    labels = [with_stars(names) for names, _ in groups]
    times = Counter(labels)
    return [
        (label if times[label] == 1 else _ends(names), group)
        for label, (names, group) in zip(labels, groups, strict=True)
    ]


def merged(
    groups: Sequence[tuple[str, list[T]]], likeness: Callable[[list[T]], Hashable]
) -> list[tuple[str, list[T]]]:
    """Combines groups whose names differ in one key: `.attention.{query, key}_proj.weight`."""
    split = [(_KEYS.split(label), rows) for label, rows in groups]
    for place in reversed(range(max((len(keys) for keys, _ in split), default=0))):
        alike: dict[Hashable, list[tuple[list[str], list[T]]]] = {}
        for keys, rows in split:
            other_keys = (*keys[:place], *keys[place + 1 :])
            alike.setdefault((likeness(rows), len(keys), other_keys), []).append((keys, rows))
        split = [
            (_united([keys for keys, _ in same], place), [row for _, rows in same for row in rows])
            for same in alike.values()
        ]
    return [("".join(keys), rows) for keys, rows in split]


_KEYS = re.compile(BEFORE_KEY)


def united(names: Iterable[str]) -> list[str]:
    """One name for those that differ in one key: `.{up, down}.weight`."""
    return [name for name, _ in merged([(name, [None]) for name in names], lambda _: None)]


def _united(paths: Sequence[list[str]], place: int) -> list[str]:
    """One path for several that differ in the key at this place."""
    if len(paths) == 1:
        return paths[0]
    names = [path[place] for path in paths]
    start = re.sub(r"\w*$", "", os.path.commonprefix(names))
    rests = [name.removeprefix(start) for name in names]
    end = re.sub(r"^[a-zA-Z0-9]*", "", os.path.commonprefix([x[::-1] for x in rests])[::-1])
    key = f"{start}{{{some([rest.removesuffix(end) for rest in rests])}}}{end}"
    return [*paths[0][:place], key, *paths[0][place + 1 :]]


def _ends(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"

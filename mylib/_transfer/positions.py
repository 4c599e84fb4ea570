"""Some of a tree's arrays, by their positions."""

from collections.abc import Iterable, Sequence
from typing import Any


def pick(index: Iterable[int], column: Sequence[Any]) -> list[Any]:
    return [column[i] for i in index]


def put_back(column: list[Any], index: Iterable[int], values: Iterable[Any]) -> None:
    for i, value in zip(index, values, strict=True):
        column[i] = value

"""Reads from a function of plain JAX how a kernel that computes the same may be split."""

from collections.abc import Sequence
from typing import Any

from .._dims import program_of
from .splits import Splits, named_by_letters


class UnreadableError(Exception):
    """Operations of `like=` don't say how it may be split. `opaque` makes a `TypeError` of it."""


def splits_like(program: Any) -> Splits:
    """How a closed jaxpr may be split, so that each part is computed as if it were all."""
    read = program_of(program)
    group = read.dims.group
    whole = {group(node) for node in read.undivided}
    for event in (*read.whole, *read.sums):
        whole |= set(map(group, event.over))
    operands = [read.dims.groups(x) for x in read.inputs]
    results = [read.dims.groups(x) for x in read.results]
    whole |= {x for array in (*operands, *results) for x in array if array.count(x) > 1}
    both = _all(operands) & _all(results) - whole
    parts = {x: read.dims.parts(x) for x in both if read.dims.parts(x) > 1}
    splits = named_by_letters(operands, results, parts)
    if read.unknown:
        name, line = next(iter(read.unknown.items()))
        raise UnreadableError(
            f"it calls {name} ({line}), which mylib can't see into. Leave like= out, and write "
            f'dims= yourself, where the letters of what may be split are repeated: dims="{splits}"'
        )
    return splits


def _all(arrays: Sequence[Sequence[int]]) -> set[int]:
    return {x for array in arrays for x in array}

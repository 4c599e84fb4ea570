"""Reads from a function of plain JAX how a kernel that computes the same may be split."""

from itertools import chain

from jax.extend.core import ClosedJaxpr

from ..dims import program_of
from .splits import Splits, named_by_letters


class UnreadableError(Exception):
    """Operations of `like=` don't say how it may be split. `opaque` makes a `TypeError` of it."""

    keyword = "like"


def splits_like(program: ClosedJaxpr) -> Splits:
    """How a closed jaxpr may be split, so that each part is computed as if it were all."""
    read = program_of(program)
    groups = read.dims.groups
    whole = set(groups(read.undivided))
    for nodes in map(groups, read.apart):
        whole |= {node for node in nodes if nodes.count(node) > 1}
    operands, results = ([*map(groups, side)] for side in (read.inputs, read.results))
    both = {*chain(*operands)} & {*chain(*results)} - whole
    parts = {node: read.dims.parts(node) for node in both if read.dims.parts(node) > 1}
    splits = named_by_letters(operands, results, parts)
    if read.unknown:
        name, line = next(iter(read.unknown.items()))
        raise UnreadableError(
            f"it calls {name} ({line}), which mylib can't see into. Leave like= out, and write "
            f'dims= yourself, where the letters of what may be split are repeated: dims="{splits}"'
        )
    return splits

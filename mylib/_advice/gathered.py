"""Warns of optimisers that need whole matrices and are given sharded ones: the compiler gathers
them for each product.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax

from .._compat import lines_of
from .._errors import AuditError, ReplicatedWarning, warn
from .._programs import all_equations, optimiser_of, products_of_optimisers
from .._text import counted, show_bytes, some
from .replicated import NewProgram

# A step that sends less than this for it is not slow.
_LITTLE = 2**20


def about_gathered(new: NewProgram) -> bool:
    """Warns of an optimiser whose matrices are gathered more often than once each. Returns whether
    it did.
    """
    held = _sharded(new.arrays[: new.count])
    # An optimiser returns the weights that it is given.
    if held.keys().isdisjoint(_sharded(new.returned)):
        return False
    traced, lowered = new.find()
    products = products_of_optimisers(traced.jaxpr)
    squares = {_sides(x.eqn.invars[0].aval.shape) for x in products if x.is_square}
    sides = squares & {*held}
    if not sides:
        return False
    whole = [i for x in sides for i in held[x]]
    once = sum(new.arrays[i].nbytes for i in whole)
    times, sent = _inserted(lowered.compile(), set(_lines_of_optimisers(traced.jaxpr)))
    if sent < max(_LITTLE, once):
        return False
    paths = new.find_names()
    leaves = some([paths[i] for i in whole])
    warn(
        f"{new.name}: the optimiser multiplies whole matrices, and the compiler gathers "
        f"them for one product after the other: each device sends {show_bytes(sent)} in "
        f"{counted(times, 'collective')}, where {leaves} hold {show_bytes(once)}. Write "
        "mylib.by_matrix(transform, kept) in place of transform: a matrix is sent to one device, "
        "which updates it, and its update is sent back",
        ReplicatedWarning,
    )
    return True


def _sharded(arrays: Sequence[Any]) -> dict[tuple[int, ...], list[int]]:
    """The matrices, and stacks of them, that are split over devices, by their sides."""
    found: dict[tuple[int, ...], list[int]] = {}
    for i, x in enumerate(arrays):
        if isinstance(x, jax.Array) and x.ndim > 1 and not x.sharding.is_fully_replicated:
            found.setdefault(_sides(x.shape), []).append(i)
    return found


def _sides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(shape[-2:]))


def _lines_of_optimisers(program: Any) -> Iterator[str]:
    for eqn in all_equations(program):
        if optimiser_of(eqn):
            yield from lines_of(eqn)


def _inserted(compiled: Any, lines: set[str]) -> tuple[int, int]:
    """How many collectives at these lines the compiler has inserted, and the bytes that a device
    sends in them.
    """
    from .._audit import audit  # which most programs don't need

    try:
        report = audit(compiled)
    except AuditError:  # a program that isn't understood is no reason for a warning
        return 0, 0
    found = [c for c in report.collectives if c.inserted and c.source in lines]
    times = [c.times or 1 for c in found]
    return sum(times), sum(n * c.wire_bytes for n, c in zip(times, found, strict=True))

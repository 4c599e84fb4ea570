"""Warns of loops that gather the same weights in each iteration, such as over pieces of a batch."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from .._compat import names, opened, scan_sizes
from .._errors import ReplicatedWarning, warn
from .._placement import axes_in
from .._programs import followed, jaxprs_in, line_of
from .._text import show_bytes
from .._transfer import constrain_auto_p
from .replicated import NewProgram

# A loop that gathers less than this in vain isn't slow.
_LITTLE = 2**20
_CONSTRAINTS = {names.CONSTRAINT, constrain_auto_p.name}


def about_pieces(new: NewProgram) -> bool:
    """Warns of a loop that gathers the same weights in each iteration. Returns whether it did."""
    if all(x.sharding.is_fully_replicated for x in new.arrays if isinstance(x, jax.Array)):
        return False
    traced, _ = new.find()
    for eqn, gathered in _loops(opened(traced.jaxpr)):
        times = eqn.params[names.PARAM_LENGTH]
        if gathered * (times - 1) < _LITTLE:
            continue
        warn(
            f"{new.name}: the loop at {line_of(eqn)} gathers the same weights in each of its "
            f"{times} iterations, {show_bytes(gathered)} each time. For the pieces of a batch, "
            "mylib.accumulate gathers them once, and sums gradients once, if each device has "
            "memory for all weights and gradients. For a recurrent model, pass the Module that "
            "contains the loop to fully_shard",
            ReplicatedWarning,
        )
        return True
    return False


def _loops(jaxpr: Any) -> Iterator[tuple[Any, int]]:
    """The loops of a program, and how many bytes of the same weights each iteration gathers."""
    for eqn in jaxpr.eqns:
        gathered = 0
        if eqn.primitive.name == names.SCAN:
            constants, _ = scan_sizes(eqn)
            body = opened(eqn.params[names.PARAM_JAXPR])
            gathered, _ = _gathered(body, [i < constants for i in range(len(body.invars))])
        if gathered:
            yield eqn, gathered
        else:
            for inner in jaxprs_in(eqn):
                yield from _loops(opened(inner))


def _gathered(jaxpr: Any, same: Sequence[bool]) -> tuple[int, list[bool]]:
    """How many bytes are gathered of what is the `same` in each iteration of a loop, where that is
    said of the arguments; and which results are the same.
    """
    parts: dict[int, int] = {}
    total = 0

    def through(eqn: Any, are_same: list[bool]) -> list[bool]:
        nonlocal total
        inner, results = jaxprs_in(eqn), [all(are_same)] * len(eqn.outvars)
        if eqn.primitive.name in _CONSTRAINTS and are_same[0]:
            (before,), (after,) = eqn.invars, eqn.outvars
            # By id, as literals can't be hashed.
            parts[id(after)] = _parts(eqn.params[names.PARAM_SHARDING])
            if parts.get(id(before), 0) > parts[id(after)]:
                total += before.aval.size * before.aval.dtype.itemsize
        elif eqn.primitive.name == names.BARRIER:
            results = are_same
        elif len(inner) == 1 and len(opened(inner[0]).invars) == len(eqn.invars):
            times = 1
            if eqn.primitive.name == names.SCAN:
                start, carried = scan_sizes(eqn)
                are_same[start : start + carried] = [False] * carried
                times = eqn.params[names.PARAM_LENGTH]
            inside, results = _gathered(opened(inner[0]), are_same)
            total += times * inside
        return results

    # Literals and constants are the same in each iteration.
    results = followed(jaxpr, same, through, lambda _: True)
    return total, results


def _parts(sharding: Any) -> int:
    if not isinstance(sharding, NamedSharding):
        return 0
    return math.prod(sharding.mesh.shape[axis] for axis in axes_in(sharding.spec))

"""From when to when a program holds its arrays, as predicted before it is compiled. What XLA counts
afterwards, and which arrays these are, `audit/memory.py` and `audit/peak.py` say.
"""

from typing import Any, NamedTuple

from ..._core.compat import names
from ..._core.dims import Equation, Nodes, Scope, bytes_of, is_kept, is_literal
from ..._core.jaxprs import KERNEL, is_on_host, jaxprs_in, shape_of

# As bytes. Smaller arrays don't matter beside weights.
_SMALL = 1024
# Moments are whole numbers. What an operation reads is let go a little after its results are there,
# so that both are held at once, and before what is fused with its user begins. These are an order,
# not times: other numbers between 0 and 1 in the same order give the same.
_READ, _FUSED = 0.25, 0.5


class Live(NamedTuple):
    """An array that a program holds from `start` to `stop`. `gathered` if it is a weight where it
    is used; `top` if it is held outside of loops and layers; `times` as in `Event`.
    """

    start: float
    stop: float
    bytes: int
    nodes: Nodes
    shape: tuple[int, ...]
    gathered: bool
    top: bool
    times: int


def lives_of(scope: Scope, values_last: bool) -> list[Live]:
    """Compilers fuse what isn't solid with what uses it, so it needs no memory, and its operands
    are held until then.

    What is solid, returns little, and is needed by nothing else that is solid runs last if
    `values_last`, such as the loss's value where the gradient computes the loss again: XLA
    schedules from the end, and so holds the gathered weights of the loss during the backward pass
    of the layers. Read in programs for GPUs; those for TPUs hold less.
    """
    solid, last = _last_uses(scope, values_last and scope.top)
    lives: list[Live] = []
    for eqn, start, stop in scope.moments:
        if _is_alias(eqn) or eqn.name in names.FILLED:
            continue
        # The results of a checkpoint are there only when it has ended.
        begin = stop if eqn.name == names.REMAT else start
        begin += 0 if _is_solid(eqn) else _FUSED
        for v in eqn.outvars:
            if is_on_host(v.aval):
                continue
            size, is_result = bytes_of(v.aval), scope.top and v in scope.returned
            if v in solid and v in last and size > _SMALL and not is_result:
                gathered, end = eqn.name == names.CONSTRAINT, last[v] + _READ
                about = scope.nodes[v], shape_of(v.aval), gathered, scope.top, scope.times
                lives.append(Live(begin, end, size, *about))
    return lives


def _last_uses(scope: Scope, values_last: bool) -> tuple[set[Any], dict[Any, float]]:
    """What needs memory, and until when each array is used."""
    last: dict[Any, float] = dict.fromkeys(scope.returned, scope.end + 1)
    solid, needed = set(scope.returned), set[Any]()
    for eqn, start, stop in reversed(scope.moments):
        is_big, is_needed = _is_solid(eqn), not needed.isdisjoint(eqn.outvars)
        if is_big or is_needed:
            needed.update(v for v in eqn.invars if not is_literal(v))
        if is_big:
            solid.update(eqn.outvars)
            # Such as a loss: nothing waits for it.
            returns_little = all(bytes_of(v.aval) <= _SMALL for v in eqn.outvars)
            is_last = values_last and returns_little and not is_needed
            until = float(scope.end if is_last else stop)
        else:
            held = (v for v in eqn.outvars if _is_alias(eqn) or v not in solid)
            # What is fused reads its operands when its result is used, maybe much later.
            until = max([start, *(last.get(v, start) for v in held)])
        if _is_alias(eqn):
            is_big = any(v in solid for v in eqn.outvars)
        for v in eqn.invars:
            if not is_literal(v):
                last[v] = max(last.get(v, 0), until)
                if is_big:
                    solid.add(v)
    return solid, last


def _is_solid(eqn: Equation) -> bool:
    return eqn.name in names.SOLID or eqn.name == KERNEL or bool(jaxprs_in(eqn.source))


def _is_alias(eqn: Equation) -> bool:
    return eqn.name in names.ALIASES or is_kept(eqn)

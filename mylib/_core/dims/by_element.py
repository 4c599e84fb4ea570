"""Operations that compute each number from those at its own place."""

from ..compat import names
from ..jaxprs import is_on_host, shape_of
from .applied import Applied, Rules
from .equations import bytes_of, is_kept, is_of_plan
from .program import Event


def by_element(op: Applied) -> None:
    out, size = op.outs[0], shape_of(op.out_avals[0])
    # The others are single numbers.
    alike = [x for x, a in zip(op.ins, op.in_avals, strict=True) if shape_of(a) == size]
    # Dimensions of size 1 are broadcast, and not joined.
    op.tie_all(out.nodes, *(x.nodes for x in op.ins if len(x.nodes) == len(size)))
    out.origin = next((x.origin for x in alike if x.origin is not None), None)
    special = _SPECIAL.get(op.eqn.name)
    if special is not None:
        special(op)


def barrier(op: Applied) -> None:
    for x, out in zip(op.ins, op.outs, strict=True):
        op.tie_all(x.nodes, out.nodes)
        op.end_of_part()
        out.sum, out.origin = x.sum, x.origin


def _added(op: Applied) -> None:
    sums = [x.sum for x in op.ins if x.sum is not None]
    carried = [x.carried for x in op.ins if x.carried is not None]
    # What a turn adds to what is carried may be summed after the loop.
    if sums and len(carried) == 1:
        op.outs[0].sum, op.outs[0].carried = sums[0], carried[0]
    if len(sums) == len(op.ins) == 2 and sums[0].amount == sums[1].amount:
        first, other = sorted((x.root for x in sums), key=lambda x: x.number)
        # XLA adds first, and then sums over devices; but not over the border of a loop.
        if first is not other and first.place is other.place:
            other.first = first
        op.outs[0].sum = sums[0]


def _constrained(op: Applied) -> None:
    x = op.ins[0]
    if not is_of_plan(op.eqn):
        op.program.placed.append(op.param(names.PARAM_SHARDING))
    if is_kept(op.eqn):
        if x.sum is not None:
            x.sum.scattered = True
    # `fully_shard` constrains a weight to where it is used; what is still a sum is no weight.
    elif x.sum is None:
        op.program.moves.append(Event(op.place, bytes_of(op.in_avals[0]), x.nodes))


def _converted(op: Applied) -> None:
    sum_ = op.ins[0].sum
    if sum_ is not None:
        # It may be summed before it is converted.
        sum_.amount = min(sum_.amount, bytes_of(op.out_avals[0]))
        op.outs[0].sum = sum_


def _named(op: Applied) -> None:
    name = op.param(names.PARAM_NAME)
    op.program.origins[name] = op.ins[0].origin
    op.program.named[name] = Event(op.place, bytes_of(op.in_avals[0]), op.ins[0].nodes)


def _put(op: Applied) -> None:
    aval, out = op.in_avals[0], op.out_avals[0]
    if is_on_host(aval) != is_on_host(out):
        op.program.offloads.append(Event(op.place, bytes_of(aval), op.ins[0].nodes))


# What else some of them tell.
_SPECIAL: Rules = {
    **dict.fromkeys(names.ADDS, _added),
    names.CHECKPOINT_NAME: _named,
    names.CONSTRAINT: _constrained,
    names.CONVERT: _converted,
    names.DEVICE_PUT: _put,
}
RULES: Rules = {**dict.fromkeys(names.BY_ELEMENT, by_element), names.BARRIER: barrier}

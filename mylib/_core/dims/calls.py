"""Loops, conditions and other calls of jaxprs, whose operations say how they may be split."""

from ..compat import names, opened
from ..jaxprs import jaxprs_in, loop_of, only_calls_back
from .applied import Applied, Operand, Rules
from .equations import is_of_plan
from .program import Place


def _loop(op: Applied) -> None:
    """A scan, or a `while_loop`: how often that runs depends on data, so it counts once."""
    loop = loop_of(op.eqn.source, op.ins)
    assert loop is not None, op.eqn.name
    before, carry, xs = loop.constants, loop.carry, loop.slices
    body, start, carried = opened(loop.body), len(before), len(carry)
    inside = [op.program.fresh(var.aval) for var in body.invars[start : start + carried]]
    for nodes, value, out in zip(inside, carry, op.outs, strict=False):
        op.tie_all(nodes, value.nodes, out.nodes)
    # Iterations follow each other, so their dimension can't be split to any use.
    op.program.loops.update(x.nodes[0] for x in xs if x.nodes)
    operands = [Operand(x.nodes, origin=x.origin) for x in before]
    operands += [
        Operand(nodes, origin=x.origin, carried=i)
        for i, (nodes, x) in enumerate(zip(inside, carry, strict=True))
    ]
    operands += [Operand(x.nodes[1:], origin=x.origin) for x in xs]
    # A loop over micro-batches is outside of layers, and iterates over no weights.
    top = op.top and all(x.origin is None for x in xs)
    place = _iterations(op)
    results = op.through(body, operands, place, top)
    for i, (nodes, value, out) in enumerate(zip(inside, results, op.outs, strict=False)):
        op.tie_all(nodes, value.nodes)
        # Each iteration only adds to it: XLA all-reduces it once, after the loop.
        if value.carried == i and value.sum is not None:
            out.sum, value.sum.root.after = value.sum, op.place
    for out, value in zip(op.outs[carried:], results[carried:], strict=True):
        op.tie_all(out.nodes[1:], value.nodes)
    op.end_of_part(are_apart=False)
    for x in (*loop.of_test, *before):
        op.hand_on(x.nodes)
    for x in xs:
        op.hand_on(x.nodes[1:])
    if loop.test is not None:
        inner = [Operand(nodes) for nodes in inside]
        (going_on,) = op.through(opened(loop.test), [*loop.of_test, *inner], place)
        # Under `jax.vmap` the loop ends when the last row does.
        op.program.undivided += going_on.nodes


def _iterations(op: Applied) -> Place:
    """The body of a loop here."""
    places, is_scan = op.program.places, op.eqn.name == names.SCAN
    count = op.param(names.PARAM_LENGTH) if is_scan else 1
    if not is_scan:
        op.program.counted_once.append(op.line)
    places.append(Place(len(places), op.place.times * count, op.place.number))
    return places[-1]


def _call(op: Applied) -> None:
    """A checkpoint, or the branches of a condition, all of which are counted."""
    branches = jaxprs_in(op.eqn.source)
    called = [x for x in branches if not only_calls_back(x)]
    # What a callback does is unknown.
    is_known = len(called) == len(branches)
    join = op.tie_all if is_known else op.dims.join_all
    for inner in map(opened, called):
        operands = op.ins[len(op.ins) - len(inner.invars) :]
        results = op.through(inner, operands, op.place)
        for out, value in zip(op.outs, results, strict=True):
            join(out.nodes, value.nodes)
            out.origin = value.origin
            # Which of several branches makes the sum is known only while the program runs.
            if len(called) == 1:
                out.sum, out.carried = value.sum, value.carried
    op.end_of_part(are_apart=False)
    if is_known:
        for x in op.ins:
            op.hand_on(x.nodes)


def _by_matrix(op: Applied) -> None:
    """The updates of `by_matrix`, whose price is that of its layout on each mesh."""
    if not is_of_plan(op.eqn):
        op.unknown()
        return
    for x, out in zip(op.ins, op.outs, strict=False):
        if len(x.nodes) == len(out.nodes):
            op.dims.join_all(x.nodes, out.nodes)


RULES: Rules = {
    names.COND: _call,
    names.REMAT: _call,
    names.SCAN: _loop,
    names.SHARD_MAP: _by_matrix,
    names.WHILE: _loop,
}

"""Operations that rearrange, cut, or run along some dimensions."""

import itertools
from numbers import Integral

from ..compat import names
from ..jaxprs import shape_of
from .applied import Applied, Rules, without
from .dims import pairs_of_reshape


def _transposed(op: Applied) -> None:
    order = op.param(names.PARAM_PERMUTATION)
    op.tie_all(op.outs[0].nodes, [op.ins[0].nodes[i] for i in order])


def _reshaped(op: Applied) -> None:
    xs, ys = op.ins[0].nodes, op.outs[0].nodes
    for i, j in pairs_of_reshape(op.shape(0), shape_of(op.out_avals[0])):
        op.tie(xs[i], ys[j])


def _broadcast(op: Applied) -> None:
    out_shape, dims = shape_of(op.out_avals[0]), op.param(names.PARAM_BROADCAST_DIMENSIONS)
    # A dimension of size 1 that is repeated has no parts.
    kept = {j: op.ins[0].nodes[i] for i, j in enumerate(dims) if op.shape(0)[i] == out_shape[j]}
    for j, node in enumerate(op.outs[0].nodes):
        op.tie(*([kept[j]] if j in kept else ()), node)


def _reduced(op: Applied) -> None:
    axes, nodes = op.param(names.PARAM_AXES), op.ins[0].nodes
    # Otherwise it is a collective.
    if not all(isinstance(axis, Integral) for axis in axes):
        op.unknown()
        return
    for x, out in zip(op.ins, op.outs, strict=True):
        op.tie_all(out.nodes, without(x.nodes, axes))
        op.end_of_part()
    # Over dimensions of size 1 nothing is reduced.
    if not op.keeps_bytes():
        op.sum_over(nodes[i] for i in axes)
    # A maximum takes a collective of the same size, but no part of a later sum.
    if op.eqn.name not in names.SUMS:
        op.outs[0].sum = None


def _along(op: Applied) -> None:
    """It runs along some dimensions, which one side may lack. The others stay as they are."""
    params = (names.PARAM_AXIS, names.PARAM_DIMENSION, names.PARAM_DIMENSIONS)
    along = next(op.param(name) for name in params if name in op.eqn.params)
    axes = along if isinstance(along, tuple) else (along,)
    arrays = [x.nodes for x in (*op.ins, *op.outs)]
    rank = max(map(len, arrays))
    op.tie_all(*(without(x, axes) if len(x) == rank else x for x in arrays))
    first, shape = op.ins[0].nodes, op.shape(0)
    op.needs_whole(first[i] for i in axes if len(first) == rank and shape[i] > 1)


def _cut(op: Applied) -> None:
    """Dimensions that keep their size stay as they are; of the others a part is read or written."""
    whole: list[int] = []
    operands = zip(op.ins, op.in_avals, strict=True)
    results = zip(op.outs, op.out_avals, strict=True)
    for (x, aval), (out, out_aval) in itertools.product(operands, results):
        # A scalar operand, such as the start of a slice, has no dimensions.
        dims = zip(x.nodes, out.nodes, shape_of(aval), shape_of(out_aval), strict=False)
        for a, b, before, after in dims:
            if before == after:
                op.dims.join(a, b)
            elif before > 1:
                whole.append(a)
    op.needs_whole(whole)
    rank = len(op.outs[0].nodes)
    arrays = [x.nodes for x in (*op.ins, *op.outs) if len(x.nodes) == rank]
    for i, nodes in enumerate(zip(*arrays, strict=True)):
        if not _is_touched(op, i) and len(set(op.dims.sizes(nodes))) == 1:
            op.tie(*nodes)


def _is_touched(op: Applied, i: int) -> bool:
    """Whether the operation treats numbers by where they are along a dimension, though it may have
    the same size in all arrays.
    """
    if op.eqn.name in names.WINDOWS:
        params = (names.PARAM_WINDOW, names.PARAM_STRIDES, names.PARAM_PADDING)
        return [op.param(name)[i] for name in params] != [1, 1, (0, 0)]
    if op.eqn.name == names.PAD:
        return any(op.param(names.PARAM_PADDING_CONFIG)[i])
    # Random numbers depend on all places.
    along = op.eqn.params.get(names.PARAM_DIMENSION)
    return along == i or (along is None and op.eqn.name in names.NUMBERED)


RULES: Rules = {
    **dict.fromkeys(names.REDUCTIONS, _reduced),
    **dict.fromkeys(names.ALONG, _along),
    **dict.fromkeys(names.CUTS | names.MADE, _cut),
    names.BROADCAST: _broadcast,
    names.RESHAPE: _reshaped,
    names.TRANSPOSE: _transposed,
}

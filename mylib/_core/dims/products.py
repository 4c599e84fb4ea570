"""Products: of matrices, of each expert's rows, and with the windows of a convolution."""

import math
from collections.abc import Sequence
from typing import Any

from ..compat import names
from ..known_faults import CONVOLVED
from ..products import products_of_equation
from .applied import Applied, Rules, without


def _dot(op: Applied) -> None:
    numbers = op.param(names.PARAM_DIMENSION_NUMBERS)
    for out, made in zip(op.outs[0].nodes, _factors(op, numbers), strict=True):
        op.tie(out, *made)
    over = tuple(op.ins[0].nodes[i] for i in numbers[0][0])
    op.product(2.0 * products_of_equation(op.eqn.source), over)


def _factors(op: Applied, numbers: Any, grouped: Sequence[int] = ()) -> list[tuple[int, ...]]:
    """Joins the dimensions that two factors share. Returns those of which the result's are made, in
    JAX's order: rows of both, then the free dimensions of each factor.
    """
    (left, right), (left_rows, right_rows) = numbers
    a, b = (x.nodes for x in op.ins[:2])
    for i, j in zip(left, right, strict=True):
        op.dims.join(a[i], b[j])
    rows = [(a[i], b[j]) for i, j in zip(left_rows, right_rows, strict=True)]
    free = [*without(a, (*left, *left_rows)), *without(b, (*right, *right_rows, *grouped))]
    return [*rows, *((x,) for x in free)]


def _ragged(op: Applied) -> None:
    """A product of each expert's rows, which are whole, as their number depends on data."""
    numbers = op.param(names.PARAM_RAGGED)
    (left, right), (_, right_rows) = numbers.dot_dimension_numbers
    ragged, grouped = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    a, b, out = (x.nodes for x in (*op.ins[:2], op.outs[0]))
    is_weights = not grouped  # the gradient of the experts' weights has a dimension for them
    whole = [*(a[i] for i in ragged), *(b[i] for i in grouped), *out[:is_weights]]
    made = _factors(op, numbers.dot_dimension_numbers, grouped)
    for node, of in zip(out[is_weights:], made, strict=True):
        if set(of).isdisjoint(whole):
            op.tie(node, *of)
        else:
            op.dims.join(node, of[0])
    op.needs_whole(whole)
    free = without(op.shape(1), (*right, *right_rows, *grouped))
    over = tuple(a[i] for i in left if i not in ragged)
    op.product(2.0 * math.prod((*op.shape(0), *free)), over)


def _convolution(op: Applied) -> None:
    numbers = op.param(names.PARAM_DIMENSION_NUMBERS)
    lhs, rhs, out = (list(x) for x in (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec))
    by_batch = op.param(names.PARAM_BATCH_GROUPS) > 1
    by_feature = op.param(names.PARAM_FEATURE_GROUPS) > 1
    a, b = (x.nodes for x in op.ins[:2])
    out_nodes = op.outs[0].nodes
    # Dimensions of space stay apart: a window reaches over the border of a part.
    if CONVOLVED.has(op.eqn.source):
        op.program.convolved.append((op.line, a[lhs[1]], by_batch))
    if not by_batch:
        op.tie(a[lhs[0]], out_nodes[out[0]])
    features = b[rhs[0]], out_nodes[out[1]]
    if by_batch or by_feature:
        # A part has other groups.
        op.dims.join(*features)
    else:
        op.dims.join(a[lhs[1]], b[rhs[1]])
        op.tie(*features)
    op.product(2.0 * products_of_equation(op.eqn.source), (b[rhs[1]],))


RULES: Rules = {
    names.CONVOLUTION: _convolution,
    names.DOT: _dot,
    names.RAGGED_DOT: _ragged,
}

"""Operations that read or write slices of a table, at places that are data."""

from collections.abc import Sequence

from ..compat import names
from ..jaxprs import shape_of
from .applied import Applied, Operand, Rules, without


def _gathered(op: Applied) -> None:
    numbers = op.param(names.PARAM_DIMENSION_NUMBERS)
    sizes, gone = op.param(names.PARAM_SLICE_SIZES), numbers.collapsed_slice_dims
    of_indices = numbers.start_indices_batching_dims
    out = op.outs[0], shape_of(op.out_avals[0])
    _, parts = _slices(op, *out, numbers.offset_dims, gone, of_indices)
    table = op.ins[0].nodes
    # A slice of several places may reach over the border of a part.
    looked_up = [table[i] for i in (*gone, *(i for i in parts if sizes[i] == 1))]
    # Each device looks up the rows that it has, and the results are summed.
    op.sum_over(looked_up)
    op.outs[0].sum = None
    op.needs_whole(table[i] for i in parts if sizes[i] != 1)


def _scattered(op: Applied) -> None:
    numbers = op.param(names.PARAM_DIMENSION_NUMBERS)
    op.dims.join_all(op.outs[0].nodes, op.ins[0].nodes)
    window, gone = numbers.update_window_dims, numbers.inserted_window_dims
    of_indices = numbers.scatter_indices_batching_dims
    rows, _ = _slices(op, op.ins[2], op.shape(2), window, gone, of_indices)
    # Each device adds the rows that it has to a table of its own.
    op.sum_over(rows)


def _slices(
    op: Applied,
    slices: Operand,
    shape: Sequence[int],
    window: Sequence[int],
    gone: Sequence[int],
    of_indices: Sequence[int],
) -> tuple[list[int], list[int]]:
    """Joins the dimensions of a table, of indices, and of slices of the table there, whose
    dimensions `window` are the table's without those that are `gone`. Returns the slices' rows,
    and the dimensions of the table that a slice has only a part of.
    """
    table, indices = (x.nodes for x in op.ins[:2])
    of_table = op.param(names.PARAM_DIMENSION_NUMBERS).operand_batching_dims
    # Of the table that is written there are two.
    written = [] if slices is op.outs[0] else [op.outs[0].nodes]
    parts: list[int] = []
    for u, i in zip(window, without(range(len(table)), (*gone, *of_table)), strict=True):
        if shape[u] == op.shape(0)[i]:
            op.tie(slices.nodes[u], table[i], *(x[i] for x in written))
        else:
            parts.append(i)
    rows = without(slices.nodes, window)
    in_table = dict(zip(of_indices, of_table, strict=True))
    # The last dimension of the indices has the coordinates of each.
    for j, (row, index) in enumerate(zip(rows, indices[:-1], strict=True)):
        if j in in_table:
            op.tie(row, index, *(x[in_table[j]] for x in (table, *written)))
        elif written:
            op.dims.join(row, index)
        else:
            op.tie(row, index)
    return rows, parts


RULES: Rules = {
    **dict.fromkeys(names.SCATTERS, _scattered),
    names.GATHER: _gathered,
}

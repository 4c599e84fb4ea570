"""Where the blocks of a gathered array are, one from each device, after operations that move them.

An all-gather returns the parts of several devices as blocks along a dimension. Later a block may be
taken, or all of them summed; whether that is so is known as long as it is known where they are.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from .attributes import factors_of, labels_of
from .hlo import Array, Instruction
from .opcodes import Likeness
from .values import Value, computed, constant


class At(NamedTuple):
    """The blocks lie along dimension `dim`, each of `stride` elements, `blocks` in a row, so
    that element i is of block `i // stride % blocks`. If a sort has put the elements into its
    `order`, each is somewhere among them: then only the sum of all is known.
    """

    dim: int
    stride: int
    blocks: int
    order: str = ""

    def along(self, dims: Mapping[int, int], adding: bool = False) -> "At | None":
        """Where they are after a move of these dimensions, without others; or in an operation that
        is `adding` all that lie along them.
        """
        known = self.dim in dims and (adding or not self.order)
        return self._replace(dim=dims[self.dim]) if known else None

    def beside(self, dim: int) -> "At | None":
        """Where they are after something that takes apart this dimension."""
        return None if self.dim == dim or self.order else self


def after_move(x: Instruction, at: At) -> At | None:
    """Where the blocks of its first operand are in the result of an operation that moves all
    elements, or broadcasts; None if they are torn apart.
    """
    before, after = x.operand(0).arrays[0], x.arrays[0]
    match x.opcode:
        case "transpose":
            return at._replace(dim=x.dims().index(at.dim))
        case "broadcast":
            return at._replace(dim=x.dims()[at.dim])
        case "reshape":
            return _reshaped(before.shape, after.shape, at)
        case "bitcast":
            return _bitcast(before, after, at)
    return at if before.shape == after.shape else None


def _reshaped(before: Sequence[int], after: Sequence[int], at: At) -> At | None:
    # In elements of the flat array; then the innermost dimension in which they are whole steps.
    stride = at.stride * math.prod(before[at.dim + 1 :])
    for dim in reversed(range(len(after))):
        inner = math.prod(after[dim + 1 :])
        if stride % inner == 0 and after[dim] % (stride // inner * at.blocks) == 0:
            return at._replace(dim=dim, stride=stride // inner)
    return None


def _bitcast(before: Array, after: Array, at: At) -> At | None:
    # It is a reshape of what lies in memory.
    old, new = before.order, after.order
    shapes = [before.shape[i] for i in old], [after.shape[i] for i in new]
    moved = _reshaped(*shapes, at._replace(dim=old.index(at.dim)))
    return moved and moved._replace(dim=new[moved.dim])


def after_sort(x: Instruction, at: At) -> At:
    """Where the blocks of each operand are in the results of a sort."""
    return at._replace(order=x.name) if [at.dim] == x.dims() else at


def after_gather(x: Instruction, at: At) -> At | None:
    """Where they are in a gather that returns each row of its first operand once, in the order of a
    sort. The TPU's compiler adds many rows to a table so.
    """
    rows = x.dims_if_any("collapsed_slice_dims")
    others = [dim for dim in range(len(x.arrays[0].shape)) if dim not in rows]
    whole = x.arrays[0].shape == x.operand(0).arrays[0].shape
    if not whole or len(rows) != 1 or x.dims_if_any("offset_dims") != others:
        return None
    order = _permutation(x.operand(1), x.arrays[0].shape[rows[0]])
    if order is None:
        return None
    return at._replace(order=order) if [at.dim] == rows else at


def _permutation(x: Instruction, count: int) -> str | None:
    """The sort that has put the numbers from 0 to `count` into an order, if these are they."""
    x, path = computed(Value(x))
    match x.does:
        case "sort":
            sorted_numbers = computed(Value(x.operand(path[0] if path else 0))).made_by
            is_each = sorted_numbers.opcode == "iota" and sorted_numbers.arrays[0].shape == (count,)
            return x.name if is_each else None
        case "slice" if x.arrays[0].shape == x.operand(0).arrays[0].shape:
            return _permutation(x.operand(0), count)
        case "clamp" if (_single(x.operand(0)), _single(x.operand(2))) == (0, count - 1):
            return _permutation(x.operand(1), count)
        case "custom-call" if x.row.like >= Likeness.VALUE:
            return _permutation(x.operand(0), count)
    return None


def _single(x: Instruction) -> int | None:
    """The number that all elements of an array are, if it is constant."""
    x = computed(Value(x)).made_by
    return constant(Value(x.operand(0) if x.opcode == "broadcast" else x))


# Of a factor the dimensions that are summed over, and where the others are in the product.
_Factor = tuple[Sequence[int], dict[int, int]]


def _of_dot(x: Instruction) -> Iterator[_Factor]:
    *batches, lhs, rhs = factors_of(x)
    first = len(batches[0])
    for y, batch, contracted in zip(x.inputs()[:2], batches, (lhs, rhs), strict=True):
        free = [dim for dim in range(len(y.arrays[0].shape)) if dim not in {*batch, *contracted}]
        places = {dim: i for i, dim in enumerate(batch)}
        yield contracted, places | {dim: first + i for i, dim in enumerate(free)}
        first += len(free)


def _of_convolution(x: Instruction) -> Iterator[_Factor]:
    """Without the dimensions of the window."""
    lhs, rhs, out = labels_of(x)
    yield [lhs.index("f")], {lhs.index("b"): out.index("b")}
    yield [rhs.index("i")], {rhs.index("o"): out.index("f")}


def after_product(x: Instruction, operand: int, at: At) -> At | None:
    """Where they are in a product, whose factor this `operand` is: in no dimension (-1) if it sums
    over them. None if that is unknown.
    """
    if operand > 1 or x.row.count not in ("dot", "convolution", "gemm") or "conv" in x.target:
        return None
    factors = [*(_of_convolution if x.does == "convolution" else _of_dot)(x)]
    contracted, free = factors[operand]
    if at.dim in contracted and not at.order:
        return At(-1, 1, at.blocks)
    return at.along(free)

"""Where the blocks of a gathered array are, one from each device, after operations that move them.

An all-gather returns the parts of several devices as blocks along a dimension. Later a block may be
taken, or all of them summed; whether that is so is known as long as it is known where they are.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from .._errors import AuditError
from .hlo import Array, Instruction, numbers


class At(NamedTuple):
    """The blocks lie along dimension `dim`, each of `stride` elements, `blocks` in a row, so
    that element i is of block `i // stride % blocks`.
    """

    dim: int
    stride: int
    blocks: int

    def along(self, dims: Mapping[int, int]) -> "At | None":
        """Where they are after a move of these dimensions, without others."""
        return self._replace(dim=dims[self.dim]) if self.dim in dims else None

    def beside(self, dim: int) -> "At | None":
        """Where they are after something that takes apart this dimension."""
        return None if self.dim == dim else self


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
            return At(dim, stride // inner, at.blocks)
    return None


def _order(array: Array) -> list[int]:
    """The dimensions in the order in which they lie in memory, the outermost first."""
    order = numbers(array.layout.split(":")[0])
    return order[::-1] if len(order) == len(array.shape) else [*range(len(array.shape))]


def _bitcast(before: Array, after: Array, at: At) -> At | None:
    # It is a reshape of what lies in memory.
    old, new = _order(before), _order(after)
    shapes = [before.shape[i] for i in old], [after.shape[i] for i in new]
    moved = _reshaped(*shapes, at._replace(dim=old.index(at.dim)))
    return moved and moved._replace(dim=new[moved.dim])


def factors_of(x: Instruction) -> tuple[Sequence[int], ...]:
    """The batch dimensions of the two factors, and the contracted ones."""
    kinds = ("lhs_batch", "rhs_batch", "lhs_contracting", "rhs_contracting")
    if not x.target:
        return tuple(numbers(x.attributes.get(f"{kind}_dims", "")) for kind in kinds)
    found = [re.search(rf'"{kind}_dimensions": ?\[([^\]]*)\]', x.text) for kind in kinds]
    if found[2] is None or found[3] is None:
        raise AuditError(f"the settings of {x} don't name the dimensions that it contracts")
    return tuple(numbers(match[1]) if match else [] for match in found)


def labels_of(x: Instruction) -> list[str]:
    """What the dimensions of a convolution's input, kernel and result are."""
    labels = re.fullmatch(r"([^_]*)_([^-]*)->(.*)", x.attribute("dim_labels"))
    if labels is None:
        raise AuditError(f"the dim_labels of {x} are not understood")
    return [*labels.groups()]


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
    return At(-1, 1, at.blocks) if at.dim in contracted else at.along(free)

"""Where the blocks of a gathered array are, one from each device, after operations that move them.

An all-gather returns the parts of several devices as blocks along a dimension. Later a block may be
taken, or all of them summed; whether that is so is known as long as it is known where they are.
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from .._errors import AuditError
from .hlo import Array, Instruction


class At(NamedTuple):
    """The blocks lie along dimension `dim`, each of `stride` elements, `blocks` in a row, so
    that element i is of block `i // stride % blocks`.
    """

    dim: int
    stride: int
    blocks: int


def numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


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
    old, new = _order(before), _order(after)
    shapes = [before.shape[i] for i in old], [after.shape[i] for i in new]
    moved = _reshaped(*shapes, at._replace(dim=old.index(at.dim)))
    return moved and moved._replace(dim=new[moved.dim])


def after_reduce(x: Instruction, at: At) -> At | None:
    """Where they are after a reduction; None if it is over the blocks."""
    reduced = x.dims()
    if at.dim in reduced:
        return None
    return at._replace(dim=at.dim - sum(dim < at.dim for dim in reduced))


def sliced(x: Instruction, at: At) -> range | None:
    """The indices along the blocks' dimension that a slice takes."""
    bounds = re.findall(r"\[(\d+):(\d+)(?::(\d+))?\]", x.attribute("slice"))
    if len(bounds) <= at.dim:
        return None
    first, last, step = bounds[at.dim]
    return range(int(first), int(last), int(step or 1))


def factors_of(x: Instruction) -> tuple[Sequence[int], ...]:
    """The batch dimensions of the two factors, and the contracted ones."""
    kinds = ("lhs_batch", "rhs_batch", "lhs_contracting", "rhs_contracting")
    if not x.target:
        return tuple(numbers(x.attributes.get(f"{kind}_dims", "")) for kind in kinds)
    found = [re.search(rf'"{kind}_dimensions": ?\[([^\]]*)\]', x.text) for kind in kinds]
    if found[2] is None or found[3] is None:
        raise AuditError(f"the settings of {x} don't say which dimensions it contracts")
    return tuple(numbers(match[1]) if match else [] for match in found)


def _of_dot(x: Instruction) -> list[tuple[Sequence[int], dict[int, int]]]:
    *batches, lhs, rhs = factors_of(x)
    ranks = [len(y.arrays[0].shape) for y in x.inputs()[:2]]
    first = len(batches[0])
    found: list[tuple[Sequence[int], dict[int, int]]] = []
    for batch, contracted, rank in zip(batches, (lhs, rhs), ranks, strict=True):
        free = [dim for dim in range(rank) if dim not in {*batch, *contracted}]
        places = {dim: first + i for i, dim in enumerate(free)}
        found.append((contracted, {dim: i for i, dim in enumerate(batch)} | places))
        first += len(free)
    return found


def _of_convolution(x: Instruction) -> list[tuple[Sequence[int], dict[int, int]]]:
    """Without the dimensions of the window."""
    lhs, rhs, out = re.split("_|->", x.attribute("dim_labels"))
    return [
        ([lhs.index("f")], {lhs.index("b"): out.index("b")}),
        ([rhs.index("i")], {rhs.index("o"): out.index("f")}),
    ]


def after_product(x: Instruction, operand: int, at: At) -> At | bool | None:
    """Where they are in a product, whose factor this `operand` is: True if it sums over them. None
    if that is unknown.
    """
    if operand > 1 or x.row.count not in ("dot", "convolution", "gemm") or "conv" in x.target:
        return None
    contracted, free = (_of_convolution if x.does == "convolution" else _of_dot)(x)[operand]
    if at.dim in contracted:
        return True
    return at._replace(dim=free[at.dim]) if at.dim in free else None

"""What the attributes of products, and of operations with windows, say about dimensions."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from ..._core.errors import AuditError
from .hlo import Instruction, numbers


def factors_of(x: Instruction) -> tuple[Sequence[int], ...]:
    """The batch dimensions of the two factors, and the contracted ones."""
    kinds = ("lhs_batch", "rhs_batch", "lhs_contracting", "rhs_contracting")
    if not x.target:
        return tuple(x.dims_if_any(f"{kind}_dims") for kind in kinds)
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


class SlidingWindow(NamedTuple):
    """A window, with a number for each of its dimensions: `holes` are between the elements that it
    is laid over, and `dilation` between its own.
    """

    size: list[int]
    stride: list[int]
    holes: list[int]
    dilation: list[int]
    reversed: list[bool]
    # Before the first element, and behind the last.
    pads: list[tuple[int, int]]


def window_of(x: Instruction, rank: int) -> SlidingWindow:
    """The window of an operation. It is left out where it covers one number, and each of its fields
    where it does nothing.
    """
    fields = dict(re.findall(r"(\w+)=([\d_x\-]+)", x.attributes.get("window", "")))

    def each(name: str, nothing: str = "1") -> list[str]:
        return fields[name].split("x") if name in fields else [nothing] * rank

    names = "size", "stride", "lhs_dilate", "rhs_dilate"
    size, stride, holes, dilation = ([*map(int, each(name))] for name in names)
    is_reversed = [text == "1" for text in each("rhs_reversal", "0")]
    pads = [pad.split("_") for pad in each("pad", "0_0")]
    bounds = [(int(before), int(behind)) for before, behind in pads]
    return SlidingWindow(size, stride, holes, dilation, is_reversed, bounds)

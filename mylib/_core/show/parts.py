"""An array cut into the parts that devices hold, as a drawing shows it."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jax.sharding import Sharding

from ..placement import Bounds, Shape, Span, parts_of, regions_of


def overlap(a: Bounds, b: Bounds) -> int:
    """How many elements two parts have in common."""
    return math.prod(
        max(0, min(stop, end) - max(start, begin))
        for (start, stop), (begin, end) in zip(a, b, strict=True)
    )


def size_of(part: Bounds) -> int:
    return math.prod(stop - start for start, stop in part)


@dataclass(frozen=True)
class Partition:
    """An array cut into parts, as a drawing shows it.

    **Attributes:**

    - `parts`: the part that each device holds.
    - `holders`: the devices that hold each part.
    - `spans`: the spans that each dimension is cut into, in order.
    - `down`, `across`: the dimensions that are rows and columns; None for none.
    - `panels`: the other dimensions that are cut.
    """

    parts: Mapping[Any, Bounds]
    holders: dict[Bounds, list[Any]]
    spans: list[list[Span]]
    down: int | None
    across: int | None
    panels: list[int]

    @cached_property
    def numbers(self) -> dict[Bounds, int]:
        """The number of each part, in the order of the array. Drawings colour parts by it."""
        return {part: number for number, part in enumerate(sorted(self.holders))}

    def cell(self, panel: tuple[Span, ...], row: Span | None, column: Span | None) -> Bounds:
        """The part that a cell of a drawing shows."""
        chosen = {**dict(zip(self.panels, panel, strict=True)), self.down: row, self.across: column}
        return tuple(chosen.get(dim) or spans[0] for dim, spans in enumerate(self.spans))

    def along(self, dim: int | None) -> list[Any]:
        return [None] if dim is None else list(self.spans[dim])

    def all_panels(self) -> list[tuple[Span, ...]]:
        return list(itertools.product(*(self.spans[dim] for dim in self.panels)))


def partition_of(place: Sharding, shape: Shape) -> Partition:
    parts, holders = parts_of(place, shape), regions_of(shape, place)
    spans = [sorted({part[dim] for part in holders}) for dim in range(len(shape))]
    cut = [dim for dim in range(len(shape)) if len(spans[dim]) > 1]
    if len(cut) > 1:
        return Partition(parts, holders, spans, cut[-2], cut[-1], cut[:-2])
    dim = cut[0] if cut else None
    # As arrays are printed, the last dimension runs across, unless that gets too wide.
    if dim is None or (dim == len(shape) - 1 and len(spans[dim]) <= _WIDE):
        return Partition(parts, holders, spans, None, dim, [])
    return Partition(parts, holders, spans, dim, None, [])


# Draw at most this many parts side by side.
_WIDE = 8


def show_span(span: Span, dim: int) -> str:
    """A span as one would index the array."""
    return ":" if span == (0, dim) else f"{span[0]}:{span[1]}"

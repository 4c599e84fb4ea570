"""Which part of an array each device holds."""

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from .._placement import AnyMesh, axis_names, entries_of

Span = tuple[int, int]
"""Where a part starts and stops in one dimension."""
Part = tuple[Span, ...]
Shape = tuple[int, ...]


def parts_of(place: Sharding, shape: Shape) -> dict[Any, Part]:
    """The part of an array of this shape that each device holds. The devices of an abstract mesh
    are numbered.
    """
    if isinstance(place, NamedSharding):
        # Not `devices_indices_map`: an abstract mesh has no devices, and a size may be uneven.
        return _parts_over_mesh(place, shape)
    return {
        device: tuple(cut.indices(dim)[:2] for cut, dim in zip(index, shape, strict=True))
        for device, index in place.devices_indices_map(shape).items()
    }


def _parts_over_mesh(place: NamedSharding, shape: Shape) -> dict[Any, Part]:
    mesh = place.mesh
    # The position of each device on each axis.
    at = dict(zip(mesh.axis_names, np.indices(mesh.axis_sizes), strict=True))
    entries = [axis_names(entry) for entry in entries_of(place.spec)[: len(shape)]]
    entries += [()] * (len(shape) - len(entries))
    spans = [
        _spans(dim, [(at[name], mesh.shape[name]) for name in names], mesh.size)
        for dim, names in zip(shape, entries, strict=True)
    ]
    parts = zip(*spans, strict=True) if spans else [()] * mesh.size
    return dict(zip(devices_of(mesh), parts, strict=True))


def _spans(dim: int, axes: list[tuple[np.ndarray, int]], devices: int) -> list[Span]:
    """Each device's span of a dimension that is split over these axes."""
    numbers, parts = np.zeros(devices, int), 1
    for positions, size in axes:
        numbers, parts = numbers * size + positions.ravel(), parts * size
    chunk = -(-dim // parts)
    spans = [(min(i * chunk, dim), min((i + 1) * chunk, dim)) for i in range(parts)]
    return [spans[number] for number in numbers.tolist()]


def devices_of(mesh: AnyMesh) -> list[Any]:
    """The devices of a mesh in its order, or their numbers if it is abstract."""
    return list(range(mesh.size)) if isinstance(mesh, AbstractMesh) else list(mesh.devices.flat)


def overlap(one: Part, other: Part) -> int:
    """How many elements two parts have in common."""
    return math.prod(
        max(0, min(stop, end) - max(start, begin))
        for (start, stop), (begin, end) in zip(one, other, strict=True)
    )


def size_of(part: Part) -> int:
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

    parts: dict[Any, Part]
    holders: dict[Part, list[Any]]
    spans: list[list[Span]]
    down: int | None
    across: int | None
    panels: list[int]

    @cached_property
    def _numbers(self) -> dict[Part, int]:
        return {part: number for number, part in enumerate(sorted(self.holders))}

    def number(self, part: Part) -> int:
        """The number of a part, in the order of the array. Drawings colour parts by it."""
        return self._numbers[part]

    def cell(self, panel: tuple[Span, ...], row: Span | None, column: Span | None) -> Part:
        """The part that a cell of a drawing shows."""
        chosen = dict(zip(self.panels, panel, strict=True))
        for dim, span in ((self.down, row), (self.across, column)):
            if dim is not None and span is not None:
                chosen[dim] = span
        return tuple(chosen.get(dim, spans[0]) for dim, spans in enumerate(self.spans))

    def along(self, dim: int | None) -> list[Any]:
        return [None] if dim is None else list(self.spans[dim])

    def all_panels(self) -> list[tuple[Span, ...]]:
        return list(itertools.product(*(self.spans[dim] for dim in self.panels)))


def partition_of(place: Sharding, shape: Shape) -> Partition:
    parts, holders = parts_of(place, shape), dict[Part, list[Any]]()
    for device, part in parts.items():
        holders.setdefault(part, []).append(device)
    spans = [sorted({part[dim] for part in holders}) for dim in range(len(shape))]
    cut = [dim for dim in range(len(shape)) if len(spans[dim]) > 1]
    if len(cut) > 1:
        return Partition(parts, holders, spans, cut[-2], cut[-1], cut[:-2])
    dim = cut[0] if cut else None
    # As arrays are printed, the last dimension runs across, unless that gets too wide.
    if dim is None or (dim == len(shape) - 1 and len(spans[dim]) <= _WIDE):
        return Partition(parts, holders, spans, None, dim, [])
    return Partition(parts, holders, spans, dim, None, [])


_WIDE = 8


def show_span(span: Span, dim: int) -> str:
    """A span as one would index the array."""
    return ":" if span == (0, dim) else f"{span[0]}:{span[1]}"


def show_part(part: Part, shape: Shape) -> str:
    return f"[{', '.join(show_span(span, dim) for span, dim in zip(part, shape, strict=True))}]"

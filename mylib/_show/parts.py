"""Which part of an array each device holds."""

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

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
    entries = [axis_names(entry) for entry in entries_of(place.spec)[: len(shape)]]
    entries += [()] * (len(shape) - len(entries))
    coordinates = itertools.product(*map(range, mesh.shape.values()))
    parts: dict[Any, Part] = {}
    for device, coordinate in zip(devices_of(mesh), coordinates, strict=True):
        at = dict(zip(mesh.axis_names, coordinate, strict=True))
        parts[device] = tuple(
            _span(dim, [(at[name], mesh.shape[name]) for name in names])
            for dim, names in zip(shape, entries, strict=True)
        )
    return parts


def devices_of(mesh: AnyMesh) -> list[Any]:
    """The devices of a mesh in its order, or their numbers if it is abstract."""
    return list(range(mesh.size)) if isinstance(mesh, AbstractMesh) else list(mesh.devices.flat)


def _span(dim: int, axes: list[tuple[int, int]]) -> Span:
    """The span of a dimension at a position on the axes that it is split over."""
    number, parts = 0, 1
    for position, size in axes:
        number, parts = number * size + position, parts * size
    chunk = -(-dim // parts)
    return min(number * chunk, dim), min((number + 1) * chunk, dim)


def overlap(one: Part, other: Part) -> int:
    """How many elements two parts have in common."""
    return math.prod(
        max(0, min(stop, end) - max(start, begin))
        for (start, stop), (begin, end) in zip(one, other, strict=True)
    )


def size_of(part: Part) -> int:
    return math.prod(stop - start for start, stop in part)


@dataclass(frozen=True)
class Cut:
    """An array cut into parts, as a drawing shows it.

    **Attributes:**

    - `holders`: the devices that hold each part.
    - `spans`: the spans that each dimension is cut into, in order.
    - `down`, `across`: the dimensions that are rows and columns; None for none.
    - `panels`: the other dimensions that are cut.
    """

    holders: dict[Part, list[Any]]
    spans: list[list[Span]]
    down: int | None
    across: int | None
    panels: list[int]

    @property
    def devices(self) -> list[Any]:
        return [device for holders in self.holders.values() for device in holders]

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


def cut_of(place: Sharding, shape: Shape) -> Cut:
    holders: dict[Part, list[Any]] = {}
    for device, part in parts_of(place, shape).items():
        holders.setdefault(part, []).append(device)
    spans = [sorted({part[dim] for part in holders}) for dim in range(len(shape))]
    cut = [dim for dim in range(len(shape)) if len(spans[dim]) > 1]
    if len(cut) > 1:
        return Cut(holders, spans, cut[-2], cut[-1], cut[:-2])
    dim = cut[0] if cut else None
    # As arrays are printed, the last dimension runs across, unless that gets too wide.
    if dim is None or (dim == len(shape) - 1 and len(spans[dim]) <= _WIDE):
        return Cut(holders, spans, None, dim, [])
    return Cut(holders, spans, dim, None, [])


_WIDE = 8


def show_span(span: Span, dim: int) -> str:
    """A span as one would index the array."""
    return ":" if span == (0, dim) else f"{span[0]}:{span[1]}"


def show_part(part: Part, shape: Shape) -> str:
    return f"[{', '.join(show_span(span, dim) for span, dim in zip(part, shape, strict=True))}]"

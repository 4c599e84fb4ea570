"""Which part of an array each device holds."""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from .shardings import AnyMesh, axis_names, entries_of, spec_over

Span = tuple[int, int]
"""Where a part starts and stops in one dimension."""
Bounds = tuple[Span, ...]
Shape = tuple[int, ...]


# Trees are repetitive.
@lru_cache(maxsize=64)
def parts_of(sharding: Sharding, shape: Shape) -> Mapping[Any, Bounds]:
    """The part of an array of this shape that each device holds. The devices of an abstract mesh
    are numbered.
    """
    if isinstance(sharding, NamedSharding):
        # Not `devices_indices_map`: an abstract mesh has no devices, and a size may be uneven.
        return _parts_over_mesh(sharding, shape)
    return {
        device: tuple(cut.indices(dim)[:2] for cut, dim in zip(index or (), shape, strict=True))
        for device, index in sharding.devices_indices_map(shape).items()
    }


def regions_of(shape: Shape, sharding: Sharding) -> dict[Bounds, list[Any]]:
    """The parts of an array, each with the devices that hold it, in the order of their numbers."""
    regions: dict[Bounds, list[Any]] = {}
    parts = parts_of(sharding, shape)
    for device in sorted(parts, key=lambda device: getattr(device, "id", device)):
        regions.setdefault(parts[device], []).append(device)
    return regions


def bytes_on_each(sharding: Sharding | None, shape: Shape, dtype: Any) -> int:
    """The bytes of an array that each device of its sharding holds; all without a sharding."""
    if isinstance(sharding, NamedSharding):
        # Not `shard_shape`, which refuses uneven sizes and raises inside shard_map.
        entries, sizes = entries_of(sharding.spec, len(shape)), sharding.mesh.shape
        pairs = zip(shape, entries, strict=False)
        shape = tuple(-(-n // math.prod(sizes[x] for x in axis_names(y))) for n, y in pairs)
    elif sharding is not None:
        shape = sharding.shard_shape(shape)
    return math.prod(shape) * dtype.itemsize


def _parts_over_mesh(sharding: NamedSharding, shape: Shape) -> Mapping[Any, Bounds]:
    mesh = sharding.mesh
    # The position of each device on each axis.
    at = dict(zip(mesh.axis_names, np.indices(mesh.axis_sizes), strict=True))
    spans = [
        _spans(dim, [(at[name], mesh.shape[name]) for name in axis_names(entry)], mesh.size)
        for dim, entry in zip(shape, spec_over(mesh, sharding, len(shape)), strict=False)
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

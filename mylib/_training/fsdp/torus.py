"""Gathers in two steps, for TPUs with a three-dimensional torus.

XLA turns one all-gather over all devices of such a slice into an all-reduce, which sends twice as
much, if there are 64 devices or more; and likewise a reduce-scatter. Two gathers in a row, each
over a part of the devices, stay gathers, and so do gathers over fewer devices or on
two-dimensional tori. Others have met this, too: https://github.com/pytorch/xla/pull/6528.

Needed with JAX 0.12.0. May go once `test_where_one_gather_is_an_all_reduce` of the tests
fails for a v5p of 4x4x4.
"""

import functools
import math

from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ..._core.placement import Target, axes_in, axis_names

_FEW = 32  # devices: up to here one gather stays a gather


def halfway(kept: Target | None, used: Target | None) -> NamedSharding | None:
    """The placement between the two gathers, or None if one gather is right."""
    if not isinstance(kept, NamedSharding) or not is_over_all_devices(kept, used):
        return None
    mesh = kept.mesh
    return _of_parts(kept.spec, mesh) if isinstance(mesh, Mesh) and _is_large_torus(mesh) else None


def is_over_all_devices(kept: NamedSharding, used: Target | None) -> bool:
    """Whether weights are split over all devices of the mesh, and used replicated."""
    if not (isinstance(used, NamedSharding) and used.is_fully_replicated):
        return False
    parts = math.prod(kept.mesh.shape[name] for name in axes_in(kept.spec))
    return parts == kept.mesh.size


@functools.lru_cache(maxsize=64)
def _is_large_torus(mesh: Mesh) -> bool:
    devices = list(mesh.devices.flat)
    if len(devices) <= _FEW or devices[0].platform != "tpu":
        return False
    return all(len(set(along)) > 1 for along in zip(*(d.coords for d in devices), strict=True))


def _of_parts(spec: PartitionSpec, mesh: Mesh) -> NamedSharding:
    """The same spec, cut into about as many parts as the square root of the number of devices."""
    left, parts = math.isqrt(mesh.size), dict.fromkeys(mesh.axis_names, 1)
    for entry in spec.partitions:
        for name in axis_names(entry):
            size = mesh.shape[name]
            parts[name] = max(n for n in range(1, min(size, left) + 1) if size % n == 0)
            # Once an axis is cut, parts of later axes would not be contiguous.
            left = left // size if parts[name] == size else 1
    shape = [n for name, part in parts.items() for n in (part, mesh.shape[name] // part)]
    names = [f"{name} {which}" for name in parts for which in ("part", "rest")]
    divided = Mesh(mesh.devices.reshape(shape), names, axis_types=(AxisType.Auto,) * len(names))
    entries = [tuple(f"{name} part" for name in axis_names(entry)) for entry in spec.partitions]
    return NamedSharding(divided, PartitionSpec(*entries))

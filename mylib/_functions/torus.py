"""Gathers over all devices of a TPU whose torus has three dimensions.

XLA makes an all-reduce of a gather over all 64 or more of them, and of a reduce-scatter as well: it
sends twice as much as two gathers after each other, over a part of the devices each. What is asked
of fewer of the devices, or on a torus of two dimensions, stays a gather.
"""

import functools
import math

from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .._placement import Target, axes_in, axis_names, entries_of

_FEW = 32  # devices, of which it still makes a gather


def halfway(kept: Target | None, used: Target | None) -> NamedSharding | None:
    """Where a weight is after the first of two gathers, if one is not to be asked for."""
    if not (isinstance(kept, NamedSharding) and isinstance(used, NamedSharding)):
        return None
    mesh = kept.mesh
    if not (isinstance(mesh, Mesh) and used.is_fully_replicated and _is_large_torus(mesh)):
        return None
    if math.prod(mesh.shape[name] for name in axes_in(kept.spec)) != mesh.size:
        return None
    return _of_parts(kept.spec, mesh)


@functools.cache
def _is_large_torus(mesh: Mesh) -> bool:
    devices = list(mesh.devices.flat)
    if len(devices) <= _FEW or devices[0].platform != "tpu":
        return False
    return all(len(set(along)) > 1 for along in zip(*(d.coords for d in devices), strict=True))


def _of_parts(spec: PartitionSpec, mesh: Mesh) -> NamedSharding:
    """The same spec over the first parts of its axes, about as many as the root of all devices."""
    left, parts = math.isqrt(mesh.size), dict.fromkeys(mesh.axis_names, 1)
    for entry in entries_of(spec):
        for name in axis_names(entry):
            size = mesh.shape[name]
            parts[name] = max(n for n in range(1, min(size, left) + 1) if size % n == 0)
            # What comes after a part of an axis would not lie together.
            left = left // size if parts[name] == size else 1
    shape = [n for name, part in parts.items() for n in (part, mesh.shape[name] // part)]
    names = [f"{name} {which}" for name in parts for which in ("part", "rest")]
    divided = Mesh(mesh.devices.reshape(shape), names, axis_types=(AxisType.Auto,) * len(names))
    entries = [tuple(f"{name} part" for name in axis_names(e)) or None for e in entries_of(spec)]
    return NamedSharding(divided, PartitionSpec(*entries))

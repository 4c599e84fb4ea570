"""Targets: the shardings that placements resolve to, and their properties."""

from collections.abc import Collection, Hashable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import jax
from jax.core import Tracer
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from ..compat import is_compile_only, unreduced_kind, value_under
from .context import World

AnyMesh = Mesh | AbstractMesh
Target = Sharding | Format
"""The resolved placement of one array: a `jax.sharding.Sharding`, or a `Format` if a layout was
requested.
"""
T = TypeVar("T", bound=Target)
_FREE = PartitionSpec.UNCONSTRAINED
# Those of a `PartitionSpec`.
Entries = tuple[Any, ...]


def sharding_of(target: Target) -> Sharding:
    if isinstance(target, Format):
        assert isinstance(target.sharding, Sharding)
        return target.sharding
    return target


def axis_names(entry: object) -> tuple[Any, ...]:
    """The mesh axes that one entry of a `PartitionSpec` names."""
    if entry is None or entry is _FREE:
        return ()
    return tuple(entry) if isinstance(entry, tuple | list) else (entry,)


def entries_of(spec: PartitionSpec, ndim: int) -> Entries:
    """The entries of a spec: at least `ndim`, with None for dimensions that it doesn't name."""
    return spec.partitions + (None,) * (ndim - len(spec))


def trimmed(entries: Sequence[object]) -> Entries:
    """The entries of a spec without those at the end that name no axis."""
    while entries and not entries[-1]:
        entries = entries[:-1]
    return tuple(entries)


def axes_in(spec: PartitionSpec) -> set[str]:
    return {name for entry in spec.partitions for name in axis_names(entry)}


def split_over(sharding: NamedSharding) -> list[str]:
    """The axes of more than one device over which an array is split."""
    return sorted(axis for axis in axes_in(sharding.spec) if sharding.mesh.shape[axis] > 1)


def restricted(spec: PartitionSpec, names: Collection[str]) -> PartitionSpec:
    """A spec without the axes that are not among `names`."""
    entries = [
        entry if entry is _FREE else tuple(name for name in axis_names(entry) if name in names)
        for entry in spec.partitions
    ]
    unreduced, reduced = (axes.intersection(names) for axes in (spec.unreduced, spec.reduced))
    # Without unreduced axes, JAX doesn't allow the kind of reduction that `update` would keep.
    base = spec if unreduced else PartitionSpec()
    return base.update(partitions=trimmed(entries), unreduced=unreduced, reduced=reduced)


def has_partial_sums(placement: object) -> bool:
    """Whether a spec, or a sharding or format with one, names unreduced axes (each device has a
    term of a sum) or reduced axes (each device has a term of the gradient's sum).
    """
    if isinstance(placement, Format):
        placement = placement.sharding
    spec = placement.spec if isinstance(placement, NamedSharding) else placement
    return isinstance(spec, PartitionSpec) and bool(spec.unreduced or spec.reduced)


def partial_sums(spec: PartitionSpec) -> Hashable:
    """Equal for specs whose values are the same sums (or maxima, minima) of terms on devices."""
    return spec.unreduced, unreduced_kind(spec), spec.reduced


def without_partial_sums(sharding: NamedSharding) -> NamedSharding:
    return sharding.update(spec=PartitionSpec(*sharding.spec.partitions))


def fill_free(target: T, source: Sharding | None, ndim: int) -> T:
    """`target` with its UNCONSTRAINED dimensions filled in from `source`, except for axes already
    used: outside a compiled program there is no compiler to choose.
    """
    filled: Any = target
    if isinstance(target, Format):
        filled = Format(target.layout, fill_free(sharding_of(target), source, ndim))
    elif isinstance(target, NamedSharding) and _FREE in target.spec.partitions:
        taken = axes_in(target.spec)
        there = spec_over(target.mesh, source, ndim)
        free = [tuple(name for name in axis_names(now) if name not in taken) for now in there]
        pairs = zip(target.spec.partitions, free, strict=False)
        entries = [names if entry is _FREE else entry for entry, names in pairs]
        filled = target.update(spec=target.spec.update(partitions=entries))
    return filled


def spec_over(mesh: AnyMesh, sharding: object, ndim: int) -> Entries:
    """How an array at `sharding` is split over `mesh`, one entry per dimension."""
    if isinstance(sharding, NamedSharding) and sharding.mesh == mesh:
        return entries_of(sharding.spec, ndim)
    return (None,) * ndim


def mesh_in_force(mesh: AnyMesh, world: World) -> AnyMesh:
    """`mesh` with the axis types of the surrounding code: `shard_map`, `auto_axes` and
    `explicit_axes` change them.
    """
    if not (world.staged and same_axes(world.mesh, mesh)):
        return mesh
    # With its devices, if they are the same: this program may be evaluated eagerly
    # (`jax.checkpoint`), on arrays that are elsewhere.
    unchanged = mesh == world.devices and mesh.axis_types == world.mesh.axis_types
    return mesh if unchanged else world.mesh


def same_axes(one: AnyMesh, other: AnyMesh) -> bool:
    # In the same order: ("a", "b") and ("b", "a") number the devices differently.
    return tuple(one.shape.items()) == tuple(other.shape.items())


def axis_types(mesh: AnyMesh) -> dict[str, AxisType]:
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))


def grounded(sharding: T, world: World) -> T:
    """Replaces an abstract mesh by the mesh with devices, if known: the shardings of traced values
    have abstract meshes.
    """
    if (
        isinstance(sharding, NamedSharding)
        and isinstance(sharding.mesh, AbstractMesh)
        and world.devices is not None
        and same_axes(sharding.mesh, world.devices)
    ):
        there: Any = NamedSharding(world.devices, sharding.spec, memory_kind=sharding.memory_kind)
        return there
    return sharding


def memory_kind(sharding: Sharding) -> str:
    return sharding.memory_kind or default_memory_kind(sharding)


@lru_cache(maxsize=64)
def is_described(mesh: AnyMesh | None) -> bool:
    """Whether the devices of a mesh are only described: programs can be compiled for them, but no
    array can be put there.
    """
    return isinstance(mesh, Mesh) and not mesh.empty and is_compile_only(mesh.devices.flat[0])


def is_here(sharding: Sharding) -> bool:
    """Whether arrays can be put on its devices."""
    if isinstance(sharding, NamedSharding):
        return not is_described(sharding.mesh)
    return not is_compile_only(next(iter(sharding.device_set)))


def is_handle(x: Any) -> bool:
    """Whether an array, or the one behind a tracer of an eager transformation, has no shards in
    this process.
    """
    x = value_under(x)
    if not isinstance(x, jax.Array) or isinstance(x, Tracer):
        return False
    # JAX has arrays without a sharding, too: Python numbers under `grad`.
    sharding = getattr(x, "sharding", None)
    return isinstance(sharding, Sharding) and not sharding.addressable_devices


def default_memory_kind(sharding: Sharding) -> str:
    abstract = isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh)
    if not is_here(sharding):
        # Unknown to the compiler (GPU), or known only for one of the hosts (TPU).
        return "device"
    addressable = jax.devices() if abstract else sharding.addressable_devices
    device = next(iter(addressable), None) or next(iter(sharding.device_set))
    return device.default_memory().kind


def unusual_memory_kind(target: Target) -> str | None:
    """A target's memory kind, if programs don't compute in it."""
    sharding = sharding_of(target)
    kind = sharding.memory_kind
    return None if kind is None or kind == default_memory_kind(sharding) else kind


def memory_space(sharding: Sharding) -> Any:
    """The memory of `sharding` as a memory space of compiled programs."""
    pinned = sharding.memory_kind == "pinned_host"
    return jax.memory.Space.Host if pinned else jax.memory.Space.Device


def entries_over(spec: PartitionSpec | None, names: Collection[str]) -> Entries:
    """A spec's entries for some axes; equal if the meaning is equal."""
    entries = [
        tuple(name for name in axis_names(entry) if name in names)
        for entry in (spec.partitions if spec is not None else ())
    ]
    return trimmed(entries)

"""Staged placement: constraints on the values of a program that is being written down."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
from jax.core import Tracer
from jax.experimental.layout import Format, with_layout_constraint
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from ._leaves import Kind, kind_of
from ._target import Target, axis_names, axis_types, fill_free, mesh_in_force, sharding_of
from ._world import World


def constrain(arrays: Sequence[Any], targets: Sequence[Target], world: World) -> list[jax.Array]:
    """The same values, such that when compiled they lie as the targets say."""
    arrays = [_constant(x) if kind_of(x) is Kind.DEVICE else x for x in arrays]
    constrained = list(arrays)
    shardings = _in_force([sharding_of(target) for target in targets], world)
    plain = [i for i, s in enumerate(shardings) if s is not None and not _has_explicit_axes(s)]
    # One call for them all, which is cheaper than one for each.
    for i, y in zip(
        plain,
        jax.lax.with_sharding_constraint([arrays[i] for i in plain], [shardings[i] for i in plain]),
        strict=True,
    ):
        constrained[i] = y
    for i, sharding in enumerate(shardings):
        if isinstance(sharding, NamedSharding) and _has_explicit_axes(sharding):
            constrained[i] = _reshard(arrays[i], sharding, world)
    for i, target in enumerate(targets):
        if isinstance(target, Format) and target.layout is not None:
            constrained[i] = with_layout_constraint(constrained[i], target.layout)
    return constrained


def _constant(x: jax.Array) -> Any:
    """A captured array is copied into the program; from a mesh with Explicit axes, which it would
    not get rid of, by way of the host.
    """
    return jax.device_get(x) if _has_explicit_axes(x.sharding) else x


def _in_force(shardings: Sequence[Sharding], world: World) -> list[Sharding | None]:
    """The shardings over the meshes that are in force here; None where nothing is left to say."""
    known: dict[int, Sharding | None] = {}
    for sharding in shardings:
        if id(sharding) not in known:
            known[id(sharding)] = _one_in_force(sharding, world)
    return [known[id(sharding)] for sharding in shardings]


def _one_in_force(sharding: Sharding, world: World) -> Sharding | None:
    if not isinstance(sharding, NamedSharding):
        return sharding
    mesh = mesh_in_force(sharding.mesh, world)
    if set(mesh.axis_types) == {AxisType.Manual}:
        # Each device runs its own program here.
        return None
    return NamedSharding(mesh, sharding.spec)


def _has_explicit_axes(sharding: Sharding) -> bool:
    return isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types


def _reshard(x: Any, sharding: NamedSharding, world: World) -> jax.Array:
    mesh = sharding.mesh
    # `reshard` doesn't say which devices are meant, and without a mesh around nothing else does: a
    # nested program brings them along, or is refused by JAX if the value is on others.
    devices_unsaid = world.mesh.empty and isinstance(mesh, Mesh)
    on_devices = _identity(fill_free(sharding, None, x.ndim))
    mesh_known = isinstance(x, Tracer) and not jax.typeof(x).sharding.mesh.empty
    if devices_unsaid and not mesh_known:
        x = on_devices(jax.device_get(x) if kind_of(x) is Kind.DEVICE else x)
    explicit = _part(sharding, AxisType.Explicit, jax.typeof(x).sharding.spec)
    x = jax.sharding.reshard(x, NamedSharding(mesh, explicit))
    if devices_unsaid and mesh_known:
        x = on_devices(x)
    if AxisType.Auto in mesh.axis_types:
        auto = _part(sharding, AxisType.Auto, PartitionSpec())
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, auto))
    return x


def _part(sharding: NamedSharding, kind: AxisType, current: PartitionSpec) -> PartitionSpec:
    """What a spec says of the axes of one kind. A dimension that it leaves free stays as it is in
    `current` where the axes are Explicit, and free where they are Auto.
    """
    spec, types = sharding.spec, axis_types(sharding.mesh)
    taken = {name for entry in spec for name in axis_names(entry)}
    entries: list[Any] = []
    for dim, entry in enumerate(spec):
        if entry is PartitionSpec.UNCONSTRAINED:
            if kind is AxisType.Auto:
                entries.append(entry)
                continue
            now = axis_names(current[dim]) if dim < len(current) else ()
            entry = tuple(name for name in now if name not in taken)
        entries.append(tuple(name for name in axis_names(entry) if types[name] == kind) or None)
    return PartitionSpec(*entries, unreduced=spec.unreduced, reduced=spec.reduced)


@lru_cache(maxsize=256)
def _identity(sharding: NamedSharding) -> Any:
    return jax.jit(lambda x: x, out_shardings=sharding)

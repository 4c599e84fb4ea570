"""Staged placement: constraints on the values of a program that is being written down."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
from jax.core import Tracer
from jax.experimental.layout import Format, with_layout_constraint
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from ._leaves import Kind, kind_of
from ._target import (
    Target,
    axes_in,
    axis_names,
    axis_types,
    entries_of,
    fill_free,
    memory_space,
    mesh_in_force,
    same_axes,
    sharding_of,
    with_entries,
)
from ._world import World


def constrain(arrays: Sequence[Any], targets: Sequence[Target], world: World) -> list[jax.Array]:
    """The same values, such that when compiled they lie as the targets say."""
    arrays = [_constant(x) for x in arrays]
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
            if AxisType.Auto in sharding.mesh.axis_types:
                # Of two constraints the second would undo the first, where what is written down
                # here is evaluated step by step (`jax.closure_convert`); as one program they hold.
                both = jax.jit(lambda x, s=sharding: _to_explicit(x, s, world))
                constrained[i] = both(_constant(arrays[i], always=True))
            else:
                constrained[i] = _to_explicit(arrays[i], sharding, world)
    for i, target in enumerate(targets):
        if isinstance(target, Format) and target.layout is not None:
            constrained[i] = with_layout_constraint(constrained[i], target.layout)
    return constrained


def transfer_and_constrain(
    arrays: Sequence[Any], targets: Sequence[Target], world: World
) -> list[jax.Array]:
    """As `constrain`, and the values in the kind of memory that the targets say."""
    on_device = [
        x
        if jax.typeof(x).memory_space == jax.memory.Space.Device
        else jax.device_put(x, jax.memory.Space.Device)
        for x in arrays
    ]
    constrained = constrain(on_device, targets, world)
    return [
        x
        if memory_space(sharding_of(target)) == jax.memory.Space.Device
        else jax.device_put(x, jax.memory.Space.Host)
        for x, target in zip(constrained, targets, strict=True)
    ]


def _constant(x: Any, *, always: bool = False) -> Any:
    """A captured array is copied into the program; from a mesh with Explicit axes, which it would
    not get rid of, by way of the host.
    """
    captured = kind_of(x) is Kind.DEVICE
    return jax.device_get(x) if captured and (always or _has_explicit_axes(x.sharding)) else x


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


def _to_explicit(x: Any, sharding: NamedSharding, world: World) -> jax.Array:
    mesh = sharding.mesh
    # `reshard` doesn't say which devices are meant, and without a mesh around nothing else does: a
    # nested program brings them along, or is refused by JAX if the value is on others.
    devices_unsaid = world.mesh.empty and isinstance(mesh, Mesh)
    mesh_known = isinstance(x, Tracer) and not jax.typeof(x).sharding.mesh.empty
    if devices_unsaid and not mesh_known:
        x = _on_devices(sharding, jax.device_get(x) if kind_of(x) is Kind.DEVICE else x)
    explicit = _part(sharding, AxisType.Explicit, jax.typeof(x).sharding)
    x = jax.sharding.reshard(x, NamedSharding(mesh, explicit))
    if devices_unsaid and mesh_known:
        x = _on_devices(sharding, x)
    if AxisType.Auto in mesh.axis_types:
        auto = _part(sharding, AxisType.Auto, None)
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, auto))
    return x


def _on_devices(sharding: NamedSharding, x: Any) -> jax.Array:
    return _identity(fill_free(sharding, None, x.ndim))(x)


def _part(sharding: NamedSharding, kind: AxisType, here: Any) -> PartitionSpec:
    """What a spec says of the axes of one kind. A dimension that it leaves free stays as it is
    `here` where the axes are Explicit, and free where they are Auto.
    """
    spec, types = sharding.spec, axis_types(sharding.mesh)
    taken = axes_in(spec)
    current = here.spec if here is not None and same_axes(here.mesh, sharding.mesh) else ()
    current = entries_of(current) if current else ()
    entries: list[Any] = []
    for dim, entry in enumerate(entries_of(spec)):
        if entry is PartitionSpec.UNCONSTRAINED:
            if kind is AxisType.Auto:
                entries.append(entry)
                continue
            now = axis_names(current[dim]) if dim < len(current) else ()
            entry = tuple(name for name in now if name not in taken)
        entries.append(tuple(name for name in axis_names(entry) if types[name] == kind) or None)
    return with_entries(spec, entries)


@lru_cache(maxsize=256)
def _identity(sharding: NamedSharding) -> Any:
    return jax.jit(lambda x: x, out_shardings=sharding)

"""Staged placement: constraints on the values of a program that is being written down."""

from functools import lru_cache
from typing import Any

import jax
from jax.core import Tracer
from jax.experimental.layout import Format, with_layout_constraint
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ._target import Target, axis_names, fill_free, sharding_of, types_in_force
from ._world import World


def constrain(x: Any, target: Target, world: World) -> jax.Array:
    """`x`, such that the compiled value lies as `target` says."""
    sharding = sharding_of(target)
    if isinstance(sharding, NamedSharding):
        y = _constrain_named(x, sharding, world)
    else:
        y = jax.lax.with_sharding_constraint(x, sharding)
    if isinstance(target, Format) and target.layout is not None:
        y = with_layout_constraint(y, target.layout)
    return y


def _constrain_named(x: Any, sharding: NamedSharding, world: World) -> jax.Array:
    types = types_in_force(sharding.mesh, world)
    mesh = sharding.mesh
    if AxisType.Manual in types.values():
        mesh = world.mesh
        if set(types.values()) == {AxisType.Manual}:
            # Each device runs its own program here, and nothing is left to say.
            return x
    if AxisType.Explicit not in types.values():
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, sharding.spec))
    typed = jax.typeof(x).sharding
    if world.mesh.empty and not (isinstance(x, Tracer) and typed.mesh.axis_names):
        # The program may not know any mesh yet, and `reshard` doesn't tell it which devices are
        # meant. A nested program does.
        x = _identity(fill_free(sharding, None, x.ndim))(x)
        typed = jax.typeof(x).sharding
    explicit = _part(sharding.spec, types, AxisType.Explicit, typed.spec)
    x = jax.sharding.reshard(x, NamedSharding(mesh, explicit))
    if AxisType.Auto in types.values():
        auto = _part(sharding.spec, types, AxisType.Auto, PartitionSpec())
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, auto))
    return x


def _part(
    spec: PartitionSpec, types: dict[str, AxisType], kind: AxisType, current: PartitionSpec
) -> PartitionSpec:
    """What `spec` says of the axes of one kind. A dimension that it leaves free stays as it is in
    `current`, or free where that doesn't say.
    """
    entries: list[Any] = []
    taken = {name for entry in spec for name in axis_names(entry)}
    for dim, entry in enumerate(spec):
        if entry is PartitionSpec.UNCONSTRAINED:
            if kind is AxisType.Auto:
                entries.append(entry)
                continue
            entry = tuple(
                n
                for n in axis_names(current[dim] if dim < len(current) else None)
                if n not in taken
            )
        entries.append(tuple(n for n in axis_names(entry) if types[n] == kind) or None)
    return PartitionSpec(*entries, unreduced=spec.unreduced, reduced=spec.reduced)


@lru_cache(maxsize=256)
def _identity(sharding: NamedSharding) -> Any:
    return jax.jit(lambda x: x, out_shardings=sharding)

"""Staged placement: constrains values of a program that is being traced."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import compress
from typing import Any

import jax
from jax.core import Tracer
from jax.experimental.layout import with_layout_constraint
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from ..._core.compat import jit
from ..._core.placement import (
    Target,
    World,
    axis_names,
    entries_of,
    fill_free,
    memory_space,
    mesh_in_force,
    restricted,
    same_axes,
    sharding_of,
    without_partial_sums,
)
from ..._core.tree import Kind, kind_of
from .already_placed import wants_layout


def constrain(
    arrays: Sequence[jax.Array], targets: Sequence[Target], world: World
) -> list[jax.Array]:
    """The same values, constrained to the targets in the compiled program."""
    arrays = [_constant(array) for array in arrays]
    shardings = _in_force([sharding_of(target) for target in targets], world)
    plain = [s is not None and not _has_explicit_axes(s) for s in shardings]
    # One call for all is cheaper than one for each.
    values, requested = (list(compress(column, plain)) for column in (arrays, shardings))
    at_once = iter(jax.lax.with_sharding_constraint(values, requested))
    constrained: list[jax.Array] = []
    for array, sharding, is_plain, target in zip(arrays, shardings, plain, targets, strict=True):
        if is_plain:
            array = next(at_once)
        elif isinstance(sharding, NamedSharding):
            array = _to_explicit(array, sharding, world)
            if sharding.mesh.auto_axes:
                auto = _over(sharding.mesh.auto_axes, sharding)
                array = constrain_auto_p.bind(array, sharding=auto)
        if wants_layout(target):
            array = with_layout_constraint(array, target.layout)
        constrained.append(array)
    return constrained


def transfer_and_constrain(
    arrays: Sequence[jax.Array], targets: Sequence[Target], world: World
) -> list[jax.Array]:
    """As `constrain`, and also moves the values to the targets' memory kinds."""
    on_device = [_moved_to(jax.memory.Space.Device, array) for array in arrays]
    constrained = constrain(on_device, targets, world)
    return [
        _moved_to(memory_space(sharding_of(target)), array)
        for array, target in zip(constrained, targets, strict=True)
    ]


def _moved_to(space: Any, x: jax.Array) -> jax.Array:
    space_now = jax.typeof(x).memory_space
    # `src` determines where the cotangent goes. Without it JAX leaves some where they are, and
    # under `vmap` shards the batch dimension of others.
    return x if space_now == space else jax.device_put(x, space, src=space_now)


def _constant(array: Any) -> Any:
    """Copies a captured array into the program. On a mesh with Explicit axes it goes through the
    host, as it would keep these axes otherwise.
    """
    captured = kind_of(array) is Kind.DEVICE
    return jax.device_get(array) if captured and _has_explicit_axes(array.sharding) else array


def _in_force(shardings: Sequence[Sharding], world: World) -> list[Sharding | None]:
    """The shardings over the meshes in force here; None if no constraint is left."""
    different = {id(sharding): sharding for sharding in shardings}
    in_force = {key: _one_in_force(sharding, world) for key, sharding in different.items()}
    return [in_force[id(sharding)] for sharding in shardings]


def _one_in_force(sharding: Sharding, world: World) -> Sharding | None:
    if not isinstance(sharding, NamedSharding):
        return sharding
    mesh = mesh_in_force(sharding.mesh, world)
    if mesh.are_all_axes_manual:
        # Each device runs its own program here.
        return None
    return NamedSharding(mesh, sharding.spec)


def _has_explicit_axes(sharding: Sharding) -> bool:
    return isinstance(sharding, NamedSharding) and bool(sharding.mesh.explicit_axes)


def _to_explicit(array: Any, sharding: NamedSharding, world: World) -> jax.Array:
    mesh = sharding.mesh
    # `reshard` doesn't determine the devices, nor does the context without a mesh. A nested program
    # fixes them, and JAX raises if the value is on others.
    devices_unknown = world.mesh.empty and isinstance(mesh, Mesh)
    mesh_known = isinstance(array, Tracer) and not jax.typeof(array).sharding.mesh.empty
    if devices_unknown and not mesh_known:
        array = jax.device_get(array) if kind_of(array) is Kind.DEVICE else array
        array = _on_devices(without_partial_sums(sharding), array)
    current = jax.typeof(array).sharding
    on_mesh = NamedSharding(mesh, current.spec) if same_axes(current.mesh, mesh) else None
    filled = fill_free(sharding, on_mesh, array.ndim)
    array = jax.sharding.reshard(array, _over(mesh.explicit_axes, filled))
    if devices_unknown and mesh_known:
        array = _on_devices(sharding, array)
    return array


def _on_devices(sharding: NamedSharding, x: jax.Array) -> jax.Array:
    return _identity(fill_free(sharding, None, x.ndim))(x)


def _over(names: Sequence[str], sharding: NamedSharding) -> NamedSharding:
    return NamedSharding(sharding.mesh, restricted(sharding.spec, names))


@lru_cache(maxsize=256)
def _identity(sharding: NamedSharding) -> Any:
    return jit(lambda x: x, out_shardings=sharding)


# `with_sharding_constraint` for the Auto axes of a mesh that also has Explicit axes. JAX's own
# works in compiled programs. But if a program is evaluated eagerly (`jax.closure_convert`), it
# removes the Explicit axes from the value: in 0.10.2 and 0.12.0. No public issue is known.
constrain_auto_p = Primitive("constrain_auto")


def _constrain_auto(array: jax.Array, *, sharding: NamedSharding) -> jax.Array:
    # JAX rejects a free dimension that is split over Explicit axes.
    entries = [
        None if entry is PartitionSpec.UNCONSTRAINED and explicit is not None else entry
        for entry, explicit in zip(
            sharding.spec.partitions, jax.typeof(array).sharding.spec.partitions, strict=False
        )
    ]
    constrained = NamedSharding(sharding.mesh, sharding.spec.update(partitions=entries))
    # If an array has several constraints, Shardy passes the result of the last one to all other
    # users of the array, and shards it as these suggest. The last one may be JAX's own, which is
    # less strict (on results of a nested `jit` or `cond`). So the strict constraint is applied last
    # to this array, and again first to another array. The two operations in between are free: XLA
    # removes them after partitioning. Needed with JAX 0.10.2 and 0.12.0; no public issue is known.
    array = jax.lax.with_sharding_constraint(array, constrained)
    array = jax.lax.squeeze(jax.lax.expand_dims(array, (0,)), (0,))
    return jax.lax.with_sharding_constraint(array, constrained)


def _constrain_auto_batch(
    axis: Any, arrays: Sequence[jax.Array], dims: Sequence[int | None], *, sharding: NamedSharding
) -> tuple[jax.Array, int | None]:
    (array,), (dim,) = arrays, dims
    if dim is not None:
        entries = list(entries_of(sharding.spec, array.ndim - 1))
        named = tuple(n for n in axis_names(axis.spmd_name) if n in sharding.mesh.auto_axes)
        entries.insert(dim, named or PartitionSpec.UNCONSTRAINED)
        sharding = sharding.update(spec=sharding.spec.update(partitions=entries))
    return constrain_auto_p.bind(array, sharding=sharding), dim


constrain_auto_p.def_impl(jit(_constrain_auto, static_argnames="sharding"))
constrain_auto_p.def_abstract_eval(lambda x, **_: x)
ad.deflinear2(constrain_auto_p, lambda ct, _, **params: [constrain_auto_p.bind(ct, **params)])
batching.fancy_primitive_batchers[constrain_auto_p] = _constrain_auto_batch
mlir.register_lowering(constrain_auto_p, mlir.lower_fun(_constrain_auto, multiple_results=False))

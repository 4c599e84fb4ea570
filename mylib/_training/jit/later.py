"""Where results come back, and those that a program doesn't return where they are constrained to:
they are placed after it.

XLA replicates arrays without elements, and JAX 0.10 labels them as their types have it. And on
meshes that mix Explicit and Auto axes, JAX takes the sharding of a result from its type, which
forgets the Auto axes of a dimension that is split over Explicit axes, too, if another dimension is
split over Explicit axes: it would be gathered first. So it leaves the program without this type.

Needed with JAX 0.10.2 and 0.12.0; no public issue is known. May go once
`tests/jit/test_placed_after.py` passes without it.
"""

from collections.abc import Callable
from functools import partial

import jax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..._core.compat import array_like, is_staged
from ..._core.errors import PlacementError
from ..._core.placement import (
    Target,
    axis_names,
    axis_types,
    current_world,
    grounded,
    resolve_leaves,
    sharding_of,
)
from ..._core.tree import split
from ..._moving.transfer import filter_device_put, place_leaves
from .error_checks import is_called_eagerly
from .steps import Call, Wrapped


def placed(result: object, wrapped: Wrapped) -> tuple[object, list[Callable[[Call], None]]]:
    """The results inside of the program, placed, and what is to be done after each call."""
    placement, mesh, world = wrapped.out_shardings, wrapped.mesh, current_world()
    if placement is None:
        return result, []
    try:
        result = filter_device_put(result, placement, mesh=mesh)
    except PlacementError as error:
        error.add_note(f"(the tree is what {wrapped.name} returns, placed by its out_shardings)")
        raise
    around, leaves = world.mesh if mesh is None else mesh, split(result)
    is_mixed = around.explicit_axes and around.auto_axes
    if not is_mixed and all(x.size for x in leaves.arrays):
        return result, []
    targets = resolve_leaves(leaves, placement, mesh, world)
    later = [
        grounded(target, world) if target and (not x.size or _mixes_types(target)) else None
        for x, target in zip(leaves.arrays, targets, strict=True)
    ]
    if not any(later):
        return result, []
    if is_staged() and is_called_eagerly():
        pairs = zip(leaves.arrays, later, strict=True)
        result = leaves.join([_untyped(x) if x.size and to else x for x, to in pairs])
    return result, [partial(_place, later)]


def _mixes_types(target: Target) -> bool:
    """Whether it splits a dimension over Explicit and Auto axes."""
    sharding = sharding_of(target)
    if not isinstance(sharding, NamedSharding):
        return False
    types = axis_types(sharding.mesh)
    return any(len({types[name] for name in axis_names(x)}) > 1 for x in sharding.spec.partitions)


def _untyped(array: jax.Array) -> jax.Array:
    """The value on Auto axes: JAX then returns it as the program has it."""
    mesh = jax.typeof(array).sharding.mesh
    types = dict.fromkeys(mesh.axis_names, AxisType.Auto)
    with jax.sharding.use_abstract_mesh(mesh.update_axis_types(types)):
        return jax.sharding.reshard(array, PartitionSpec(*[None] * array.ndim))


def _place(targets: list[Target | None], call: Call) -> None:
    if call.mode == "staged":  # the surrounding program decides
        return
    pairs = zip(call.returned.arrays, targets, strict=True)
    leaves = split([_labelled(array, target) if target else array for array, target in pairs])
    # `check=False`: the targets were checked when the program was traced.
    arrays = place_leaves(leaves, targets, current_world(), check=False)
    call.returned.arrays = leaves.join(arrays)


def _labelled(array: jax.Array, target: Target) -> jax.Array:
    """A result that is labelled as its buffers are, and as the target if they are there."""
    now, wanted = getattr(array, "sharding", None), sharding_of(target)
    if isinstance(array, Tracer) or not isinstance(now, NamedSharding):
        return array
    if not array.size and array.addressable_shards[0].data.shape == array.shape:
        now = NamedSharding(now.mesh, PartitionSpec(), memory_kind=now.memory_kind)
        return array_like(array, now)
    return array_like(array, wanted) if now.is_equivalent_to(wanted, array.ndim) else array

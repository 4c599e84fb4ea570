"""Results that a program doesn't return where they are constrained to: they are placed after it.

XLA replicates arrays without elements. And on meshes that mix Explicit and Auto axes, JAX takes the
sharding of a result from its type, which forgets the Auto axes of a dimension that is split over
Explicit axes, too.
"""

from collections.abc import Mapping
from typing import Any

import jax.tree_util as jtu
from jax.sharding import AxisType, NamedSharding
from jaxtyping import PyTree

from .._placement import (
    AnyMesh,
    Placement,
    Target,
    axis_names,
    axis_types,
    current_world,
    grounded,
    resolve_leaves,
    sharding_of,
)
from .._transfer import filter_device_put
from .._tree import split


def targets_after(
    result: Any, placement: PyTree[Placement], mesh: AnyMesh | None
) -> dict[int, Target]:
    """The targets of a program's results that are placed after it, by the leaf."""
    leaves, world = split(result), current_world()
    if all(x.size for x in leaves.arrays) and not any(map(_is_mixed, (world.mesh, mesh))):
        return {}
    targets = resolve_leaves(leaves, placement, mesh, world)
    return {
        position: grounded(target, world)
        for x, position, target in zip(leaves.arrays, leaves.positions, targets, strict=True)
        if target is not None and (not x.size or _mixes_types(target))
    }


def placed_after(result: Any, targets: Mapping[int, Target]) -> Any:
    leaves, treedef = jtu.tree_flatten(result)
    moving = [leaves[position] for position in targets]
    placed = filter_device_put(moving, list(targets.values()), check=False)
    for position, x in zip(targets, placed, strict=True):
        leaves[position] = x
    return jtu.tree_unflatten(treedef, leaves)


def _is_mixed(mesh: AnyMesh | None) -> bool:
    return mesh is not None and {AxisType.Explicit, AxisType.Auto} <= set(mesh.axis_types)


def _mixes_types(target: Target) -> bool:
    """Whether it splits a dimension over Explicit and Auto axes."""
    sharding = sharding_of(target)
    if not isinstance(sharding, NamedSharding) or not _is_mixed(sharding.mesh):
        return False
    types = axis_types(sharding.mesh)
    return any(len({types[name] for name in axis_names(x)}) > 1 for x in sharding.spec.partitions)

"""Results that a program doesn't return where they are constrained to: they are placed after it.

XLA replicates arrays without elements. And on meshes that mix Explicit and Auto axes, JAX takes the
sharding of a result from its type, which forgets the Auto axes of a dimension that is split over
Explicit axes, too.

Needed with JAX 0.12.0; no public issue is known. May go once `tests/jit/test_placed_after.py`
passes without it.
"""

from collections.abc import Sequence
from typing import Any

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
from .._transfer import place_leaves
from .._tree import split


def targets_after(
    result: Any, placement: PyTree[Placement], mesh: AnyMesh | None
) -> list[Target | None]:
    """The targets of arrays that are placed after the program, and None for the others; empty if
    there are none.
    """
    leaves, world = split(result), current_world()
    if all(x.size for x in leaves.arrays) and not any(map(_is_mixed, (world.mesh, mesh))):
        return []
    targets = resolve_leaves(leaves, placement, mesh, world)
    later: list[Target | None] = [
        grounded(target, world) if target and (not x.size or _mixes_types(target)) else None
        for x, target in zip(leaves.arrays, targets, strict=True)
    ]
    return later if any(later) else []


def placed_after(result: Any, targets: Sequence[Target | None]) -> Any:
    leaves = split(result)
    return leaves.join(place_leaves(leaves, targets, current_world(), check=False))


def _is_mixed(mesh: AnyMesh | None) -> bool:
    return mesh is not None and {AxisType.Explicit, AxisType.Auto} <= set(mesh.axis_types)


def _mixes_types(target: Target) -> bool:
    """Whether it splits a dimension over Explicit and Auto axes."""
    sharding = sharding_of(target)
    if not isinstance(sharding, NamedSharding) or not _is_mixed(sharding.mesh):
        return False
    types = axis_types(sharding.mesh)
    return any(len({types[name] for name in axis_names(x)}) > 1 for x in sharding.spec.partitions)

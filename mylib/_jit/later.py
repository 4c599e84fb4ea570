"""Where results come back, and those that a program doesn't return where they are constrained to:
they are placed after it.

XLA replicates arrays without elements. And on meshes that mix Explicit and Auto axes, JAX takes the
sharding of a result from its type, which forgets the Auto axes of a dimension that is split over
Explicit axes, too, if another dimension is split over Explicit axes.

Needed with JAX 0.10.2 and 0.12.0; no public issue is known. May go once
`tests/jit/test_placed_after.py` passes without it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from jax.sharding import NamedSharding

from .._errors import PlacementError
from .._placement import (
    Target,
    axis_names,
    axis_types,
    current_world,
    grounded,
    resolve_leaves,
    sharding_of,
)
from .._transfer import filter_device_put, place_leaves
from .._tree import split
from .steps import Call, Wrapped


def placed(result: Any, wrapped: Wrapped) -> tuple[Any, list[Callable[[Call], None]]]:
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
    return result, [partial(_place, later)] if any(later) else []


def _mixes_types(target: Target) -> bool:
    """Whether it splits a dimension over Explicit and Auto axes."""
    sharding = sharding_of(target)
    if not isinstance(sharding, NamedSharding):
        return False
    types = axis_types(sharding.mesh)
    return any(len({types[name] for name in axis_names(x)}) > 1 for x in sharding.spec.partitions)


def _place(targets: list[Target | None], call: Call) -> None:
    if call.mode != "staged":  # else the surrounding program decides
        # `check=False`: the targets were checked when the program was traced.
        leaves = split(call.returned.arrays)
        arrays = place_leaves(leaves, targets, current_world(), check=False)
        call.returned.arrays = leaves.join(arrays)

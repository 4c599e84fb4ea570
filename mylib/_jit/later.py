"""Where results come back, and those that a program doesn't return where they are constrained to:
they are placed after it.

XLA replicates arrays without elements. And on meshes that mix Explicit and Auto axes, JAX takes the
sharding of a result from its type, which forgets the Auto axes of a dimension that is split over
Explicit axes, too.

Needed with JAX 0.12.0; no public issue is known. May go once `tests/jit/test_placed_after.py`
passes without it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from jax.sharding import AxisType, NamedSharding

from .._errors import PlacementError
from .._placement import (
    AnyMesh,
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
from .steps import Call


@dataclass(frozen=True, eq=False)
class OutShardings:
    """The placement of the results of the function `name`."""

    placement: Any
    mesh: AnyMesh | None
    name: str

    def placed(self, result: Any) -> tuple[Any, list[Callable[[Call], None]]]:
        """The results inside of the program, placed, and what is to be done after each call."""
        if self.placement is None:
            return result, []
        try:
            placed = filter_device_put(result, self.placement, mesh=self.mesh)
        except PlacementError as error:
            error.add_note(f"(the tree is what {self.name} returns, placed by its out_shardings)")
            raise
        return placed, self._later(placed)

    def _later(self, result: Any) -> list[Callable[[Call], None]]:
        leaves, world = split(result), current_world()
        if all(x.size for x in leaves.arrays) and not any(map(_is_mixed, (world.mesh, self.mesh))):
            return []
        targets = resolve_leaves(leaves, self.placement, self.mesh, world)
        later: list[Target | None] = [
            grounded(target, world) if target and (not x.size or _mixes_types(target)) else None
            for x, target in zip(leaves.arrays, targets, strict=True)
        ]
        return [partial(_place, later)] if any(later) else []


def _place(targets: list[Target | None], call: Call) -> None:
    if call.mode != "staged":  # else the surrounding program decides
        # `check=False`: the targets were checked when the program was traced.
        leaves = split(call.returned.arrays)
        placed = place_leaves(leaves, targets, current_world(), check=False)
        call.returned.arrays = leaves.join(placed)


def _is_mixed(mesh: AnyMesh | None) -> bool:
    return mesh is not None and {AxisType.Explicit, AxisType.Auto} <= set(mesh.axis_types)


def _mixes_types(target: Target) -> bool:
    """Whether it splits a dimension over Explicit and Auto axes."""
    sharding = sharding_of(target)
    if not isinstance(sharding, NamedSharding) or not _is_mixed(sharding.mesh):
        return False
    types = axis_types(sharding.mesh)
    return any(len({types[name] for name in axis_names(x)}) > 1 for x in sharding.spec.partitions)

"""Where results come back, and those that a program doesn't return where they are constrained to:
they are placed after it.

On meshes that mix Explicit and Auto axes, JAX takes the sharding of a result from its type, which
forgets the Auto axes of a dimension that is split over Explicit axes, too, if another dimension is
split over Explicit axes.

Needed with JAX 0.10.2 and 0.12.0; no public issue is known. May go once
`tests/jit/test_placed_after.py` passes without it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from .._errors import PlacementError
from .._placement import AnyMesh, Target, current_world, grounded, resolve_leaves
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
        world = current_world()
        mesh = world.mesh if self.mesh is None else self.mesh
        if not (mesh.explicit_axes and mesh.auto_axes):
            return placed, []
        targets = resolve_leaves(split(placed), self.placement, self.mesh, world)
        return placed, [partial(_place, [x and grounded(x, world) for x in targets])]


def _place(targets: list[Target | None], call: Call) -> None:
    if call.mode != "staged":  # else the surrounding program decides
        # `check=False`: the targets were checked when the program was traced.
        leaves = split(call.returned.arrays)
        placed = place_leaves(leaves, targets, current_world(), check=False)
        call.returned.arrays = leaves.join(placed)

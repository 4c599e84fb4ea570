"""Results without elements. XLA replicates them, whatever they are constrained to."""

from collections.abc import Mapping
from typing import Any

import jax.tree_util as jtu
from jaxtyping import PyTree

from .._placement import AnyMesh, Placement, Target, current_world, grounded, resolve_leaves
from .._transfer import filter_device_put
from .._tree import split


@jtu.register_pytree_node_class
class WithEmpty:
    """A result of a program, and the targets of its empty arrays by their positions."""

    def __init__(self, result: Any, targets: Mapping[int, Target]):
        self._result = result
        self._targets = targets

    @classmethod
    def of(cls, result: Any, placement: PyTree[Placement], mesh: AnyMesh | None) -> Any:
        """The result, as an instance of this class if it has empty arrays with a target."""
        leaves, world = split(result), current_world()
        if all(x.size for x in leaves.arrays):
            return result
        targets = resolve_leaves(leaves, placement, mesh, world)
        empty = {
            position: grounded(target, world)
            for x, position, target in zip(leaves.arrays, leaves.positions, targets, strict=True)
            if not x.size and target is not None
        }
        return cls(result, empty) if empty else result

    def placed(self) -> Any:
        """The result with its empty arrays at their targets."""
        if current_world().staged:  # another program decides
            return self._result
        leaves, treedef = jtu.tree_flatten(self._result)
        empty = [leaves[position] for position in self._targets]
        placed = filter_device_put(empty, list(self._targets.values()), check=False)
        for position, x in zip(self._targets, placed, strict=True):
            leaves[position] = x
        return jtu.tree_unflatten(treedef, leaves)

    def tree_flatten(self) -> tuple[tuple[Any], Mapping[int, Target]]:
        return (self._result,), self._targets

    @classmethod
    def tree_unflatten(cls, targets: Mapping[int, Target], children: Any) -> "WithEmpty":
        (result,) = children
        return cls(result, targets)

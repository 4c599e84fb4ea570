"""Where the leaves of a tree are at present."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.tree_util as jtu
from jax.sharding import NamedSharding, Sharding

from ..placement import World, grounded
from ..tree import Kind, Leaf, Leaves, name_of
from .rows import ABSTRACT, COMMITTED, DELETED, NUMPY, TRACED, UNCOMMITTED, Row


def present_rows(leaves: Leaves, world: World) -> tuple[Row, ...]:
    """A row for each array leaf."""
    rows: list[Row] = []
    for i, (x, kind) in enumerate(zip(leaves.arrays, leaves.kinds, strict=True)):
        sharding = current_place(x, kind)
        place = None if sharding is None else grounded(sharding, world)
        state = _state_of(x, kind)
        why = f"traced as {jax.typeof(x)}" if state == TRACED else state
        # The dtype that it has: JAX will hold NumPy's 64 bits as 32.
        leaf = Leaf(leaves.paths[i], tuple(x.shape), x.dtype, None, leaves.walker)
        rows.append(Row(leaf.alone(), place, place, why, False, state))
    return tuple(rows)


def current_place(x: Any, kind: Kind) -> Sharding | None:
    """The sharding of a leaf, if it is known."""
    if kind is Kind.TRACED:
        # A type has a sharding only over Explicit axes. The compiler chooses for Auto axes, and
        # over Manual ones (`shard_map`) the array is split already.
        place = jax.typeof(x).sharding
        return place if place.mesh.are_all_axes_explicit else None
    place = getattr(x, "sharding", None) if kind in (Kind.DEVICE, Kind.ABSTRACT) else None
    # `jax.typeof(x).sharding` has an empty mesh if no axis is Explicit.
    return None if isinstance(place, NamedSharding) and place.mesh.empty else place


def _state_of(x: Any, kind: Kind) -> str:
    if kind is not Kind.DEVICE:
        return {Kind.HOST: NUMPY, Kind.ABSTRACT: ABSTRACT, Kind.TRACED: TRACED}[kind]
    if x.is_deleted():
        return DELETED
    return COMMITTED if getattr(x, "committed", False) else UNCOMMITTED


def static_leaves(leaves: Leaves) -> dict[str, str]:
    """The static leaves: the type of each by its path."""
    arrays = set(leaves.positions)
    with_paths, _ = jtu.tree_flatten_with_path(leaves.tree)
    return {
        name_of(path) if path else "the tree": type(x).__name__
        for i, (path, x) in enumerate(with_paths)
        if i not in arrays
    }


@runtime_checkable
class Noted(Protocol):
    """A node that has something to report of itself: a state of `mylib.by_matrix`."""

    def notes_of_explain(self) -> list[str]: ...


def notes_in(tree: object) -> tuple[str, ...]:
    is_noted: Callable[[object], bool] = lambda x: isinstance(x, Noted)  # noqa: E731
    nodes = filter(is_noted, jtu.tree_leaves(tree, is_leaf=is_noted))
    return tuple(dict.fromkeys(text for node in nodes for text in node.notes_of_explain()))

"""A state of which each replica has a copy."""

from typing import TypeGuard, TypeVar

import jax
import jax.tree_util as jtu
from jax.sharding import Mesh, NamedSharding

from ..._core.compat import array_like
from ..._core.errors import TeamError
from ..._core.placement import axes_in

State = TypeVar("State")


def _is_shared(leaf: object) -> TypeGuard[jax.Array]:
    """Whether it is an array on several devices, which are those of the team."""
    return isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1


def check_copies(state: object, mesh: Mesh, replica: str) -> None:
    """Raises if what one process holds of an array could be lost with it."""
    wrong: list[str] = []
    for path, leaf in jtu.tree_leaves_with_path(state):
        if not _is_shared(leaf):
            continue
        place = leaf.sharding
        if not isinstance(place, NamedSharding) or place.mesh != mesh:
            why = f"is placed as {place}, not over team.mesh"
        elif replica in axes_in(place.spec):
            why = f"is placed as {place.spec}, so each replica has another part of it"
        else:
            continue
        wrong.append(f"{jtu.keystr(path) or 'it'} {leaf.shape} {why}")
    if wrong:
        raise ValueError(
            f"place the state over team.mesh, and not over its axis {replica!r}, so that each "
            "replica has all of it (out_shardings of the step do so for its results): "
            + "; ".join(wrong)
        )


def check_kept(state: object) -> None:
    """Raises if a step has taken the memory of what must outlive it."""
    for path, leaf in jtu.tree_leaves_with_path(state):
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise TeamError(
                f"write the step without donating its state: {jtu.keystr(path) or 'it'} "
                f"{leaf.shape} has been deleted, and is needed if a process is lost",
                restart=False,
            )


def moved(state: State, mesh: Mesh) -> State:
    """The same arrays on the devices that are left of theirs. Nothing moves."""

    def one(leaf: object) -> object:
        if not _is_shared(leaf) or not isinstance(leaf.sharding, NamedSharding):
            return leaf
        before = leaf.sharding
        return array_like(leaf, NamedSharding(mesh, before.spec, memory_kind=before.memory_kind))

    return jax.tree.map(one, state)


def copied(state: State) -> State:
    """Copies for a step that donates them."""
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else leaf, state)


def bytes_of(state: object) -> int:
    """On the devices of this process."""
    arrays = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
    return sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards)

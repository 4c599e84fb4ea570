"""Where each leaf of an optimiser's state is, with `by_matrix`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..._core.placement import axis_names
from ..._core.tree import first_difference
from ..._moving.transfer import filter_shard
from .group import MatrixGroup
from .transform import Tree


@dataclass(frozen=True)
class GroupUpdate:
    """How the matrices of a group are updated: in the place of the leaf `example` in the tree, with
    nothing else in it. `state` is the structure of the transform's state of these alone, and
    `is_own` tells which of its leaves depend on the matrix. For each leaf of the group, `at` are
    the numbers of these leaves in the transform's state of the whole tree.

    `work` is what the update of a matrix computes, None if that is unknown. `reads_weights` and
    `init_reads` tell whether `update` and `init` read the weights' values.
    """

    group: MatrixGroup
    work: int | None
    example: int
    state: Any
    is_own: tuple[bool, ...]
    at: tuple[tuple[int, ...], ...]
    reads_weights: bool
    init_reads: bool


@dataclass(frozen=True)
class Layout:
    """Where each leaf of the transform's state is. It is static, so it says all that is needed to
    read a state without the transform.

    `over` is what was asked for. `others` are the leaves that are updated where they are kept, and
    `others_at` the leaves of their state, by their numbers in that of the whole tree, whose
    structure is `plain`, and dtypes `plain_dtypes`. `others_like` are the weights that these are
    like, None if one has another shape. `shapes` and `kept` are those of all weights.
    """

    tree: Any
    over: tuple[str, ...] | None
    updates: tuple[GroupUpdate, ...]
    others: tuple[int, ...]
    others_at: tuple[int, ...]
    others_like: tuple[int | None, ...]
    plain: Any
    plain_dtypes: tuple[np.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    kept: tuple[NamedSharding, ...]

    @property
    def groups(self) -> list[MatrixGroup]:
        return [update.group for update in self.updates]

    def leaves_of(self, tree: object, what: str) -> list[jax.Array]:
        """The leaves of gradients or weights, which must be like the weights of `init`."""
        like = self.tree.unflatten([jax.ShapeDtypeStruct(x, float) for x in self.shapes])
        return checked(tree, like, what, "create the state anew, by init(params)")

    def placed(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """The leaves of gradients, weights or updates where the weights are kept."""
        return filter_shard(list(leaves), None if self._is_on_one else list(self.kept))

    def state_placed(self, state: Tree) -> Tree:
        """The state of `others`, where these are kept."""
        arrays, tree = jtu.tree_flatten(state)
        like = [None if i is None else self.kept[i] for i in self.others_like]
        return tree.unflatten(filter_shard(arrays, None if self._is_on_one else like))

    @property
    def _is_on_one(self) -> bool:
        return self.kept[0].mesh.size == 1

    def only(self, leaves: Sequence[jax.Array], numbers: Sequence[int]) -> Tree:
        """The tree without the other leaves."""
        chosen = set(numbers)
        return self.tree.unflatten([x if i in chosen else None for i, x in enumerate(leaves)])

    def on(self, shardings: Sequence[NamedSharding]) -> "Layout":
        """The same leaves, with each weight kept at its sharding: leaves of a group are kept
        alike.
        """
        over = self.over
        if over is None:
            entries = [entry for s in shardings for entry in s.spec.partitions]
            over = tuple(dict.fromkeys(axis for e in entries for axis in axis_names(e)))
        updates: list[GroupUpdate] = []
        starts: dict[PartitionSpec, int] = {}
        for update in self.updates:
            alike: dict[PartitionSpec, list[int]] = {}
            for member, i in enumerate(update.group.numbers):
                alike.setdefault(shardings[i].spec, []).append(member)
            for spec, members in alike.items():
                numbers = tuple(update.group.numbers[member] for member in members)
                mesh = shardings[numbers[0]].mesh
                here = tuple(axis for axis in over if axis in mesh.shape)
                group = replace(update.group, numbers=numbers, spec=spec, over=here, mesh=mesh)
                start = starts.get(group.state_spec, 0)
                starts[group.state_spec] = (start + group.count) % group.sharers
                at = tuple(update.at[member] for member in members)
                updates.append(replace(update, group=replace(group, start=start), at=at))
        return replace(self, updates=tuple(updates), kept=tuple(shardings))


def checked(tree: object, like: object, what: str, instead: str) -> list[jax.Array]:
    """The leaves of a tree that must have the structure and the shapes of `like`."""
    try:
        leaves = jtu.tree_structure(like).flatten_up_to(tree)
    except ValueError as error:
        path, was, now = first_difference(like, tree)
        at = f"{what}{path}"
        raise ValueError(f"by_matrix: {instead}: {at} is {now} instead of {was}") from error
    for (path, x), y in zip(jtu.tree_leaves_with_path(like), leaves, strict=True):
        if y is None or np.shape(y) != x.shape:
            now = "None" if y is None else f"of shape {np.shape(y)}"
            at = f"{what}{jtu.keystr(path)}"
            raise ValueError(f"by_matrix: {instead}: {at} is {now} instead of {x.shape}")
    return leaves

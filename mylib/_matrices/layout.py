"""Where each leaf of an optimiser's state is, with `by_matrix`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import NamedSharding

from .._placement import axis_names
from .group import MatrixGroup


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

    `over` is what was asked for. `others` are the leaves that are no matrices, and `others_at` the
    leaves of their state, by their numbers in that of the whole tree, whose structure is `plain`.
    `others_like` are the weights that these are like, None if one has another shape, and
    `others_places` where they are.
    """

    tree: Any
    over: tuple[str, ...] | None
    updates: tuple[GroupUpdate, ...]
    others: tuple[int, ...]
    others_at: tuple[int, ...]
    others_like: tuple[int | None, ...]
    others_places: tuple[NamedSharding | None, ...]
    plain: Any

    @property
    def groups(self) -> list[MatrixGroup]:
        return [update.group for update in self.updates]

    def only(self, leaves: Sequence[Any], numbers: Sequence[int]) -> Any:
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
        starts: dict[Any, int] = {}
        for update in self.updates:
            alike: dict[Any, list[int]] = {}
            for member, i in enumerate(update.group.numbers):
                alike.setdefault(shardings[i].spec, []).append(member)
            for spec, members in alike.items():
                numbers = tuple(update.group.numbers[member] for member in members)
                mesh = shardings[numbers[0]].mesh
                here = tuple(axis for axis in over if axis in mesh.shape)
                group = replace(update.group, numbers=numbers, spec=spec, over=here, mesh=mesh)
                start = starts.get(group.state_spec, 0)
                starts[group.state_spec] = (start + group.count) % group.owners
                at = tuple(update.at[member] for member in members)
                updates.append(replace(update, group=replace(group, start=start), at=at))
        places = tuple(None if i is None else shardings[i] for i in self.others_like)
        return replace(self, updates=tuple(updates), others_places=places)

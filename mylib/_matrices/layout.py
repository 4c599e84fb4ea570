"""Where each leaf of an optimiser's state is, with `by_matrix`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import NamedSharding

from .._placement import axis_names
from .group import MatrixGroup


@dataclass(frozen=True)
class Own:
    """A leaf of the transform's state that depends on the matrices of one leaf of the model: the
    `array`-th of the group's arrays, for the group's `member`-th leaf.
    """

    group: int
    member: int
    array: int


@dataclass(frozen=True)
class Shared:
    """A leaf of it that doesn't: a count, coefficients. Each of `copies` has one: the number of a
    group, or None for the other leaves, and the place there.
    """

    copies: tuple[tuple[int | None, int], ...]


@dataclass(frozen=True)
class Layout:
    """Where each leaf of the transform's state is. It is static, so it says all that is needed to
    read a state without the transform.

    `over` is what was asked for. `works` are what the update of a matrix of each group computes,
    None if that is unknown. `others` are the leaves that are no matrices, `others_like` the weights
    that their state is like, None if it has another shape, and `others_places` where that is.
    `examples` are the leaves in whose places in the tree the groups are updated, `states` the
    structures of the state of these alone, `owned` tells which of its leaves depend on the matrix,
    `moves_params` and `init_reads` whether `update` and `init` read the weights' values.
    """

    tree: Any
    over: tuple[str, ...] | None
    groups: tuple[MatrixGroup, ...]
    works: tuple[int | None, ...]
    others: tuple[int, ...]
    others_like: tuple[int | None, ...]
    others_places: tuple[NamedSharding | None, ...]
    examples: tuple[int, ...]
    states: tuple[Any, ...]
    owned: tuple[tuple[bool, ...], ...]
    moves_params: tuple[bool, ...]
    init_reads: tuple[bool, ...]
    plain: Any
    places: tuple[Own | Shared, ...]

    def only(self, leaves: Sequence[Any], numbers: Sequence[int]) -> Any:
        """The tree without the other leaves."""
        chosen = set(numbers)
        return self.tree.unflatten([x if i in chosen else None for i, x in enumerate(leaves)])

    def on(self, shardings: Sequence[NamedSharding]) -> "Layout":
        """The same leaves, with each weight kept at its sharding."""
        groups, parts_of = _regrouped(self.groups, shardings, self.over)
        members = {i: (g, k) for g, x in enumerate(groups) for k, i in enumerate(x.numbers)}

        def moved(place: Own | Shared) -> Own | Shared:
            if isinstance(place, Own):
                number = self.groups[place.group].numbers[place.member]
                return Own(*members[number], place.array)
            copies = [
                (part, at)
                for group, at in place.copies
                for part in ([None] if group is None else parts_of[group])
            ]
            return Shared(tuple(copies))

        def of_parts(each: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(x for x, parts in zip(each, parts_of, strict=True) for _ in parts)

        return replace(
            self,
            groups=groups,
            works=of_parts(self.works),
            others_places=tuple(None if i is None else shardings[i] for i in self.others_like),
            examples=of_parts(self.examples),
            states=of_parts(self.states),
            owned=of_parts(self.owned),
            moves_params=of_parts(self.moves_params),
            init_reads=of_parts(self.init_reads),
            places=tuple(map(moved, self.places)),
        )


def _regrouped(
    groups: Sequence[MatrixGroup],
    shardings: Sequence[NamedSharding],
    over: tuple[str, ...] | None,
) -> tuple[tuple[MatrixGroup, ...], list[list[int]]]:
    """Groups whose leaves are kept alike; and for each of `groups` the numbers of its parts."""
    if over is None:
        entries = [entry for s in shardings for entry in s.spec.partitions]
        over = tuple(dict.fromkeys(axis for e in entries for axis in axis_names(e)))
    made: list[MatrixGroup] = []
    parts_of: list[list[int]] = []
    starts: dict[Any, int] = {}
    for group in groups:
        alike: dict[Any, list[int]] = {}
        for i in group.numbers:
            alike.setdefault(shardings[i].spec, []).append(i)
        parts_of.append([*range(len(made), len(made) + len(alike))])
        for spec, numbers in alike.items():
            mesh = shardings[numbers[0]].mesh
            here = tuple(axis for axis in over if axis in mesh.shape)
            part = replace(group, numbers=tuple(numbers), spec=spec, over=here, mesh=mesh)
            start = starts.get(part.state_spec, 0)
            starts[part.state_spec] = (start + part.count) % part.owners
            made.append(replace(part, start=start))
    return tuple(made), parts_of

"""A tree without its arrays."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count
from operator import itemgetter
from typing import Any, NamedTuple

import jax.tree_util as jtu

from .leaves import Leaves, is_array, which_are_arrays

Arrays = list[Any]


Static = tuple[Any, ...]


@jtu.register_static
@dataclass(frozen=True, eq=False)
class Outline:
    """A tree without its arrays: its structure, a flag for each leaf, and its static leaves."""

    treedef: Any
    are_arrays: tuple[bool, ...]
    static: Static

    @cached_property
    def count(self) -> int:
        """The number of arrays."""
        return len(self.are_arrays) - len(self.static)

    @cached_property
    def positions(self) -> frozenset[int]:
        """The positions of the static leaves."""
        return frozenset(i for i, is_array in enumerate(self.are_arrays) if not is_array)

    def fill(self, arrays: Iterable[Any]) -> Any:
        if self.static:
            arrays = self._in_order((*arrays, *self.static))
        return self.treedef.unflatten(arrays)

    @cached_property
    def _in_order(self) -> "Take":
        """Puts the arrays, and the static leaves after them, back into the order of the tree."""
        arrays, static = count(), count(self.count)
        return _taking([next(arrays if x else static) for x in self.are_arrays])


def outlined(tree: Any, abstract: bool = False) -> tuple[Arrays, Outline]:
    """Splits a tree into its arrays and its outline. `jax.ShapeDtypeStruct`s are arrays if
    `abstract`.
    """
    leaves, treedef = jtu.tree_flatten(tree)
    arrays, are_arrays, static = parted(leaves, abstract)
    return arrays, Outline(treedef, are_arrays, static)


def outline_of(leaves: Leaves) -> Outline:
    places = set(leaves.positions)
    flags = tuple(i in places for i in range(len(leaves.all)))
    static = tuple(x for i, x in enumerate(leaves.all) if i not in places)
    return Outline(leaves.treedef, flags, static)


def parted(leaves: list[Any], abstract: bool = False) -> tuple[Arrays, tuple[bool, ...], Static]:
    """Splits a tree's leaves: the arrays, a flag for each leaf, and the static leaves."""
    partition = _partition_by_type(tuple(map(type, leaves)), abstract)
    if partition is None:
        partition = _Partition.of(tuple([is_array(x, abstract) for x in leaves]))
    are_arrays, arrays_of, static_of = partition
    if static_of is None:
        return leaves, are_arrays, ()
    return list(arrays_of(leaves)), are_arrays, static_of(leaves)


Take = Callable[[Sequence[Any]], tuple[Any, ...]]


class _Partition(NamedTuple):
    """Flags a tree's array leaves, with functions that pick the array and the static leaves."""

    are_arrays: tuple[bool, ...]
    arrays_of: Take
    static_of: Take | None

    @classmethod
    def of(cls, are_arrays: tuple[bool, ...]) -> "_Partition":
        static = [i for i, is_array in enumerate(are_arrays) if not is_array]
        arrays = [i for i, is_array in enumerate(are_arrays) if is_array]
        return cls(are_arrays, _taking(arrays), _taking(static) if static else None)


def _taking(index: list[int]) -> Take:
    if len(index) > 1:
        return itemgetter(*index)
    return lambda leaves: tuple([leaves[i] for i in index])


@lru_cache(maxsize=4096)
def _partition_by_type(types: tuple[type, ...], abstract: bool) -> _Partition | None:
    """How to split leaves of these types, or None if the types don't decide it."""
    are_arrays = which_are_arrays(types, abstract)
    return None if are_arrays is None else _Partition.of(are_arrays)

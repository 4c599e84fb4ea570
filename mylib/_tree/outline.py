"""A tree without its arrays."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count
from operator import itemgetter
from typing import Any, NamedTuple

import jax.tree_util as jtu

from .leaves import is_array, which_are_arrays

Arrays = list[Any]


Static = tuple[Any, ...]


@jtu.register_static
@dataclass(frozen=True, eq=False)
class Outline:
    """A tree without its arrays: its structure, which of its leaves are arrays, and the others."""

    treedef: Any
    are_arrays: tuple[bool, ...]
    static: Static

    @cached_property
    def count(self) -> int:
        """How many arrays there were."""
        return len(self.are_arrays) - len(self.static)

    @cached_property
    def positions(self) -> frozenset[int]:
        """Those of the leaves that are no arrays."""
        return frozenset(i for i, is_array in enumerate(self.are_arrays) if not is_array)

    def fill(self, arrays: Iterable[Any]) -> Any:
        if self.static:
            arrays = self._in_order((*arrays, *self.static))
        return self.treedef.unflatten(arrays)

    @cached_property
    def _in_order(self) -> "Take":
        """Puts the arrays, and what is static after them, where they were."""
        arrays, static = count(), count(self.count)
        return _taking([next(arrays if x else static) for x in self.are_arrays])


def outlined(tree: Any, abstract: bool = False) -> tuple[Arrays, Outline]:
    """A tree's arrays, and the rest of it. `jax.ShapeDtypeStruct`s are arrays if `abstract`."""
    leaves, treedef = jtu.tree_flatten(tree)
    arrays, are_arrays, static = parted(leaves, abstract)
    return arrays, Outline(treedef, are_arrays, static)


def parted(leaves: list[Any], abstract: bool = False) -> tuple[Arrays, tuple[bool, ...], Static]:
    """A tree's leaves: the arrays, which of them these are, and the others."""
    parts = _parts_by_type(tuple(map(type, leaves)), abstract)
    if parts is None:
        parts = _Parts.of(tuple([is_array(x, abstract) for x in leaves]))
    are_arrays, arrays_of, static_of = parts
    if static_of is None:
        return leaves, are_arrays, ()
    return list(arrays_of(leaves)), are_arrays, static_of(leaves)


Take = Callable[[Sequence[Any]], tuple[Any, ...]]


class _Parts(NamedTuple):
    """Which of a tree's leaves are arrays, and what takes these and the others out of them."""

    are_arrays: tuple[bool, ...]
    arrays_of: Take
    static_of: Take | None

    @classmethod
    def of(cls, are_arrays: tuple[bool, ...]) -> "_Parts":
        static = [i for i, is_array in enumerate(are_arrays) if not is_array]
        arrays = [i for i, is_array in enumerate(are_arrays) if is_array]
        return cls(are_arrays, _taking(arrays), _taking(static) if static else None)


def _taking(index: list[int]) -> Take:
    if len(index) > 1:
        return itemgetter(*index)
    return lambda leaves: tuple([leaves[i] for i in index])


@lru_cache(maxsize=4096)
def _parts_by_type(types: tuple[type, ...], abstract: bool) -> _Parts | None:
    """The parts of leaves of these types, or None if the types don't tell."""
    are_arrays = which_are_arrays(types, abstract)
    return None if are_arrays is None else _Parts.of(are_arrays)

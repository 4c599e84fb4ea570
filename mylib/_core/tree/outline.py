"""A tree split into its arrays and everything else, which can be compared and hashed."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property, lru_cache
from itertools import count
from operator import is_, itemgetter
from typing import Any, NamedTuple

import jax.tree_util as jtu

from ..compat import data_of, nodes_of, which_have_data
from .changing import state_of
from .leaves import Leaves, is_array, natively, which_are_arrays

Arrays = list[Any]
Static = tuple[object, ...]


@dataclass(eq=False, repr=False)
class Outline:
    """A tree without its arrays: its structure, a flag for each leaf, and its static leaves.

    Two are equal if their trees differ only in arrays. Unlike `==` that distinguishes 1, True and
    1.0, and 0.0 and -0.0, at any depth; NaN equals itself. What is static can change in place, so
    one that is kept notes its `state` first.
    """

    treedef: Any
    are_arrays: tuple[bool, ...]
    static: Static

    @cached_property
    def count(self) -> int:
        """The number of arrays."""
        return len(self.are_arrays) - len(self.static)

    def fill(self, arrays: Iterable[object]) -> Any:
        if self.static:
            arrays = self._in_order((*arrays, *self.static))
        return self.treedef.unflatten(arrays)

    @cached_property
    def _in_order(self) -> "Take":
        """Puts the arrays, and the static leaves after them, back into the order of the tree."""
        arrays, static = count(), count(self.count)
        return _taking([next(arrays if x else static) for x in self.are_arrays])

    @cached_property
    def data(self) -> list[object]:
        """The nodes' own data: static fields, dict keys."""
        return self._data_in(self.treedef)

    def _data_in(self, equal: object) -> list[object]:
        """The data in an equal structure."""
        return data_of(self._with_data(nodes_of(equal)))

    @cached_property
    def _with_data(self) -> "Take":
        """Picks the nodes that have data."""
        return _taking(which_have_data(nodes_of(self.treedef)))

    @cached_property
    def state(self) -> Static:
        """Differs from `state_now()` if a static object has changed in place since this was first
        read; empty if none can.
        """
        return self.state_now()

    def noted(self) -> "Outline":
        """Itself, after reading its `state`."""
        _ = self.state
        return self

    def state_now(self) -> Static:
        return state_of((*self.static, *self.data))

    @cached_property
    def _hash(self) -> int:
        static = self.static
        if not _FLOATS.isdisjoint(map(type, static)):
            # Each NaN has another hash.
            static = tuple([repr(x) if type(x) in _FLOATS else x for x in static])
        return hash((self.treedef, static))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        # The elements are usually identical objects, and checking that first is fast.
        return (
            isinstance(other, Outline)
            and self.treedef == other.treedef
            and self.are_arrays == other.are_arrays
            and _all_same(self.static, other.static)
            # Looking at each node is slow. Nodes that equal nodes without data have none.
            and (not self.data or _all_same(self.data, self._data_in(other.treedef)))
            and (not self.state or self.state == other.state)
        )

    def numbers_changed(self, other: "Outline") -> set[int]:
        """The leaves at which two trees have different Python numbers, if they differ in nothing
        else.
        """
        if self.treedef != other.treedef or self.are_arrays != other.are_arrays:
            return set()
        if not _all_same(self.data, other.data):
            return set()
        leaves = [i for i, is_array in enumerate(self.are_arrays) if not is_array]
        trios = zip(leaves, self.static, other.static, strict=True)
        changed = [(i, old, new) for i, old, new in trios if not _is_same(old, new)]
        are_numbers = all(_is_number(old) and _is_number(new) for _, old, new in changed)
        return {i for i, *_ in changed} if are_numbers else set()


@dataclass(frozen=True, eq=False)
class Rest:
    """Everything but arrays in what a program returns. It is not compared: JAX hashes the structure
    of results, and static leaves of results need no hash.
    """

    outline: Outline


@jtu.register_pytree_node_class
@dataclass(slots=True, eq=False, repr=False)
class Made:
    """What a program returns: arrays, and the rest for each trace. `failed` is the number of a
    failed check of errors, or -1; None if there are no checks.
    """

    arrays: Arrays
    rest: Rest
    failed: object = None

    @classmethod
    def of(cls, tree: object) -> "Made":
        arrays, outline = outlined(tree)
        return cls(arrays, Rest(outline))

    def tree(self) -> Any:
        return self.rest.outline.fill(self.arrays)

    def tree_flatten(self) -> tuple[tuple[Arrays, object], Rest]:
        return (self.arrays, self.failed), self.rest

    @classmethod
    def tree_unflatten(cls, rest: Rest, children: tuple[Arrays, object]) -> "Made":
        arrays, failed = children
        return cls(arrays, rest, failed)


def outlined(tree: object, abstract: bool = False) -> tuple[Arrays, Outline]:
    """Splits a tree into its arrays and everything else. `jax.ShapeDtypeStruct`s are arrays if
    `abstract`.
    """
    leaves, treedef = jtu.tree_flatten(tree)
    partition = _partition_by_type(tuple(map(type, leaves)), abstract)
    if partition is None:
        partition = _Selection.of(tuple([is_array(x, abstract) for x in leaves]))
        pairs = zip(leaves, partition.are_arrays, strict=True)
        leaves = [natively(x) if array else x for x, array in pairs]
    are_arrays, arrays_of, static_of = partition
    if static_of is None:
        return leaves, Outline(treedef, are_arrays, ())
    return list(arrays_of(leaves)), Outline(treedef, are_arrays, static_of(leaves))


def outline_of(leaves: Leaves) -> Outline:
    places = set(leaves.positions)
    flags = tuple(i in places for i in range(len(leaves.all)))
    static = tuple(x for i, x in enumerate(leaves.all) if i not in places)
    return Outline(leaves.treedef, flags, static)


Take = Callable[[Sequence[Any]], tuple[Any, ...]]


class _Selection(NamedTuple):
    """Flags a tree's array leaves, with functions that pick the array and the static leaves."""

    are_arrays: tuple[bool, ...]
    arrays_of: Take
    static_of: Take | None

    @classmethod
    def of(cls, are_arrays: tuple[bool, ...]) -> "_Selection":
        static = [i for i, is_array in enumerate(are_arrays) if not is_array]
        arrays = [i for i, is_array in enumerate(are_arrays) if is_array]
        return cls(are_arrays, _taking(arrays), _taking(static) if static else None)


def _taking(index: list[int]) -> Take:
    if len(index) > 1:
        return itemgetter(*index)
    return lambda leaves: tuple([leaves[i] for i in index])


@lru_cache(maxsize=4096)
def _partition_by_type(types: tuple[type, ...], abstract: bool) -> _Selection | None:
    """How to split leaves of these types, or None if the types don't decide it."""
    are_arrays = which_are_arrays(types, abstract)
    return None if are_arrays is None else _Selection.of(are_arrays)


_FLOATS = {float, complex}


def _is_number(x: object) -> bool:
    return isinstance(x, int | float | complex) and not isinstance(x, bool)


def _all_same(xs: Sequence[object], ys: Sequence[object]) -> bool:
    return len(xs) == len(ys) and (all(map(is_, xs, ys)) or all(map(_is_same, xs, ys)))


def _is_same(x: object, y: object) -> bool:
    if x is y:
        return True
    if type(x) is not type(y):
        return False
    if type(x) in _FLOATS:
        return repr(x) == repr(y)
    return bool(x == y) and _has_same_types(x, y)


def _has_same_types(x: Any, y: Any) -> bool:
    """Whether two equal objects of one type have the same components."""
    if isinstance(x, tuple | list):
        return _all_same(x, y)
    if isinstance(x, set | frozenset):
        return _all_found(x, y)
    if isinstance(x, dict):
        return _all_found(x, y) and all(_is_same(value, y[key]) for key, value in x.items())
    if is_dataclass(x):
        pairs = [(getattr(x, f.name), getattr(y, f.name)) for f in fields(x) if f.compare]
        # Attributes that a class's own `__eq__` ignores are ignored here.
        return all(_is_same(a, b) for a, b in pairs if isinstance(a, _PLAIN) and a == b)
    return True


_PLAIN = (int, float, complex, tuple, list, set, frozenset, dict)


def _all_found(xs: Iterable[object], ys: Iterable[object]) -> bool:
    by_value = {y: y for y in ys}
    return all(_is_same(x, by_value[x]) for x in xs)

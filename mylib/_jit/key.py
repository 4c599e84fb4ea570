"""Cache keys for the programs of a compiled function."""

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from operator import is_
from typing import Any


class Key:
    """A tree without its arrays. Keys are equal if their trees differ only in arrays. Unlike `==`
    they distinguish 1, True and 1.0, and 0.0 and -0.0, at any depth.
    """

    __slots__ = ("_data", "are_arrays", "static", "treedef")

    def __init__(self, treedef: Any, are_arrays: tuple[bool, ...], static: tuple[Any, ...]):
        self.treedef: Any = treedef
        self.are_arrays: tuple[bool, ...] = are_arrays
        self.static: tuple[Any, ...] = static
        self._data: list[Any] | None = None

    @property
    def data(self) -> list[Any]:
        """The nodes' own data: static fields, dict keys."""
        if self._data is None:
            self._data = _data_of_nodes(self)
        return self._data

    def __hash__(self) -> int:
        static = self.static
        if not _FLOATS.isdisjoint(map(type, static)):
            # Each NaN has another hash.
            static = tuple([repr(x) if type(x) in _FLOATS else x for x in static])
        return hash((self.treedef, static))

    def __eq__(self, other: Any) -> bool:
        # The elements are usually identical objects, and checking that first is fast.
        return (
            self.treedef == other.treedef
            and (self.are_arrays is other.are_arrays or self.are_arrays == other.are_arrays)
            and (self.static is other.static or _all_same(self.static, other.static))
            # Looking at each node is slow. Nodes that equal nodes without data have none.
            and (not other.data or _all_same(self.data, other.data))
        )

    def numbers_changed(self, other: "Key") -> set[int]:
        """The leaves at which two trees have different Python numbers, if they differ in nothing
        else.
        """
        if self.treedef != other.treedef or self.are_arrays != other.are_arrays:
            return set()
        fixed, others = [*self.static, *self.data], [*other.static, *other.data]
        if len(fixed) != len(others):
            return set()
        pairs = list(zip(fixed, others, strict=True))
        changed = [i for i, (x, y) in enumerate(pairs) if not _is_same(x, y)]
        leaves = [i for i, is_array in enumerate(self.are_arrays) if not is_array]
        # The entries after the leaves belong to nodes.
        if not all(i < len(leaves) and all(map(_is_number, pairs[i])) for i in changed):
            return set()
        return {leaves[i] for i in changed}


def _data_of_nodes(key: Key) -> list[Any]:
    data: list[Any] = []

    def look(_: Any, aux: Any) -> None:
        if aux is None:  # lists, tuples
            return
        if aux.__class__ is tuple or aux.__class__ is list:
            data.extend(aux)
        else:
            data.append(aux)

    # The leaves don't matter. There are many, and `id`, a builtin, is fast.
    key.treedef.walk(look, id, key.are_arrays)
    return data


_FLOATS = {float, complex}


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float | complex) and not isinstance(x, bool)


def _all_same(xs: Any, ys: Any) -> bool:
    return len(xs) == len(ys) and (all(map(is_, xs, ys)) or all(map(_is_same, xs, ys)))


def _is_same(x: Any, y: Any) -> bool:
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


def _all_found(xs: Iterable[Any], ys: Iterable[Any]) -> bool:
    own = {y: y for y in ys}
    return all(_is_same(x, own[x]) for x in xs)

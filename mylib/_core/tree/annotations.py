"""The axis names that jaxtyping annotations give to the leaves of a PyTree."""

import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from operator import itemgetter
from typing import Any

import jax.tree_util as jtu
from jaxtyping import AbstractArray

from .lazy import annotations_of

Step = tuple[Any, Any]
_ABSENT = object()


# The number of a leaf's dimensions before the annotated ones, and the names of all its dimensions.
Fit = tuple[int, tuple[str | None, ...]]


# The types that an annotation allows.
_Hint = Sequence[object]


def fit_of(steps: Sequence[Step], ndim: int) -> Fit | None:
    """The names of the dimensions of the leaf at the end of `steps`; None if it has no annotation.

    The innermost annotation on the path counts. It belongs to a field of a Module (or of another
    dataclass), or to the elements of a container.
    """
    fields = [i for i, (_, key) in enumerate(steps) if isinstance(key, jtu.GetAttrKey)]
    if not fields:
        return None
    node, field = steps[fields[-1]]
    hint = _field_hints(type(node)).get(field.name, ())
    for node, key in steps[fields[-1] + 1 :]:
        if isinstance(key, jtu.SequenceKey) and isinstance(node, Sequence):
            hint = _element_hint(hint, key.idx)
        elif isinstance(key, jtu.DictKey) and isinstance(node, Mapping):
            hint = _element_hint(hint, None)
        else:
            return None
    arrays = [x for x in hint if isinstance(x, type) and issubclass(x, AbstractArray)]
    fits = [name_dimensions(x.dim_str, ndim) for x in arrays]
    # Of `Float[Array, "a"] | Float[Array, "a b"]`, take the one that covers the most dimensions.
    return min(filter(None, fits), key=itemgetter(0), default=None)


class Walker:
    """Finds the nodes on the path to a leaf of a tree."""

    def __init__(self, tree: object):
        self.tree = tree
        # The children of each node by key. The nodes are kept, so that their ids stay valid.
        self._flattened: dict[int, tuple[object, dict[str, object]]] = {}

    def steps_to(self, path: Sequence[object]) -> Sequence[Step]:
        """The nodes on `path`, each with the key of the next one. It ends early if a key leads
        nowhere.
        """
        steps: list[Step] = []
        node = self.tree
        for i, key in enumerate(path):
            if i:
                node = self._children(node).get(str(path[i - 1]), _ABSENT)
            if node is _ABSENT:
                break
            steps.append((node, key))
        return steps

    def _children(self, node: object) -> dict[str, object]:
        if id(node) not in self._flattened:
            children, _ = jtu.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
            by_key = {str(path[0]): child for path, child in children if path}
            self._flattened[id(node)] = node, by_key
        return self._flattened[id(node)][1]


@cache
def _field_hints(cls: type) -> Mapping[str, _Hint]:
    hints: dict[str, _Hint] = {}
    for base in reversed(cls.__mro__):
        names = getattr(sys.modules.get(base.__module__), "__dict__", {})
        for name, written in annotations_of(base).items():
            # One field at a time: an annotation that can't be evaluated here (a name imported for
            # type checkers only) must not cost the other fields theirs.
            field = types.SimpleNamespace(__annotations__={name: written})
            try:
                evaluated = typing.get_type_hints(field, names, dict(vars(base)))
            except (AttributeError, NameError, SyntaxError, TypeError):
                hints.pop(name, None)
            else:
                hints[name] = _hint(evaluated[name])
    return hints


def _alternatives(annotation: object) -> list[object]:
    # A TypeVar; NewType("Weight", Float[Array, "out in"]); type Weight = Float[Array, "out in"].
    for name in ("__bound__", "__supertype__", "__value__"):
        if hasattr(annotation, name):
            return _alternatives(getattr(annotation, name))
    if typing.get_origin(annotation) in (typing.Annotated, typing.Final):
        return _alternatives(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [a for arg in typing.get_args(annotation) for a in _alternatives(arg)]
    return [annotation]


def _hint(annotation: object) -> _Hint:
    try:
        return _alternatives(annotation)
    except NameError:  # `type Weight = ...` of a name that was imported for type checkers only
        return ()


def _element_hint(hint: _Hint, index: int | None) -> _Hint:
    for choice in hint:
        origin, args = typing.get_origin(choice), typing.get_args(choice)
        if not isinstance(origin, type) or not args:
            continue
        if issubclass(origin, tuple) and index is not None:
            each = [args[0]] * (index + 1) if args[1:] == (Ellipsis,) else args
            return _hint(each[index]) if index < len(each) else ()
        if issubclass(origin, Mapping) and len(args) == 2:
            return _hint(args[1])
        if issubclass(list, origin) and len(args) == 1:
            return _hint(args[0])
    return ()


@cache
def name_dimensions(names: str, ndim: int) -> Fit | None:
    """Reads `names`, written as in a jaxtyping annotation, for an array of rank `ndim`; None if
    there are more names than dimensions.
    """
    dims = names.split()
    dim_names = [_dimension_name(dim) for dim in dims]
    at = next((i for i, dim in enumerate(dims) if _is_variadic(dim)), None)
    before, after = ([], dim_names) if at is None else (dim_names[:at], dim_names[at + 1 :])
    extra = ndim - len(before) - len(after)
    if extra < 0:
        return None
    return (extra if at is None else 0), (*before, *[None] * extra, *after)


# "#" broadcasts, "*" stands for several dimensions, "?" varies from leaf to leaf, and "heads=4"
# labels a size. The rest is a name, a size, an expression, or anonymous: "_", "_name".
_DIMENSION = re.compile(r"(?P<marks>[#*?_]*)((?P<label>\w+)=(?P<more>[#*?_]*))?(?P<value>.*)")


def _syntax(dim: str) -> Mapping[str, str]:
    match = _DIMENSION.fullmatch(dim)
    assert match is not None
    return match.groupdict(default="")


def _is_variadic(dim: str) -> bool:
    syntax = _syntax(dim)
    return dim == "..." or "*" in syntax["marks"] + syntax["more"]


def _dimension_name(dim: str) -> str | None:
    syntax = _syntax(dim)
    if "_" in syntax["marks"] + syntax["more"]:
        return None
    return next((text for text in (syntax["value"], syntax["label"]) if text.isidentifier()), None)

"""The axis names that jaxtyping annotations give to the leaves of a PyTree."""

import re
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import jax.tree_util as jtu
from jaxtyping import AbstractArray

from .lazy import annotations_of

Step = tuple[Any, Any]
_ABSENT = object()


# The number of a leaf's dimensions before the annotated ones, and the names of all its dimensions.
Fit = tuple[int, tuple[str | None, ...]]


def fit_of(steps: Iterable[Step], ndim: int) -> Fit | None:
    """The names of the dimensions of the leaf at the end of `steps`; None if it has no annotation.

    The innermost annotation on the path counts. It belongs to a field of a Module (or of another
    dataclass), or to the elements of a container.
    """
    annotation: Any = None
    for node, key in steps:
        if isinstance(key, jtu.GetAttrKey):
            annotation = _field_annotations(type(node)).get(key.name)
        elif isinstance(key, jtu.SequenceKey) and isinstance(node, Sequence):
            annotation = _element_annotation(annotation, key.idx)
        elif isinstance(key, jtu.DictKey) and isinstance(node, Mapping):
            annotation = _element_annotation(annotation, None)
        else:
            annotation = None
    return _name_dimensions(annotation, ndim)


class Walker:
    """Finds the nodes on the path to a leaf of a tree."""

    def __init__(self, tree: Any):
        self.tree = tree
        # The children of nodes whose keys don't show how to read them. The nodes are kept, so that
        # their ids stay valid.
        self._flattened: dict[int, tuple[Any, dict[str, Any]]] = {}

    def steps_to(self, path: Iterable[Any]) -> Iterator[Step]:
        """The nodes on `path`, each with the key of the next one. It ends early if a key leads
        nowhere.
        """
        node = self.tree
        for key in path:
            yield node, key
            node = self._child(node, key)
            if node is _ABSENT:
                return

    def _child(self, node: Any, key: Any) -> Any:
        if isinstance(key, jtu.GetAttrKey):
            child = getattr(node, key.name, _ABSENT)
            if child is not _ABSENT:
                return child
        elif isinstance(key, jtu.SequenceKey) and isinstance(node, Sequence):
            return node[key.idx] if key.idx < len(node) else _ABSENT
        elif isinstance(key, jtu.DictKey) and isinstance(node, Mapping):
            return node.get(key.key, _ABSENT)
        return self._children(node).get(str(key), _ABSENT)

    def _children(self, node: Any) -> dict[str, Any]:
        known = self._flattened.get(id(node))
        if known is None:
            children, _ = jtu.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
            known = node, {str(path[0]): child for path, child in children if path}
            self._flattened[id(node)] = known
        return known[1]


@cache
def _field_annotations(cls: type) -> Mapping[str, Any]:
    annotations: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        names = getattr(sys.modules.get(base.__module__), "__dict__", {})
        for name, written in annotations_of(base).items():
            # One field at a time: an annotation that can't be evaluated here (a name imported for
            # type checkers only) must not cost the other fields theirs.
            field = types.SimpleNamespace(__annotations__={name: written})
            try:
                hints = typing.get_type_hints(field, names, dict(vars(base)))
            except (AttributeError, NameError, SyntaxError, TypeError):
                annotations.pop(name, None)
            else:
                annotations[name] = _filled_in(hints[name], _arguments(cls, base))
    return annotations


def _arguments(cls: type, base: type) -> Mapping[Any, Any]:
    """The arguments that `cls` gives to the type variables of a generic base."""
    for written in getattr(cls, "__orig_bases__", ()):
        origin, args = typing.get_origin(written) or written, typing.get_args(written)
        parameters = getattr(origin, "__parameters__", ())
        if origin is base:
            return dict(zip(parameters, args, strict=False))
        if isinstance(origin, type) and issubclass(origin, base):
            given = dict(zip(parameters, args, strict=False))
            inner = _arguments(origin, base)
            return {variable: _filled_in(arg, given) for variable, arg in inner.items()}
    return {}


def _filled_in(annotation: Any, arguments: Mapping[Any, Any]) -> Any:
    if isinstance(annotation, typing.TypeVar):
        return arguments.get(annotation, annotation)
    variables = getattr(annotation, "__parameters__", ())
    if not isinstance(annotation, type) and any(v in arguments for v in variables):
        return annotation[tuple(arguments.get(v, v) for v in variables)]
    return annotation


def _alternatives(annotation: Any) -> list[Any]:
    if isinstance(annotation, typing.TypeVar):
        return _alternatives(annotation.__bound__)
    if hasattr(annotation, "__supertype__"):  # NewType("Weight", Float[Array, "out in"])
        return _alternatives(annotation.__supertype__)
    if hasattr(annotation, "__value__"):  # type Weight = Float[Array, "out in"]
        return _alternatives(annotation.__value__)
    if typing.get_origin(annotation) in (typing.Annotated, typing.Final):
        return _alternatives(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [a for arg in typing.get_args(annotation) for a in _alternatives(arg)]
    return [annotation]


def _element_annotation(annotation: Any, index: int | None) -> Any:
    if annotation is None:
        return None
    for choice in _alternatives(annotation):
        origin, args = typing.get_origin(choice), typing.get_args(choice)
        if not isinstance(origin, type) or not args:
            continue
        if issubclass(origin, tuple) and index is not None:
            if len(args) == 2 and args[1] is Ellipsis:
                return args[0]
            return args[index] if index < len(args) else None
        if issubclass(origin, Mapping) and len(args) == 2:
            return args[1]
        if issubclass(list, origin) and len(args) == 1:
            return args[0]
    return None


def _name_dimensions(annotation: Any, ndim: int) -> Fit | None:
    if annotation is None:
        return None
    choices = _alternatives(annotation)
    arrays = [c for c in choices if isinstance(c, type) and issubclass(c, AbstractArray)]
    fits = [fit for array in arrays for fit in _fit(array.dim_str, ndim)]
    # Of `Float[Array, "a"] | Float[Array, "a b"]`, take the one that covers the most dimensions.
    return min(fits, key=lambda fit: fit[0]) if fits else None


def name_dimensions(names: str, ndim: int) -> Fit | None:
    """Reads `names`, written as in a jaxtyping annotation, for an array of rank `ndim`; None if
    there are more names than dimensions.
    """
    return next(iter(_fit(names, ndim)), None)


@cache
def _fit(dim_str: str, ndim: int) -> Sequence[Fit]:
    """The number of dimensions before the annotated ones, and the names of all; empty if the
    annotation has more dimensions than the array.
    """
    dims = dim_str.split()
    names = [_dimension_name(dim) for dim in dims]
    at = next((i for i, dim in enumerate(dims) if _is_variadic(dim)), None)
    before, after = ([], names) if at is None else (names[:at], names[at + 1 :])
    extra = ndim - len(before) - len(after)
    if extra < 0:
        return ()
    return (((extra if at is None else 0), (*before, *[None] * extra, *after)),)


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

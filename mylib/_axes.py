"""The axis names that jaxtyping annotations give to the leaves of a PyTree."""

import types
import typing
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax.tree_util as jtu
from jaxtyping import AbstractArray


def axes_of(tree: Any, path: tuple[Any, ...], ndim: int) -> tuple[str | None, ...] | None:
    """The names of the dimensions of the leaf at `path`, or None if nothing names them.

    The innermost annotation on the way to the leaf counts: a field of a Module, or of another
    dataclass, or what a container's annotation says of its elements.
    """
    annotation: Any = None
    node = tree
    for key in path:
        if isinstance(key, jtu.GetAttrKey):
            annotation = _field_annotations(type(node)).get(key.name)
            node = getattr(node, key.name)
        elif isinstance(key, jtu.SequenceKey):
            annotation = _element_annotation(annotation, key.idx)
            node = node[key.idx]
        elif isinstance(key, jtu.DictKey):
            annotation = _element_annotation(annotation, None)
            node = node[key.key]
        else:
            # A node that hides its children behind numbers: it can't be walked by public means.
            return None
    return _name_dimensions(annotation, ndim)


@lru_cache(maxsize=None)
def _field_annotations(cls: type) -> Mapping[str, Any]:
    try:
        return typing.get_type_hints(cls)
    except (NameError, TypeError):
        # An annotation written as text that can't be looked up here (a name imported for type
        # checkers only). The fields that are annotated with objects still count.
        written = {
            k: v
            for c in reversed(cls.__mro__)
            for k, v in vars(c).get("__annotations__", {}).items()
        }
        return {name: hint for name, hint in written.items() if not isinstance(hint, str)}


def _alternatives(annotation: Any) -> list[Any]:
    if isinstance(annotation, typing.TypeVar):
        return _alternatives(annotation.__bound__)
    if typing.get_origin(annotation) is typing.Annotated:
        return _alternatives(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [a for arg in typing.get_args(annotation) for a in _alternatives(arg)]
    return [annotation]


def _element_annotation(annotation: Any, index: int | None) -> Any:
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
        if issubclass(origin, Sequence) and len(args) == 1:
            return args[0]
    return None


def _name_dimensions(annotation: Any, ndim: int) -> tuple[str | None, ...] | None:
    for choice in _alternatives(annotation):
        if not (isinstance(choice, type) and issubclass(choice, AbstractArray)):
            continue
        names = _fit(choice.dim_str.split(), ndim)
        if names is not None:
            return names
    return None


def _fit(dims: Sequence[str], ndim: int) -> tuple[str | None, ...] | None:
    names = [_dimension_name(dim) for dim in dims]
    at = next((i for i, dim in enumerate(dims) if _is_variadic(dim)), None)
    if at is not None:
        before, after = names[:at], names[at + 1 :]
    else:
        before, after = [], names
    extra = ndim - len(before) - len(after)
    return (*before, *[None] * extra, *after) if extra >= 0 else None


def _is_variadic(dim: str) -> bool:
    return dim == "..." or "*" in dim


def _dimension_name(dim: str) -> str | None:
    # "#" broadcasts, "?" varies from leaf to leaf, "_" is anonymous, "heads=4" says what a size is
    # for. What is left is a name, a size or an expression, and only a name names.
    label, _, value = dim.rpartition("=")
    for text in (value.lstrip("#?*"), label):
        if text.isidentifier() and not text.startswith("_"):
            return text
    return None

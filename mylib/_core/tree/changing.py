"""Static values that can change in place: while they stay the same object, their hash differs."""

import inspect
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, Mesh, PartitionSpec, Sharding

# Hashes by identity, or by what can't change, also in classes that inherit them.
_LASTING_HASHES = frozenset(
    kind.__hash__ for kind in (object, str, bytes, int, float, complex, np.dtype)
)
_LASTING_KINDS = (
    type,
    Enum,
    np.generic,
    inspect.Signature,
    jax.Array,
    jax.ShapeDtypeStruct,
    jtu.PyTreeDef,
    Sharding,
    PartitionSpec,
    Mesh,
    AbstractMesh,
    Format,
)


def state_of(values: Iterable[object]) -> tuple[object, ...]:
    """The hashes of what can change in these values; empty if nothing can. Values without a hash,
    such as lists in static fields, are not looked at.
    """
    values = list(values)
    # Most trees have a few kinds of values, however many there are of them.
    if not any(map(_can_change, set(map(type, values)))):
        return ()
    return tuple(state for state in map(_state_of_one, values) if state is not None)


def _state_of_one(value: Any) -> object:
    if not _can_change(type(value)):
        return None
    if not _is_container(type(value)):
        return hash(value)
    parts = [getattr(value, f.name, None) for f in fields(value)] if is_dataclass(value) else value
    # Python may keep the hash of a container.
    kind = frozenset if isinstance(value, frozenset) else tuple
    states = kind(map(_state_of_one, parts))
    return states if any(state is not None for state in states) else None


@lru_cache(maxsize=4096)
def _can_change(kind: type) -> bool:
    if kind.__hash__ is None or kind.__hash__ in _LASTING_HASHES:
        return False
    if issubclass(kind, _LASTING_KINDS):
        return False
    return kind.__module__ != "builtins" or _is_container(kind)


@lru_cache(maxsize=4096)
def _is_container(kind: type) -> bool:
    """Whether values of this kind can change only in what they hold."""
    if is_dataclass(kind):
        return kind.__dataclass_params__.frozen  # pyright: ignore[reportAttributeAccessIssue]
    return kind.__hash__ in (tuple.__hash__, frozenset.__hash__)

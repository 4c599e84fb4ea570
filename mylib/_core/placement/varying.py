"""Reads and changes the types that tell whether values vary over devices inside `shard_map`."""

from collections.abc import Hashable, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from ..tree import is_placed

T = TypeVar("T")
AxisSet = frozenset[str]


def cast(tree: T, axes: Iterable[Hashable]) -> T:
    """Casts arrays to varying, over those of the axes that are manual here."""
    # In the same order in every process. Otherwise their programs would differ.
    ordered = [axis for axis in manual_axes() if axis in frozenset(axes)]

    def cast_one(x: Any) -> Any:
        if not is_placed(x):
            return x
        missing = tuple(axis for axis in ordered if axis not in varying(x))
        return jax.lax.pcast(jnp.asarray(x), missing, to="varying") if missing else x

    return jax.tree.map(cast_one, tree)


def manual_axes() -> tuple[str, ...]:
    """The manual axes of the surrounding `shard_map`, in the order of the mesh."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def varying(x: object) -> AxisSet:
    """The mesh axes that an array, or its `jax.eval_shape`, varies over."""
    return axes_of_type(x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x))


def axes_of_type(aval: object) -> AxisSet:
    kind = getattr(aval, "manual_axis_type", None)  # None: outside of `shard_map`, or unchecked
    return frozenset() if kind is None else kind.varying


def union(axes: Iterable[AxisSet]) -> AxisSet:
    return frozenset[str]().union(*axes)

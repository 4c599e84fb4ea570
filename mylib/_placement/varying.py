"""What differs between the devices inside `shard_map`, as JAX's types have it."""

from collections.abc import Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from .._tree import Kind, kind_of

T = TypeVar("T")
Axes = frozenset[Any]


def cast(tree: T, axes: Iterable[Any]) -> T:
    """`vary`, over axes that are there."""
    # In the same order in every process: else their programs differ.
    ordered = [axis for axis in manual_axes() if axis in frozenset(axes)]

    def cast_one(x: Any) -> Any:
        if kind_of(x) is Kind.STATIC:
            return x
        missing = tuple(axis for axis in ordered if axis not in varying(x))
        return jax.lax.pcast(jnp.asarray(x), missing, to="varying") if missing else x

    return jax.tree.map(cast_one, tree)


def manual_axes() -> tuple[Any, ...]:
    """The axes that the code around is given its part of, in the order of the mesh."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def varying(x: Any) -> Axes:
    """The mesh axes along which an array differs, or what `jax.eval_shape` says of it."""
    return axes_of_type(x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x))


def axes_of_type(aval: Any) -> Axes:
    kind = getattr(aval, "manual_axis_type", None)  # None: outside of `shard_map`, or unchecked
    return frozenset() if kind is None else kind.varying


def union(axes: Iterable[Axes]) -> Axes:
    return frozenset[Any]().union(*axes)

"""A step's arguments: filled in where they are abstract, in float64, on one device."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ..._core.tree import is_of_keys, name_of
from ..._training.matrices import MatrixState, from_plain, to_plain


def filled(args: Any, high: int | None, seed: int) -> Any:
    """The arguments, with random values in place of `jax.ShapeDtypeStruct`s."""
    nodes, treedef = jtu.tree_flatten_with_path(args)
    states = [
        path for path, x in jtu.tree_flatten_with_path(args, is_leaf=_is_state)[0] if _is_state(x)
    ]
    faults: list[str] = []
    keys = jax.random.split(jax.random.key(seed), max(len(nodes), 1))
    values = [
        _value(x, path, key, high, faults, states) if isinstance(x, jax.ShapeDtypeStruct) else x
        for (path, x), key in zip(nodes, keys, strict=True)
    ]
    if faults:
        raise TypeError(
            f"verify: give high=, below which random integers are drawn, for {', '.join(faults)}; "
            "or pass arrays"
        )
    drawn = jtu.tree_unflatten(treedef, values)
    # What the parts of a state of `by_matrix` share is equal in all of them.
    return from_plain(to_plain(drawn), drawn)


def _value(
    x: Any, path: Any, key: jax.Array, high: int | None, faults: list[str], states: Sequence[Any]
) -> Any:
    shape, dtype = x.shape, x.dtype
    if is_of_keys(x):
        value = jax.random.split(key, shape) if shape else key
    elif jnp.issubdtype(dtype, jnp.bool_):
        value = jax.random.bernoulli(key, shape=shape)
    elif jnp.issubdtype(dtype, jnp.integer):
        if shape and high is None:
            faults.append(f"{name_of(path)} {dtype}{list(shape)}")
        # A number alone is a counter.
        value = jax.random.randint(key, shape, 0, high or 1) if shape else jnp.asarray(1)
    else:
        value = jax.random.normal(key, shape) / np.sqrt(max(shape[-1], 1) if len(shape) > 1 else 4)
        if any(path[: len(state)] == state for state in states):
            # An optimiser's state has squares.
            value = jnp.abs(value)
    value = value if is_of_keys(x) else value.astype(dtype)
    return value if x.sharding is None else jax.device_put(value, x.sharding)


def _is_state(node: Any) -> bool:
    """Whether it is of an optimiser."""
    return isinstance(node, MatrixState) or (isinstance(node, tuple) and hasattr(node, "_fields"))


def widened(array: jax.Array) -> jax.Array:
    """A copy, in float64 (or complex128). `jax.enable_x64` must hold."""
    wide = eqx.is_inexact_array(array)
    return array.astype(jnp.promote_types(array.dtype, jnp.float64)) if wide else jnp.copy(array)


def numbers_of(array: Any) -> np.ndarray:
    """All of an array, also of one that other processes have parts of; of keys, their data."""
    array = jax.random.key_data(array) if is_of_keys(array) else array
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        # It imports more of JAX than most programs need.
        from jax.experimental import multihost_utils

        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)


def alone(array: jax.Array, device: Any) -> jax.Array:
    """A copy of all of an array, on one device. Its type has no mesh: `jax.device_put` alone would
    keep that.
    """
    data = jax.device_put(numbers_of(array), device)
    return (
        jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
        if is_of_keys(array)
        else data
    )

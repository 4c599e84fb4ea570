"""A step's arguments: filled in where they are abstract, in float64, on one device."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._matrices import MatrixState, from_plain, to_plain
from .._tree import is_of_keys, name_of


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


def _is_state(x: Any) -> bool:
    """Whether it is of an optimiser."""
    return isinstance(x, MatrixState) or (isinstance(x, tuple) and hasattr(x, "_fields"))


def widened(x: jax.Array) -> jax.Array:
    """A copy, in float64 (or complex128). `jax.enable_x64` must hold."""
    wide = eqx.is_inexact_array(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float64)) if wide else jnp.copy(x)


def perturbed(x: jax.Array, eps: float, random: np.random.Generator) -> jax.Array:
    """Each number changed by about `eps` of itself, as rounding it would."""
    if not eqx.is_inexact_array(x):
        return x
    return (x * (1 + eps * random.uniform(-1, 1, x.shape))).astype(x.dtype)


def whole(x: Any) -> Any:
    """All of an array, also of one that other processes have parts of."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        return x
    # It imports more of JAX than most programs need.
    from jax.experimental import multihost_utils

    if not is_of_keys(x):
        return multihost_utils.process_allgather(x, tiled=True)
    data = multihost_utils.process_allgather(jax.random.key_data(x), tiled=True)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))


def alone(x: jax.Array, device: jax.Device) -> jax.Array:
    """A copy of all of an array, on one device. Its type has no mesh: `jax.device_put` alone would
    keep that.
    """
    x = whole(x)
    if not is_of_keys(x):
        return jax.device_put(np.asarray(x), device)
    data = jax.device_put(np.asarray(jax.random.key_data(x)), device)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))

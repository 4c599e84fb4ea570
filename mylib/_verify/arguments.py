"""A step's arguments: filled in where they are abstract, in float64, on one device."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._tree import is_array, is_of_keys, name_of

WIDE = {np.dtype(np.complex64): jnp.complex128}


def is_inexact(x: Any) -> bool:
    return is_array(x) and not is_of_keys(x) and jnp.issubdtype(x.dtype, jnp.inexact)


def filled(args: Any, high: int | None, seed: int) -> Any:
    """The arguments, with random values in place of `jax.ShapeDtypeStruct`s."""
    nodes, treedef = jtu.tree_flatten_with_path(args)
    states = [
        path
        for path, x in jtu.tree_flatten_with_path(args, is_leaf=_is_named_tuple)[0]
        if _is_named_tuple(x)
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
    return jtu.tree_unflatten(treedef, values)


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


def _is_named_tuple(x: Any) -> bool:
    return isinstance(x, tuple) and hasattr(x, "_fields")


def copied(args: Any) -> Any:
    """Copies, where the arrays are: a step may donate its arguments."""
    return _each(lambda x: jnp.copy(x) if isinstance(x, jax.Array) else jnp.asarray(x), args)


def widened(args: Any) -> Any:
    """In float64, where the arrays are. `jax.enable_x64` must hold."""

    def wide(x: Any) -> Any:
        if not is_inexact(x):
            return jnp.copy(x)
        return jnp.asarray(x).astype(WIDE.get(np.dtype(x.dtype), jnp.float64))

    return _each(wide, args)


def perturbed(args: Any, eps: float, seed: int) -> Any:
    """Each number changed by about `eps` of itself, as rounding it would."""
    random = np.random.default_rng(seed)

    def shaken(x: Any) -> Any:
        if not is_inexact(x):
            return jnp.copy(x)
        noise = random.uniform(-1, 1, x.shape)
        return (x * (1 + eps * noise)).astype(x.dtype)

    return _each(shaken, args)


def on_device(args: Any, device: Any) -> Any:
    """On one device."""
    return _each(lambda x: jax.device_put(whole(x), device), args)


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


def _each(change: Callable[[Any], Any], tree: Any) -> Any:
    return jax.tree.map(lambda x: change(x) if is_array(x) else x, tree)

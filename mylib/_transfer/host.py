"""Arrays in host memory: copies that are ours alone, and arrays on devices made of pieces of them.

Copying in NumPy compiles nothing. `jax.device_put` by itself compiles a slice for every distinct
shape that it takes from one device to a mesh, and shares memory with what it is given, so that
donating its result can delete its source.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, Sharding

from .._placement import Target, entries_of, sharding_of, with_entries
from .._tree import Kind, canonical_dtype, kind_of
from .thresholds import ALIGNMENT, WORTH_SHARING


def to_default_device(arrays: Sequence[Any], may_alias: Sequence[bool | None]) -> list[Any]:
    """NumPy arrays on JAX's default device, uncommitted; all others as they are."""
    placed = list(arrays)
    hosts = [i for i, x in enumerate(arrays) if kind_of(x) is Kind.HOST]
    own = [on_host(arrays[i], bool(may_alias[i])) for i in hosts]
    for i, y in zip(hosts, jax.device_put(own), strict=True):
        placed[i] = y
    return placed


def uncommitted(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The same values on the default device, for JAX to move as it likes; where they are, if no
    process has them whole.
    """
    whole = [x for x in arrays if x.is_fully_addressable]
    own = iter(jax.device_put([on_host(x, share=False) for x in whole]))
    return [next(own) if x.is_fully_addressable else x for x in arrays]


def worth_sharing(x: Any, wanted: Sharding) -> bool:
    if x.nbytes < WORTH_SHARING:
        return False
    # On a boundary all replicas share one buffer. Off it XLA makes a copy for each.
    replicas = wanted.is_fully_replicated and wanted.num_devices > 1
    return not replicas or x.ctypes.data % ALIGNMENT == 0


def on_host(x: Any, share: bool) -> np.ndarray:
    """The whole of `x` in host memory: a copy that is ours alone, or, if sharing is allowed, the
    memory that it is in.
    """
    if isinstance(x, jax.Array):
        shards = x.addressable_shards
        if x.is_fully_replicated:
            shards = shards[:1]
        if len(shards) > 1:
            return _assemble(x, shards)
        x = jax.device_get(shards[0].data)
    return host_copy(x, share)


def host_copy(x: Any, share: bool) -> np.ndarray:
    if share and isinstance(x, np.ndarray):
        return x
    copy = _empty(x.shape, canonical_dtype(x))
    copy[...] = x
    return copy


def _assemble(x: jax.Array, shards: Sequence[Any]) -> np.ndarray:
    whole = _empty(x.shape, np.dtype(x.dtype))
    first = [shard for shard in shards if shard.replica_id == 0]
    for shard, part in zip(first, jax.device_get([shard.data for shard in first]), strict=True):
        whole[shard.index] = part
    return whole


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    memory = np.empty(math.prod(shape) * dtype.itemsize + ALIGNMENT, np.uint8)
    start = -memory.__array_interface__["data"][0] % ALIGNMENT
    return np.ndarray(shape, dtype, memory, start)


class Part(NamedTuple):
    """What this process has of an array of a certain shape, and what of that is at an index of the
    whole.
    """

    own: Any
    shape: tuple[int, ...]
    wanted: Sharding
    within: Callable[[Any], Any]


def assemble(parts: Sequence[Part], may_alias: bool) -> list[jax.Array]:
    """Arrays that may reach beyond this process, from the part of each that this process has."""
    with explicitly():
        return [_assemble_part(*part, may_alias) for part in parts]


def _assemble_part(
    own: Any,
    shape: tuple[int, ...],
    wanted: Sharding,
    within: Callable[[Any], Any],
    may_alias: bool,
) -> jax.Array:
    numbers = own
    if is_of_keys(own):
        numbers = jax.random.key_data(own)
        wanted = sharding_of(over_key_data(wanted, len(shape)))
        shape += numbers.shape[len(shape) :]
    numbers = on_host(numbers, may_alias)
    y = put_pieces(lambda index: numbers[within(index)], shape, wanted, numbers.dtype)
    return as_keys(y, own) if is_of_keys(own) else y


def is_of_keys(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def explicitly() -> AbstractContextManager[None]:
    """For transfers that were asked for, as those of `jax.device_put` are: `jax.transfer_guard` may
    forbid only what happens by the way.
    """
    guard = jax.config.jax_transfer_guard_host_to_device  # pyright: ignore[reportAttributeAccessIssue]
    by_the_way_only = guard in ("disallow", "log")
    return jax.transfer_guard_host_to_device("allow") if by_the_way_only else nullcontext()


def put_pieces(
    piece: Callable[[Any], Any], shape: tuple[int, ...], wanted: Sharding, dtype: Any
) -> jax.Array:
    """An array on several devices, perhaps of several processes, from NumPy arrays.

    Every process puts the shards of its own devices; none asks another anything, so nothing here
    finds out whether the values agree.
    """
    # A process that has no device of the target can't tell the dtype by its shards.
    return jax.make_array_from_callback(shape, wanted, piece, dtype=dtype)


def as_keys(data: jax.Array, like: jax.Array) -> jax.Array:
    keys = jax.random.wrap_key_data(data, impl=jax.random.key_impl(like))
    here = keys.sharding
    if isinstance(here, NamedSharding) and len(here.spec) > keys.ndim:
        # On a mesh of one device, jax 0.10 leaves the keys with the spec of their data.
        spec = with_entries(here.spec, entries_of(here.spec)[: keys.ndim])
        keys = jax.device_put(keys, here.update(spec=spec))
    return keys


def over_key_data(target: Target, ndim: int) -> Target:
    """A target for keys, spelt for the integers that they are made of, whose extra dimension stays
    whole.
    """
    if isinstance(target, Format):
        return over_key_data(sharding_of(target), ndim)
    if not isinstance(target, NamedSharding):
        return target
    entries = [*entries_of(target.spec), *[None] * (ndim + 1 - len(target.spec))]
    return target.update(spec=with_entries(target.spec, entries))

"""Arrays in host memory: private copies, and device arrays made from pieces of them.

Copying in NumPy compiles nothing. `jax.device_put` compiles a slice for every shape that it moves
from one device to a mesh. It also shares memory with its source, so that donating its result can
delete the source.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from ..._core.placement import Target, sharding_of
from ..._core.tree import canonical_dtype, is_of_keys
from .thresholds import ALIGNMENT, WORTH_SHARING


def worth_sharing(array: np.ndarray, target: Sharding) -> bool:
    if array.nbytes < WORTH_SHARING:
        return False
    # If aligned, all replicas share one buffer. Otherwise XLA makes a copy for each.
    replicas = target.is_fully_replicated and target.num_devices > 1
    return not replicas or array.ctypes.data % ALIGNMENT == 0


def on_host(array: Any, share: bool) -> np.ndarray:
    """All of an array in host memory: a private copy, or its own memory if sharing is allowed."""
    if isinstance(array, jax.Array):
        shards = array.addressable_shards
        if array.is_fully_replicated:
            shards = shards[:1]
        if len(shards) > 1:
            return _assemble(array, shards)
        array = jax.device_get(shards[0].data)
    return host_copy(array, share)


def host_copy(array: Any, share: bool) -> np.ndarray:
    dtype = canonical_dtype(array)
    if share and isinstance(array, np.ndarray) and array.dtype == dtype:
        return array
    copy = aligned(array.shape, dtype)
    copy[...] = array
    return copy


def _assemble(array: jax.Array, shards: Sequence[jax.Shard]) -> np.ndarray:
    whole = aligned(array.shape, np.dtype(array.dtype))
    first = [shard for shard in shards if shard.replica_id == 0]
    for shard, data in zip(first, jax.device_get([shard.data for shard in first]), strict=True):
        whole[shard.index] = data
    return whole


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Uninitialised memory that `jax.device_put` may take over on CPUs."""
    memory = np.empty(math.prod(shape) * dtype.itemsize + ALIGNMENT, np.uint8)
    start = -memory.__array_interface__["data"][0] % ALIGNMENT
    return np.ndarray(shape, dtype, memory, start)


def from_local(
    local: Any,
    within: Callable[[Any], Any],
    shape: tuple[int, ...],
    sharding: Sharding,
    share: bool,
) -> jax.Array:
    """An array of this shape that may reach beyond this process, from this process's data. `within`
    maps an index of the whole array to one of the data.
    """
    numbers, like = local, local if is_of_keys(local) else None
    if like is not None:
        numbers = jax.random.key_data(local)
        sharding = over_key_data(sharding, len(shape))
        shape += numbers.shape[len(shape) :]
    numbers = on_host(numbers, share)
    with allow_transfers():
        # A process without devices of the target has no shards to read the dtype from.
        y = jax.make_array_from_callback(
            shape, sharding, lambda index: numbers[within(index)], dtype=numbers.dtype
        )
    return y if like is None else as_keys(y, like)


def allow_transfers() -> AbstractContextManager[None]:
    """Marks transfers as explicit, like those of `jax.device_put`: `jax.transfer_guard` may forbid
    only implicit ones.
    """
    guard = jax.config.jax_transfer_guard_host_to_device  # pyright: ignore[reportAttributeAccessIssue]
    blocks_implicit = guard in ("disallow", "log")
    return jax.transfer_guard_host_to_device("allow") if blocks_implicit else nullcontext()


def as_keys(data: jax.Array, like: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(like))


def over_key_data(target: Target, ndim: int) -> Sharding:
    """The sharding of the data of keys at a target. Its extra dimension is not split."""
    # A spec may be shorter than its array. With an entry for the extra dimension, JAX 0.10 would
    # keep that in the spec of keys on a mesh of one device. May be as long as the array once JAX
    # 0.12 is the oldest supported; no public issue is known.
    if not isinstance(sharding := sharding_of(target), NamedSharding):
        return sharding
    entries = sharding.spec.partitions[:ndim]
    return sharding.update(spec=sharding.spec.update(partitions=entries))

"""An array on its way, and its shards that are here."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Sharding, SingleDeviceSharding

from .._compat import data_of_shards, weakly_typed
from .._placement import default_memory_kind, memory_kind
from .._processes import digest
from .._text import listed
from .origin import origin_of
from .plan import Plan, placed_as, plan

# Of more arrays than these, a description has only a checksum.
_FEW = 8


class Leaf(NamedTuple):
    x: jax.Array
    target: Sharding
    plan: Plan
    # The same in all processes.
    text: str


def leaf_of(x: jax.Array, target: Sharding, known_as: Any) -> Leaf:
    """`known_as` is the array whose origin it has: itself, unless it is the data of keys."""
    here = x.sharding
    places = f"{placed_as(x.shape, here)}, to {placed_as(x.shape, target)}"
    origin = origin_of(known_as)
    made = f" ({origin})" if origin else ""
    text = f"{x.dtype}{list(x.shape)} {places}{made}"
    return Leaf(x, target, plan(x.shape, here, target), text)


def described_all(leaves: Iterable[Leaf]) -> str:
    texts = [leaf.text for leaf in leaves]
    checksum = f" (checksum {digest(texts)})" if len(texts) > _FEW else ""
    return listed(texts, _FEW, "; ") + checksum


def assembled(leaf: Leaf, shards: Mapping[Any, jax.Array]) -> jax.Array:
    """The array at its target, made of its shards by device; a handle where this process has none
    of these devices.
    """
    kind = memory_kind(leaf.target)
    devices = leaf.target.addressable_devices_indices_map(leaf.x.shape)
    arrays = [_at(shards[device], device, kind) for device in devices]
    return array_like(leaf.x, leaf.target, arrays)


def array_like(x: Any, sharding: Sharding, shards: Sequence[jax.Array]) -> jax.Array:
    """An array of these shards, with the type of `x`: in all processes that of the program which
    made it, or other programs would differ between them.
    """
    y = jax.make_array_from_single_device_arrays(x.shape, sharding, shards, dtype=x.dtype)
    return weakly_typed(y) if getattr(x, "weak_type", False) else y


def _at(shard: jax.Array, device: Any, kind: str | None) -> jax.Array:
    if shard.sharding.device_set == {device} and memory_kind(shard.sharding) == kind:
        return shard
    return jax.device_put(shard, SingleDeviceSharding(device, memory_kind=kind))


def shards_of(x: jax.Array) -> dict[Any, jax.Array]:
    """This process's shards by device, in the memory in which programs compute."""
    shards = {next(iter(shard.devices())): shard for shard in data_of_shards(x)}
    if memory_kind(x.sharding) == default_memory_kind(x.sharding):
        return shards
    return {d: jax.device_put(s, SingleDeviceSharding(d)) for d, s in shards.items()}

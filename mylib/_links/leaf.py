"""An array on its way, and its shards that are here."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Sharding, SingleDeviceSharding

from .._compat import data_of_shards, weakly_typed
from .._placement import default_memory_kind, memory_kind
from .._processes import digest
from .plan import Plan

# Of more arrays than these, a message has only a checksum.
_FEW = 8


class Leaf(NamedTuple):
    x: jax.Array
    target: Sharding
    plan: Plan
    # The same in all processes: the name of the array, and what is known of it; and a description
    # of this transfer, which no other one has.
    name: str
    facts: str
    text: str


class Message(NamedTuple):
    """What one process sends another one at once: parts of some arrays."""

    text: str
    # What is known of the first arrays, by their names.
    facts: dict[str, str]

    @classmethod
    def of(cls, leaves: Iterable[Leaf]) -> "Message":
        texts, facts = [], {}
        for leaf in leaves:
            texts.append(leaf.text)
            if len(facts) < _FEW:
                facts[leaf.name] = leaf.facts
        text = "; ".join(texts[:_FEW])
        if len(texts) > _FEW:
            text += f"; and {len(texts) - _FEW} more (checksum {digest(texts)})"
        return cls(text, facts)


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

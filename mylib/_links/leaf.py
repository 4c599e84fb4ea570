"""An array on its way, and its shards that are here."""

from typing import Any, NamedTuple

import jax
from jax.sharding import Sharding, SingleDeviceSharding

from .._compat import data_of_shards
from .._placement import default_memory_kind, memory_kind
from .plan import Plan


class Leaf(NamedTuple):
    x: jax.Array
    target: Sharding
    plan: Plan
    # The name and the description of this transfer, the same in all processes.
    name: str
    text: str


def shards_of(x: jax.Array) -> dict[Any, jax.Array]:
    """This process's shards by device, in the memory in which programs compute."""
    shards = {next(iter(shard.devices())): shard for shard in data_of_shards(x)}
    if memory_kind(x.sharding) == default_memory_kind(x.sharding):
        return shards
    return {d: jax.device_put(s, SingleDeviceSharding(d)) for d, s in shards.items()}

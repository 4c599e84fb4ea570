"""An array on its way: its shards that are here, and what has made it.

A process knows an array of other processes by a handle, and nothing in it says which of their
arrays it is. So functions that make such arrays label them with what has made them, and how many
times it has done so: a text that is the same in all processes.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Sharding, SingleDeviceSharding

from .._compat import array_like, data_of_shards, label_of, set_label
from .._placement import default_memory_kind, memory_kind
from .._processes import digest
from .._text import listed
from .division import Division, division_of, placed_as

# A description of more arrays than these is a checksum.
_FEW = 8
_LONG = 200

# Lines of a program are few: a count of each is kept.
_calls_of: Counter[str] = Counter()
_lock = threading.Lock()


class Shipment(NamedTuple):
    x: jax.Array
    target: Sharding
    division: Division
    # The same in all processes.
    text: str

    def piece(self, j: int) -> jax.ShapeDtypeStruct:
        piece = self.division.pieces[j]
        place = SingleDeviceSharding(piece.target)
        return jax.ShapeDtypeStruct(piece.shape, self.x.dtype, sharding=place)


def leaf_of(x: jax.Array, target: Sharding, known_as: Any) -> Shipment:
    """`known_as` is the array whose origin it has: itself, unless it is the data of keys."""
    source = x.sharding
    places = f"{placed_as(x.shape, source)}, to {placed_as(x.shape, target)}"
    origin = origin_of(known_as)
    maker = f" ({origin})" if origin else ""
    text = f"{x.dtype}{list(x.shape)} {places}{maker}"
    return Shipment(x, target, division_of(x.shape, source, target), text)


def described_all(leaves: Iterable[Shipment]) -> str:
    texts = [leaf.text for leaf in leaves]
    checksum = f" (checksum {digest(texts)})" if len(texts) > _FEW else ""
    return listed(texts, _FEW, "; ") + checksum


def assembled(leaf: Shipment, shards: Mapping[Any, jax.Array]) -> jax.Array:
    """The array at its target, made of its shards by device; a handle where this process has none
    of these devices.
    """
    kind = memory_kind(leaf.target)
    devices = leaf.target.addressable_devices_indices_map(leaf.x.shape)
    arrays = [_at(shards[device], device, kind) for device in devices]
    return array_like(leaf.x, leaf.target, arrays)


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


def next_call(maker: str) -> str:
    """A new result of `maker`."""
    with _lock:
        _calls_of[maker] += 1
        return f"{maker}#{_calls_of[maker]}"


def set_origin(arrays: Iterable[Any], call: str) -> None:
    """Labels arrays with what has made them, and their position in it."""
    if len(call) > _LONG:
        # An array that was passed from call to call has the labels of all of them.
        call = f"{call[:_LONG]}... ({digest(call)})"
    for i, x in enumerate(arrays):
        if isinstance(x, jax.Array):
            set_label(x, f"{call}[{i}]")


def origin_of(x: Any) -> str:
    """The label of an array; empty if it has none."""
    return label_of(x)

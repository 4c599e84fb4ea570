"""An array on its way: its shards that are here, and what has made it.

A process knows an array of other processes by a handle, and nothing in it says which of their
arrays it is. So functions that make such arrays label them with what has made them, and how many
times it has done so: a text that is the same in all processes.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax
from jax.sharding import Sharding, SingleDeviceSharding

from ..._core.compat import array_like, data_of_shards, label_of, set_label
from ..._core.placement import default_memory_kind, memory_kind
from ..._core.text import listed
from ..processes import digest
from .division import Device, Division, division_of, placed_as

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


def leaf_of(array: jax.Array, target: Sharding, known_as: object) -> Shipment:
    """`known_as` is the array whose origin it has: itself, unless it is the data of keys."""
    source = array.sharding
    places = f"{placed_as(array.shape, source)}, to {placed_as(array.shape, target)}"
    origin = label_of(known_as)
    maker = f" ({origin})" if origin else ""
    text = f"{array.dtype}{list(array.shape)} {places}{maker}"
    return Shipment(array, target, division_of(array.shape, source, target), text)


def described_all(leaves: Iterable[Shipment]) -> str:
    texts = [leaf.text for leaf in leaves]
    checksum = f" (checksum {digest(texts)})" if len(texts) > _FEW else ""
    return listed(texts, _FEW, "; ") + checksum


def assembled(leaf: Shipment, shards: Mapping[Device, jax.Array]) -> jax.Array:
    """The array at its target, made of its shards by device; a handle where this process has none
    of these devices.
    """
    kind = memory_kind(leaf.target)
    devices = leaf.target.addressable_devices_indices_map(leaf.x.shape)
    arrays = [_at(shards[device], device, kind) for device in devices]
    return array_like(leaf.x, leaf.target, arrays)


def _at(shard: jax.Array, device: Device, kind: str | None) -> jax.Array:
    if shard.sharding.device_set == {device} and memory_kind(shard.sharding) == kind:
        return shard
    return jax.device_put(shard, SingleDeviceSharding(device, memory_kind=kind))


def shards_of(array: jax.Array) -> dict[Device, jax.Array]:
    """This process's shards by device, in the memory in which programs compute."""
    shards = {next(iter(shard.devices())): shard for shard in data_of_shards(array)}
    if memory_kind(array.sharding) == default_memory_kind(array.sharding):
        return shards
    return {d: jax.device_put(s, SingleDeviceSharding(d)) for d, s in shards.items()}


def next_call(maker: str) -> str:
    """A new result of `maker`."""
    with _lock:
        _calls_of[maker] += 1
        return f"{maker}#{_calls_of[maker]}"


def set_origin(arrays: Iterable[object], call: str) -> None:
    """Labels arrays with what has made them, and their position in it."""
    if len(call) > _LONG:
        # An array that was passed from call to call has the labels of all of them.
        call = f"{call[:_LONG]}... ({digest(call)})"
    for i, array in enumerate(arrays):
        if isinstance(array, jax.Array):
            set_label(array, f"{call}[{i}]")

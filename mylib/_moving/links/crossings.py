"""Moves arrays whose source and target share no process, or are held by several."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

from ..._core.compat import array_like, label_of
from ..._core.lines import line_of_caller
from ..processes import PROGRAMS, Turn, comparison, processes_at
from .connections import Links, links_for
from .cutting import cut, join
from .division import Device, Region
from .leaf import Shipment, assembled, described_all, leaf_of, set_origin, shards_of
from .program import move_by_program


class Crossing(NamedTuple):
    """An array on its way. `known_as` is the array whose origin it has: itself, unless it is the
    data of keys.
    """

    x: jax.Array
    target: Sharding
    known_as: object


def crosses(array: jax.Array, target: Sharding, *, always: bool = False) -> bool:
    """Whether an array must be sent by some processes and received by others. Says the same in all
    processes, also where the array has no shards.

    `always` is whether an array on devices of a single process is the same one in all processes. It
    may also be another one in each of them, which places it as its own part of the target.
    """
    current = array.sharding
    if jax.process_count() == 1 or not array.committed or current.device_set == target.device_set:
        return False
    senders, receivers = set(processes_at(current)), set(processes_at(target))
    if always or not senders & receivers:
        return True
    return len(senders) > 1 and not (current.is_fully_replicated and receivers <= senders)


def is_nowhere_here(source: Sharding, target: Sharding) -> bool:
    """Whether this process has no device of either."""
    return jax.process_index() not in {*processes_at(source), *processes_at(target)}


def handle(x: jax.Array | jax.ShapeDtypeStruct, sharding: Sharding) -> jax.Array:
    """An array like `x`, in other processes only."""
    return array_like(x, sharding, [])


def handles(structs: Iterable[Any]) -> list[jax.Array]:
    return [handle(x, x.sharding) for x in structs]


def move_across(crossings: Sequence[Crossing]) -> list[jax.Array]:
    """Every process of source and target calls this, with arrays or handles; others may. Returns at
    once. Processes without a device of the target get handles.
    """
    leaves = [leaf_of(*crossing) for crossing in crossings]
    ours = [leaf for leaf in leaves if not is_nowhere_here(leaf.x.sharding, leaf.target)]
    platforms = {next(iter(leaf.target.device_set)).platform for leaf in ours}
    links = {platform: links_for(platform) for platform in sorted(platforms)}
    connected = {platform: opened for platform, opened in links.items() if opened is not None}
    if len(connected) == len(links):
        moved = _assemble(leaves, _travel(leaves, connected))
    else:
        moved = move_by_program(leaves)
    for leaf, y, (_, _, known_as) in zip(leaves, moved, crossings, strict=True):
        if label_of(known_as):
            set_origin([y], leaf.text)
    return moved


def count_moves(moves: Iterable[Crossing]) -> None:
    """Counts arrays that one program of several processes moves between its devices, so that
    processes that move different arrays are noticed: the program itself would not fail.
    """
    groups: dict[tuple[int, ...], list[Shipment]] = {}
    for move in moves:
        if len(group := processes_at(move.x.sharding)) > 1 and jax.process_index() in group:
            groups.setdefault(group, []).append(leaf_of(*move))
    for group, leaves in groups.items():
        lane = comparison().lane(PROGRAMS, group)
        comparison().count(lane, f"{described_all(leaves)} in {line_of_caller()}")


# A piece of the tree, by the position of its leaf and its own in the leaf's division.
_Key = tuple[int, int]
# The platform of the target, and the other process.
_Peer = tuple[str, int]


def _travel(leaves: Sequence[Shipment], links: Mapping[str, Links]) -> dict[_Key, jax.Array]:
    """The pieces that this process receives, each on the device that needs it. First all are
    offered, then asked for, so that no two processes wait for each other.
    """
    me, line = jax.process_index(), line_of_caller()
    stay: dict[_Key, Device] = {}
    gives: dict[_Peer, list[_Key]] = {}
    takes: dict[_Peer, list[_Key]] = {}
    for i, leaf in enumerate(leaves):
        for j, (_, _, source, target, _) in enumerate(leaf.division.pieces):
            giver, taker = source.process_index, target.process_index
            if giver == taker == me:
                stay[i, j] = target
            elif giver == me:
                gives.setdefault((target.platform, taker), []).append((i, j))
            elif taker == me:
                takes.setdefault((target.platform, giver), []).append((i, j))
    lanes = {(p, peer): links[p].lane(peer) for p, peer in sorted({*gives, *takes})}
    with ExitStack() as held:
        for lane in lanes.values():
            does = "send arrays between the same processes at the same time"
            lane.only.hold(threading.get_ident(), does, waits=False)
            held.callback(lane.only.release)
        pieces = _cut_all(leaves, me)
        arrived = {key: jax.device_put(pieces[key], target) for key, target in stay.items()}
        calls: dict[_Peer, Turn] = {}
        for place, lane in lanes.items():
            concerned = sorted({i for i, _ in (*gives.get(place, ()), *takes.get(place, ()))})
            text = f"{described_all(leaves[i] for i in concerned)} in {line}"
            calls[place] = comparison().count(lane, text)
        for (platform, peer), keys in gives.items():
            links[platform].offer(calls[platform, peer], peer, [pieces[key] for key in keys])
        for (platform, peer), keys in takes.items():
            structs = [leaves[i].piece(j) for i, j in keys]
            pulled = links[platform].ask(calls[platform, peer], peer, structs)
            arrived.update(zip(keys, pulled, strict=True))
    return arrived


def _cut_all(leaves: Sequence[Shipment], me: int) -> dict[_Key, jax.Array]:
    """The pieces that this process gives."""
    pieces: dict[_Key, jax.Array] = {}
    for i, leaf in enumerate(leaves):
        by_device: dict[Device, list[int]] = {}
        for j, piece in enumerate(leaf.division.pieces):
            if piece.source.process_index == me:
                by_device.setdefault(piece.source, []).append(j)
        shards = shards_of(leaf.x) if by_device else {}
        for device, numbers in by_device.items():
            chosen = [leaf.division.pieces[j] for j in numbers]
            parts = tuple((piece.start, piece.shape) for piece in chosen)
            pieces.update(zip(((i, j) for j in numbers), cut(parts, shards[device]), strict=True))
    return pieces


def _assemble(leaves: Sequence[Shipment], arrived: Mapping[_Key, jax.Array]) -> list[jax.Array]:
    me = jax.process_index()
    moved: list[jax.Array] = []
    for i, leaf in enumerate(leaves):
        shards: dict[Device, jax.Array] = {}
        for region in leaf.division.regions:
            if region.devices[0].process_index == me:
                pieces = [arrived[i, j] for j in region.pieces]
                shards |= dict.fromkeys(region.devices, _joined(leaf, region, pieces))
        moved.append(assembled(leaf, shards))
    return moved


def _joined(leaf: Shipment, region: Region, pieces: list[jax.Array]) -> jax.Array:
    """A shard of the target, on the first of its devices."""
    if len(pieces) == 1:
        return pieces[0]
    if not pieces:  # an array without elements
        return jax.device_put(np.zeros(region.shape, leaf.x.dtype), region.devices[0])
    bounds = [leaf.division.pieces[j].bounds for j in region.pieces]
    starts = tuple(
        tuple(a - b for (a, _), (b, _) in zip(part, region.bounds, strict=True)) for part in bounds
    )
    return join(region.shape, starts, pieces)

"""Moves arrays whose source and target share no process, or are held by several."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Sharding, SingleDeviceSharding

from .._compat import value_under
from .._errors import line_of_caller
from .._processes import owners, watch
from .connections import Links, links_for
from .cutting import Cut, Join, cut, join
from .leaf import Leaf, array_like, assembled, described_all, leaf_of, shards_of
from .origin import origin_of, set_origin
from .pending import Call
from .plan import Bounds, Piece, Region
from .program import move_by_program


class Crossing(NamedTuple):
    """An array on its way. `known_as` is the array whose origin it has: itself, unless it is the
    data of keys.
    """

    x: jax.Array
    target: Sharding
    known_as: Any


def crosses(x: jax.Array, target: Sharding, *, always: bool = False) -> bool:
    """Whether an array must be sent by some processes and received by others. Says the same in all
    processes, also where the array has no shards.

    `always` is whether an array on devices of a single process is the same one in all processes. It
    may also be another one in each of them, which places it as its own part of the target.
    """
    here = x.sharding
    if jax.process_count() == 1 or not x.committed or here.device_set == target.device_set:
        return False
    source, wanted = set(owners(here)), set(owners(target))
    if always or not source & wanted:
        return True
    return len(source) > 1 and not (here.is_fully_replicated and wanted <= source)


def is_nowhere_here(source: Sharding, target: Sharding) -> bool:
    """Whether this process has no device of either."""
    return jax.process_index() not in {*owners(source), *owners(target)}


def handle(x: Any, sharding: Sharding) -> jax.Array:
    """An array like `x`, in other processes only."""
    return array_like(x, sharding, [])


def is_handle(x: Any) -> bool:
    """Whether an array, or the one behind a tracer of an eager transformation, has no shards in
    this process.
    """
    x = value_under(x)
    # JAX has arrays without a sharding, too: Python numbers under `grad`.
    here = getattr(x, "sharding", None) if isinstance(x, jax.Array) else None
    return isinstance(here, Sharding) and not isinstance(x, Tracer) and not here.addressable_devices


def handles(structs: Iterable[Any]) -> list[jax.Array]:
    return [handle(x, x.sharding) for x in structs]


def move_across(crossings: Sequence[Crossing]) -> list[jax.Array]:
    """Every process of source and target calls this, with arrays or handles; others may. Returns at
    once. Processes without a device of the target get handles.
    """
    leaves = [leaf_of(*crossing) for crossing in crossings]
    if any(_takes_part(leaf) and links_for(_platform(leaf)) is None for leaf in leaves):
        moved = move_by_program(leaves)
    else:
        moved = _assemble(leaves, _travel(leaves))
    for leaf, y, (_, _, known_as) in zip(leaves, moved, crossings, strict=True):
        if origin_of(known_as):
            set_origin([y], leaf.text)
    return moved


def count_moves(moves: Iterable[Crossing]) -> None:
    """Counts arrays that a program of several processes moves between devices of their own. Nothing
    on their way tells these apart.
    """
    groups: dict[tuple[int, ...], list[Leaf]] = {}
    for move in moves:
        if len(group := owners(move.x.sharding)) > 1 and jax.process_index() in group:
            groups.setdefault(group, []).append(leaf_of(*move))
    for group, leaves in groups.items():
        watch().count("programs", group, f"{described_all(leaves)} in {line_of_caller()}")


def _takes_part(leaf: Leaf) -> bool:
    return not is_nowhere_here(leaf.x.sharding, leaf.target)


def _platform(leaf: Leaf) -> str:
    return next(iter(leaf.target.device_set)).platform


# A piece of the tree, by the position of its leaf and its own in the leaf's plan.
_Key = tuple[int, int]
# The platform of the target, and the other process.
_Place = tuple[str, int]


def _travel(leaves: Sequence[Leaf]) -> dict[_Key, jax.Array]:
    """The pieces that this process receives, each on the device that needs it. First all are
    offered, then asked for: so no process waits for one that waits for it.
    """
    me, line = jax.process_index(), line_of_caller()
    arrived: dict[_Key, jax.Array] = {}
    gives: dict[_Place, list[_Key]] = {}
    takes: dict[_Place, list[_Key]] = {}
    pieces, flags = _cut_all(leaves, me)
    for i, leaf in enumerate(leaves):
        for j, (_, _, source, target) in enumerate(leaf.plan.pieces):
            giver, taker = source.process_index, target.process_index
            if giver == taker == me:
                arrived[i, j] = jax.device_put(pieces[i, j], target)
            elif giver == me:
                gives.setdefault((target.platform, taker), []).append((i, j))
            elif taker == me:
                takes.setdefault((target.platform, giver), []).append((i, j))
    calls: dict[_Place, Call] = {}
    for place in sorted({*gives, *takes}):
        both = sorted({i for i, _ in (*gives.get(place, ()), *takes.get(place, ()))})
        text = f"{described_all(leaves[i] for i in both)} in {line}"
        calls[place] = _links(place[0]).count(place[1], text)
    for place, keys in gives.items():
        ready = {_piece(leaves, key).source: flags[_piece(leaves, key).source] for key in keys}
        given = [pieces[key] for key in keys]
        _links(place[0]).offer(calls[place], given, tuple(ready.values()))
    for place, keys in takes.items():
        pulled = _links(place[0]).ask(calls[place], [_abstract(leaves, key) for key in keys])
        arrived.update(zip(keys, pulled, strict=True))
    return arrived


def _piece(leaves: Sequence[Leaf], key: _Key) -> Piece:
    i, j = key
    return leaves[i].plan.pieces[j]


def _abstract(leaves: Sequence[Leaf], key: _Key) -> jax.ShapeDtypeStruct:
    piece = _piece(leaves, key)
    place = SingleDeviceSharding(piece.target)
    return jax.ShapeDtypeStruct(piece.shape, leaves[key[0]].x.dtype, sharding=place)


def _links(platform: str) -> Links:
    links = links_for(platform)
    assert links is not None  # else `move_by_program` was chosen
    return links


def _cut_all(leaves: Sequence[Leaf], me: int) -> tuple[dict[_Key, jax.Array], dict[Any, jax.Array]]:
    """The pieces that this process gives, and for each of its devices an array that is ready when
    the pieces are.
    """
    by_device: dict[Any, tuple[list[jax.Array], list[Cut], list[_Key]]] = {}
    for i, leaf in enumerate(leaves):
        mine = [(j, p) for j, p in enumerate(leaf.plan.pieces) if p.source.process_index == me]
        if not mine:
            continue
        shards = shards_of(leaf.x)
        for j, piece in mine:
            arrays, cuts, keys = by_device.setdefault(piece.source, ([], [], []))
            cuts.append(Cut(len(arrays), piece.start, piece.shape))
            arrays.append(shards[piece.source])
            keys.append((i, j))
    pieces: dict[_Key, jax.Array] = {}
    flags: dict[Any, jax.Array] = {}
    for device, (arrays, cuts, keys) in by_device.items():
        *made, flags[device] = cut(arrays, cuts)
        pieces.update(zip(keys, made, strict=True))
    return pieces, flags


def _assemble(leaves: Sequence[Leaf], arrived: Mapping[_Key, jax.Array]) -> list[jax.Array]:
    made = _join_all(leaves, arrived)
    moved: list[jax.Array] = []
    for i, leaf in enumerate(leaves):
        regions = _regions_here(leaf)
        shards = {device: made[i, one.bounds] for one in regions for device in one.devices}
        moved.append(assembled(leaf, shards))
    return moved


def _regions_here(leaf: Leaf) -> list[Region]:
    me = jax.process_index()
    return [one for one in leaf.plan.regions if one.devices[0].process_index == me]


def _join_all(
    leaves: Sequence[Leaf], arrived: Mapping[_Key, jax.Array]
) -> dict[tuple[int, Bounds], jax.Array]:
    """The shards of the target that this process holds, each on the first of its devices."""
    whole: dict[tuple[int, Bounds], jax.Array] = {}
    by_device: dict[Any, tuple[list[jax.Array], list[Join], list[tuple[int, Bounds]]]] = {}
    for i, leaf in enumerate(leaves):
        dtype = leaf.x.dtype
        for region in _regions_here(leaf):
            key = i, region.bounds
            if not region.pieces:  # an array without elements
                whole[key] = jax.device_put(np.zeros(region.shape, dtype), region.devices[0])
                continue
            if len(region.pieces) == 1:
                whole[key] = arrived[i, region.pieces[0]]
                continue
            arrays, joins, keys = by_device.setdefault(region.devices[0], ([], [], []))
            parts = [
                (len(arrays) + n, _within(leaf, region, j)) for n, j in enumerate(region.pieces)
            ]
            arrays += [arrived[i, j] for j in region.pieces]
            joins.append(Join(region.shape, dtype, tuple(parts)))
            keys.append(key)
    for arrays, joins, keys in by_device.values():
        whole.update(zip(keys, join(arrays, joins), strict=True))
    return whole


def _within(leaf: Leaf, region: Region, j: int) -> tuple[int, ...]:
    piece = leaf.plan.pieces[j]
    return tuple(a - b for (a, _), (b, _) in zip(piece.bounds, region.bounds, strict=True))

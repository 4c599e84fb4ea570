"""The routes of an array's parts, from a device to a process."""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple, Protocol

from jax.sharding import Sharding

from ..._core.placement import Bounds, regions_of
from ..._core.text import counted, in_short
from ..processes import digest


class Device(Protocol):
    """What is asked of a `jax.Device`, which is no class for type checkers."""

    @property
    def id(self) -> int: ...
    @property
    def platform(self) -> str: ...
    @property
    def process_index(self) -> int: ...


class Fragment(NamedTuple):
    """A part of an array that lies in one shard of the source and in one of the target."""

    bounds: Bounds
    # Where the piece begins in the source's shard.
    start: tuple[int, ...]
    # The devices that give and receive it.
    source: Device
    target: Device
    shape: tuple[int, ...]


class Region(NamedTuple):
    """A shard of the target in one process. All `devices` hold it; the first gets the pieces."""

    bounds: Bounds
    devices: tuple[Device, ...]
    pieces: range
    shape: tuple[int, ...]


class Division(NamedTuple):
    pieces: tuple[Fragment, ...]
    regions: tuple[Region, ...]


@lru_cache(maxsize=4096)
def division_of(shape: tuple[int, ...], source: Sharding, target: Sharding) -> Division:
    """The same in all processes. Every process of the target receives each part of its shards once,
    however many of its devices hold it.
    """
    held = regions_of(shape, source)
    pieces: list[Fragment] = []
    regions: list[Region] = []
    for bounds, devices in regions_of(shape, target).items():
        for group in _by_process(devices):
            first = len(pieces)
            for held_bounds, givers in held.items():
                common = _overlap(held_bounds, bounds)
                if common is not None:
                    giver = _nearest(givers, group, len(pieces))
                    start = tuple(a[0] - b[0] for a, b in zip(common, held_bounds, strict=True))
                    pieces.append(Fragment(common, start, giver, group[0], _shape(common)))
            regions.append(Region(bounds, group, range(first, len(pieces)), _shape(bounds)))
    return Division(tuple(pieces), tuple(regions))


@lru_cache(maxsize=4096)
def placed_as(shape: tuple[int, ...], sharding: Sharding) -> str:
    """Where the parts of an array are. The same for shardings that are written in different ways,
    such as those of an array and of its handle: with `P("data")` and `P("data", None)`.
    """
    regions = regions_of(shape, sharding)
    ids = sorted(device.id for device in sharding.device_set)
    order = [(bounds, [device.id for device in devices]) for bounds, devices in regions.items()]
    part = "x".join(map(str, sharding.shard_shape(shape))) or "()"
    parts = f"in {counted(len(regions), 'part')} of {part}"
    return f"{parts} on devices {in_short(ids)} (checksum {digest(sorted(order))[:6]})"


def _shape(bounds: Bounds) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in bounds)


def _by_process(devices: Iterable[Device]) -> list[tuple[Device, ...]]:
    groups: dict[int, list[Device]] = {}
    for device in devices:
        groups.setdefault(device.process_index, []).append(device)
    return [tuple(group) for group in groups.values()]


def _overlap(a: Bounds, b: Bounds) -> Bounds | None:
    common = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def _nearest(givers: list[Device], takers: tuple[Device, ...], turn: int) -> Device:
    """The device that gives a piece: the taker itself if it has it, else one of its process, else
    each of the others in turn.
    """
    if takers[0] in givers:
        return takers[0]
    process = takers[0].process_index
    near = [device for device in givers if device.process_index == process] or givers
    return near[turn % len(near)]

"""How long a collective takes on a machine: which links it uses, and how fast these are.

The figures of GPUs are those of nccl-tests 2.27 on up to 32 hosts of 8 H100s, as shares of the data
sheet; other chips are assumed to reach the same shares, unless their data sheets have others. Those
of TPUs are published measurements of one axis of a slice.
"""

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ..machines import Chip, Machine, coordinates, shape_of
from .groups import MeshAxes

# In a host: the share of a GPU's links that a collective reaches with 2, 4 and 8 GPUs, and how long
# it takes to start. NVSwitch sums all-reduces in the network (8 GPUs).
_GPUS = (2, 4, 8)
_IN_HOST = {
    "all-reduce": ((0.72, 0.79, 1.04), (10e-6, 15e-6, 31e-6)),
    "all-to-all": ((0.84, 0.84, 0.84), (50e-6, 50e-6, 50e-6)),
    "ragged-all-to-all": ((0.84, 0.84, 0.84), (50e-6, 50e-6, 50e-6)),
    "collective-permute": ((0.84, 0.84, 0.84), (8e-6, 8e-6, 8e-6)),
}
_OTHERWISE = ((0.60, 0.72, 0.77), (8e-6, 17e-6, 30e-6))
# Between hosts: the share of the network that all GPUs of a group on one host reach together; less
# of it for fewer bytes a GPU; and how long a message takes for each host.
_NETWORK = 0.96
_SIZES, _SHARES = (8e3, 16e3, 8e6, 32e6), (0.36, 0.68, 0.68, 0.87)
_HOST = 36e-6
# Of an all-to-all between hosts: a guess, fitted to nccl-tests with NCCL 2.27 on 2 to 32 hosts,
# whose table is not kept. By NCCL's own formula a GPU reaches more than its share of the network,
# as what stays in a host costs nothing: hosts / (hosts - 1) of it
# (https://github.com/NVIDIA/nccl-tests/issues/130). The published steps that estimates are compared
# with exchange too little between hosts to tell.
_GUESSED_LOSS = 0.44
# Of TPUs: the share of a link, and the time for each hop.
_LINK, _HOP = 0.9, 1e-6
_ALL_TO_ALL = ("all-to-all", "ragged-all-to-all")


class Message(NamedTuple):
    """A collective: over which axes, the bytes that a device sends, and how often in a call."""

    kind: str
    axes: tuple[str, ...]
    wire_bytes: int
    times: int


def seconds(message: Message, axes: Mapping[str, int], machine: Machine) -> tuple[float, str]:
    """How long a collective takes once, and what is assumed about its links."""
    mesh = MeshAxes.of_sizes(axes)
    if machine.chip.platform == "tpu":
        return _on_torus(message, mesh, machine)
    return _on_hosts(message, mesh, machine)


def stated(chip: Chip, what: str, value: float | None) -> float:
    """A figure of the data sheet, which must be there."""
    if value is None or not 0 < value < math.inf:
        raise ValueError(
            f"no time can be estimated for {chip.name}: the {what} on its data sheet is "
            f"{'unknown' if value is None else value}. Pass a machine of mylib.machines.gpu or "
            "tpu, or describe this one: dataclasses.replace(machine, chip=dataclasses.replace("
            "machine.chip, memory_bandwidth=50e9, flops={'float32': 1e12}))"
        )
    return value


def _on_hosts(message: Message, mesh: MeshAxes, machine: Machine) -> tuple[float, str]:
    chip, over = machine.chip, ", ".join(message.axes)
    groups = mesh.groups(message.axes)
    hosts, ranks = _spread(tuple(map(tuple, groups.tolist())), machine.shape[-1])
    if hosts == 1:
        links = stated(chip, "links", (chip.links or 0) * (chip.link_bandwidth or 0) or None)
        shares, starts = _IN_HOST.get(message.kind, _OTHERWISE)
        shares = *shares[:-1], chip.reached.get(message.kind, shares[-1])
        count = groups.shape[1]
        rate = float(np.interp(count, _GPUS, shares)) * links
        start = float(np.interp(count, _GPUS, starts))
        return start + message.wire_bytes / rate, f"{over} is within a host, over all its links"
    text = f"{over} crosses {hosts} hosts, over the network of {ranks} of each host's GPUs"
    rate = stated(chip, "network bandwidth", chip.network_bandwidth)
    if message.kind in _ALL_TO_ALL:
        rate *= 1 - _GUESSED_LOSS / hosts
    elif message.kind != "collective-permute":
        share = float(np.interp(message.wire_bytes / groups.shape[1], _SIZES, _SHARES))
        rate *= _NETWORK * ranks * share
    return _HOST * hosts + message.wire_bytes / rate, text


@functools.lru_cache(maxsize=1000)
def _spread(groups: tuple[tuple[int, ...], ...], per_host: int) -> tuple[int, int]:
    """Over how many hosts a group goes, and how many of its devices each of them has; of the group
    that is worst off.
    """
    counts = (np.unique(np.array(group) // per_host, return_counts=True)[1] for group in groups)
    spread = {(len(count), int(count.min())) for count in counts}
    return max(spread, key=lambda x: (x[0] > 1, -x[1], x[0]))


def _on_torus(message: Message, mesh: MeshAxes, machine: Machine) -> tuple[float, str]:
    chip, over = machine.chip, ", ".join(message.axes)
    link = _LINK * stated(chip, "link bandwidth", chip.link_bandwidth)
    directions, cores, longest = _directions(mesh, message.axes, machine)
    if not directions:  # the two cores of a chip share its memory
        rate = (chip.memory_bandwidth or math.inf) / 2
        return _HOP + message.wire_bytes / rate, f"{over} is within a chip"
    # A permutation sends in one direction.
    rate = link if message.kind == "collective-permute" else link * sum(directions)
    # Each core of a chip has its own group, and they share the links.
    rate /= chip.devices if cores < chip.devices else 1
    if message.kind in _ALL_TO_ALL:
        rate *= min(1.0, 4 / longest)
    count = "a ring" if directions == [2.0] else f"{len(directions)} directions of the slice"
    if directions == [1.0]:
        count = "a line, which is no ring"
    return _HOP * longest + message.wire_bytes / rate, f"{over} is {count}"


@functools.lru_cache(maxsize=1000)
def _directions(
    mesh: MeshAxes, names: tuple[str, ...], machine: Machine
) -> tuple[list[float], int, int]:
    """For each direction of the slice along which a group lies, over how many links each of its
    chips sends: 2 in a ring, 1 in a line, and less if other groups lie between its chips. Also the
    number of its cores on each chip, and of its chips in the longest direction.
    """
    at = coordinates(machine, mesh.sizes)
    group = at[mesh.groups(names)[0]]
    size = (*shape_of(machine), 1)[: group.shape[1] - 1]
    rings = _rings(machine, size)
    rates: list[float] = []
    longest = 1
    for i, whole in enumerate(size):
        places = np.unique(group[:, i])
        if len(places) < 2:
            continue
        gap = (int(places[-1]) - int(places[0])) / (len(places) - 1)
        around = rings[i] and len(places) * gap == whole
        rates.append((2 if around else 1) / gap)
        longest = max(longest, len(places))
    return rates, len(np.unique(group[:, -1])), longest


def _rings(machine: Machine, size: tuple[int, ...]) -> list[bool]:
    wraps = machine.chip.wraps
    whole = [wraps is not None and n % wraps == 0 for n in size]
    in_three = len(machine.chip.largest or size) == 3
    return [all(whole)] * len(size) if in_three else whole

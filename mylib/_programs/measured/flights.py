"""The executions of collectives: how long each is in flight, and which device it waits for."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from .events import ProfiledEvent


class SentStep(NamedTuple):
    """An instruction that starts a collective, the one that ends it, the groups of its devices in
    the program's order, and the bytes that a device sends. In pairs, only the second device waits.
    """

    first: str
    last: str
    groups: tuple[tuple[int, ...], ...]
    in_pairs: bool
    wire_bytes: int


class Flight(NamedTuple):
    """An execution of a step on a device. Until `arrived` it waits for `awaited`, the last device
    of its group, or for no other one if that is itself.
    """

    step: str
    start: float
    end: float
    arrived: float
    awaited: int


# A call on a device.
Call = tuple[int, int]


def flights_of(
    calls: Mapping[Call, Sequence[ProfiledEvent]],
    steps: Mapping[str, SentStep],
    devices: Sequence[int],
) -> dict[Call, list[Flight]]:
    """The executions of collectives in each call. `devices` are the numbers of the devices, in the
    program's order; nothing is known of waiting if the trace has others, or only some of them.
    """
    is_whole = sorted(devices) == sorted({device for device, _ in calls})
    spans: dict[tuple[int, str, int], dict[int, ProfiledEvent]] = defaultdict(dict)
    for (device, call), events in calls.items():
        for name, turn, span in _spans(events, steps):
            spans[call, name, turn][device] = span
    flights: dict[Call, list[Flight]] = {key: [] for key in calls}
    for (call, name, _), by_device in spans.items():
        awaited = _awaited(steps[name], by_device, devices) if is_whole else {}
        for device, span in by_device.items():
            other = awaited.get(device, device)
            arrived = by_device[other].start
            flights[device, call].append(Flight(name, span.start, span.end, arrived, other))
    return flights


def _spans(
    events: Sequence[ProfiledEvent], steps: Mapping[str, SentStep]
) -> Iterator[tuple[str, int, ProfiledEvent]]:
    """The executions on one device, numbered. An asynchronous one lasts until the end of the
    instruction that waits for it. On GPUs nothing runs that waits, and the kernel of the start
    lasts as long.
    """
    starts = {name: step.first for step in steps.values() for name in (step.first, step.last)}
    by_step: dict[str, list[ProfiledEvent]] = defaultdict(list)
    for x in events:
        if x.name in starts:
            by_step[starts[x.name]].append(x)
    for name, of in by_step.items():
        begun = [x for x in of if x.name == name]
        ends = [x for x in of if x.name == steps[name].last] or begun
        for turn, (x, y) in enumerate(zip(begun, ends, strict=False)):
            yield name, turn, x._replace(end=y.end)


def _awaited(
    step: SentStep, by_device: Mapping[int, ProfiledEvent], devices: Sequence[int]
) -> dict[int, int]:
    """The device that each one waits for, if another one is the last of its group."""
    awaited: dict[int, int] = {}
    for group in step.groups:
        members = [devices[i] for i in group]
        if by_device.keys() >= set(members):
            last = max(members, key=lambda device: by_device[device].start)
            waiting = members[1:] if step.in_pairs else members
            awaited.update(dict.fromkeys(waiting, last))
    return awaited

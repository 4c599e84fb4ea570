"""Joins the events of a trace with what is known of each instruction."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from .events import ProfiledEvent, events_of
from .flights import Flight, SentStep, flights_of
from .measured import Cost, Measured, MeasuredCollective, MeasuredDevice, MeasuredPart
from .spans import Span, Spans

K = TypeVar("K")


class InstructionOrigin(NamedTuple):
    """An instruction: where it is from, the instructions in the computations that it calls, what
    it does, and how long that is estimated to take.
    """

    scope: str
    phase: str
    source: str
    inside: frozenset[str] = frozenset()
    work: Any = None
    seconds: float = 0.0


class Sent(NamedTuple):
    """A collective of the program. `share` of its instructions' time is its own; `seconds` of a
    call are estimated for it.
    """

    kind: str
    axes: tuple[str, ...] | None
    source: str
    what: str
    seconds: float | None
    share: float = 1.0
    steps: tuple[SentStep, ...] = ()


class JoinedProgram(NamedTuple):
    """What is known of a program: its instructions and collectives, the instructions that run in
    each call, and its devices in order.
    """

    name: str
    origins: Mapping[str, InstructionOrigin]
    sent: Sequence[Sent]
    certain: frozenset[str]
    devices: Sequence[int]


class _Time(NamedTuple):
    """Nanoseconds of an instruction on a device, and how often it runs. Of a collective: in flight;
    `sending`, which is after the last device has come; `exposed`, while nothing computes; and
    `waiting`, of that, for the last device.
    """

    computing: float = 0.0
    exposed: float = 0.0
    waiting: float = 0.0
    flying: float = 0.0
    sending: float = 0.0
    runs: float = 0.0


class _Spent(NamedTuple):
    """The time of one execution."""

    name: str
    device: int
    awaited: int
    time: _Time


def measured_of(
    path: str | Path, program: JoinedProgram, machine: str, estimated: tuple[float, float] | None
) -> Measured:
    """What a trace says of a program. `estimated` are the seconds of a call on the `machine`, and
    those of exposed communication.
    """
    events, notes = events_of(path, program.name, program.origins, program.certain)
    calls = _calls(events, program.origins)
    steps = {step.first: step for one in program.sent for step in one.steps}
    flights = flights_of(calls, steps, program.devices)
    shares = [x for key in calls for x in _shares(key[0], calls[key], flights[key], steps)]
    count = len(calls)
    devices = sorted({device for device, _ in calls})
    by_name = _summed(((x.name, x.time) for x in shares), count)
    by_awaited = _summed((((x.name, x.awaited), x.time) for x in shares), count)
    windows: dict[int, list[Span]] = defaultdict(list)
    for (device, _), of in calls.items():
        windows[device].append((of[0].start, max(x.end for x in of)))
    return Measured(
        name=program.name,
        calls=count // len(devices),
        parts=tuple(_parts(by_name, program.origins, estimated is not None)),
        collectives=tuple(_collective(one, by_name, by_awaited) for one in program.sent),
        devices=tuple(_devices(shares, windows)),
        unknown={x: t.computing for x, t in by_name.items() if x not in program.origins},
        machine=machine,
        estimated=estimated,
        notes=tuple(notes),
        costs=tuple(_costs(by_name, program.origins)),
    )


def _calls(
    events: Iterable[ProfiledEvent], origins: Mapping[str, InstructionOrigin]
) -> dict[tuple[int, int], list[ProfiledEvent]]:
    """The events of each call on each device, in their order. An instruction whose parts have
    events of their own, such as a loop, is no work itself.
    """
    events = sorted(events, key=lambda x: x.start)
    names = {x.name for x in events}
    containers = {x for x in names & origins.keys() if origins[x].inside & names}
    calls: dict[tuple[int, int], list[ProfiledEvent]] = defaultdict(list)
    for x in events:
        if x.name not in containers:
            calls[x.device, x.call].append(x)
    return calls


def _shares(
    device: int,
    events: Sequence[ProfiledEvent],
    flights: Sequence[Flight],
    steps: Mapping[str, SentStep],
) -> Iterator[_Spent]:
    """Each moment counts once: if several instructions compute, for the one that began first; for
    a collective only if nothing computes.
    """
    of_collectives = {name for step in steps.values() for name in (step.first, step.last)}
    computing = [x for x in events if x.name not in of_collectives and not x.beside]
    reached = 0.0
    for x in computing:
        alone = max(0.0, x.end - max(reached, x.start))
        yield _Spent(x.name, device, device, _Time(computing=alone, runs=1))
        reached = max(reached, x.end)
    work, reached = Spans((x.start, x.end) for x in computing), 0.0
    for x in sorted(flights, key=lambda x: x.start):
        begin, arrived = max(reached, x.start), min(x.arrived, x.end)
        exposed, waiting = work.outside(begin, x.end), work.outside(begin, arrived)
        time = _Time(0.0, exposed, waiting, x.end - x.start, x.end - max(arrived, x.start), 1)
        yield _Spent(x.step, device, x.awaited, time)
        reached = max(reached, x.end)


def _summed(times: Iterable[tuple[K, _Time]], count: float) -> dict[K, _Time]:
    """Sums by key, in seconds, divided by the number of calls."""
    sums: dict[K, list[float]] = {}
    for key, time in times:
        of = sums.setdefault(key, [0.0] * len(_Time._fields))
        for i, x in enumerate(time):
            of[i] += x
    means = {key: _Time(*(x / 1e9 / count for x in of)) for key, of in sums.items()}
    return {key: mean._replace(runs=mean.runs * 1e9) for key, mean in means.items()}


def _parts(
    by_name: Mapping[str, _Time], origins: Mapping[str, InstructionOrigin], is_estimated: bool
) -> Iterator[MeasuredPart]:
    known = {name: origins[name] for name in by_name if name in origins}
    by_place: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for name, x in known.items():
        by_place[x.scope, x.phase, x.source].append(name)
    for place, names in by_place.items():
        times = [by_name[name] for name in names]
        computing, exposed = sum(t.computing for t in times), sum(t.exposed for t in times)
        estimated = sum(by_name[x].runs * known[x].seconds for x in names)
        yield MeasuredPart(*place, computing, exposed, estimated if is_estimated else None)


def _collective(
    one: Sent, by_name: Mapping[str, _Time], by_awaited: Mapping[tuple[str, int], _Time]
) -> MeasuredCollective:
    times = [(by_name.get(step.first, _Time()), step.wire_bytes) for step in one.steps]
    exposed, waiting, flying, sending = (
        one.share * sum(t[i] for t, _ in times) for i in (1, 2, 3, 4)
    )
    steps = {step.first for step in one.steps}
    waits = [(t.waiting, device) for (name, device), t in by_awaited.items() if name in steps]
    return MeasuredCollective(
        one.kind, one.axes, one.source, one.what, sum(t.runs for t, _ in times), flying, exposed,
        waiting, max(waits)[1] if waiting else None,
        sum(t.runs * size for t, size in times), sending, one.seconds,
    )  # fmt: skip


def _devices(
    shares: Sequence[_Spent], windows: Mapping[int, Sequence[Span]]
) -> Iterator[MeasuredDevice]:
    calls = len(next(iter(windows.values())))
    sums = _summed(((x.device, x.time) for x in shares), calls)
    waits = _summed((((x.device, x.awaited), x.time) for x in shares), calls)
    for device, spans in sorted(windows.items()):
        t, length = sums[device], sum(end - start for start, end in spans)
        between = max(end for _, end in spans) - min(start for start, _ in spans) - length
        waits_for = {y: w.waiting for (x, y), w in sorted(waits.items()) if x == device != y}
        yield MeasuredDevice(
            device, length / 1e9 / calls, t.computing, t.exposed, t.waiting, waits_for,
            max(0.0, between) / 1e9 / max(1, calls - 1),
        )  # fmt: skip


def _costs(
    by_name: Mapping[str, _Time], origins: Mapping[str, InstructionOrigin]
) -> Iterator[Cost]:
    for name, time in by_name.items():
        if name in origins and origins[name].work is not None:
            yield Cost(origins[name].work, time.runs, time.computing)

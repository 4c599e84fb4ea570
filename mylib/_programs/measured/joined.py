"""Joins the events of a trace with what is known of each instruction."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import jax

from ..._core.errors import AuditError
from .events import ProfiledEvent, events_of
from .flights import Flight, SentStep, flights_of
from .measured import Measured, MeasuredCollective, MeasuredDevice, MeasuredPart
from .spans import Span, Spans

K = TypeVar("K")


class InstructionOrigin(NamedTuple):
    """An instruction: where it is from, and the instructions in the computations that it calls."""

    scope: str
    phase: str
    source: str
    inside: frozenset[str] = frozenset()


class Sent(NamedTuple):
    """A collective of the program. `share` of its instructions' time is its own."""

    kind: str
    axes: tuple[str, ...] | None
    source: str
    what: str
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


def measured_of(path: str | Path, program: JoinedProgram) -> Measured:
    """What a trace says of a program."""
    events, notes = events_of(path, program.name, program.origins, program.certain)
    calls = _calls(events, program.origins)
    steps = {step.first: step for one in program.sent for step in one.steps}
    flights = flights_of(calls, steps, program.devices)
    shares = [spent for key in calls for spent in _shares(key[0], calls[key], flights[key], steps)]
    count = len(calls)
    devices = sorted({device for device, _ in calls})
    if jax.device_count() == len(program.devices) != len(devices) and jax.process_count() == 1:
        raise AuditError(
            f"audit the program that was traced: {path} has {len(devices)} devices, and "
            f"{program.name} runs on {len(program.devices)}"
        )
    by_name = _summed(((spent.name, spent.time) for spent in shares), count)
    by_awaited = _summed((((spent.name, spent.awaited), spent.time) for spent in shares), count)
    windows: dict[int, list[Span]] = defaultdict(list)
    for (device, _), of in calls.items():
        windows[device].append((of[0].start, max(event.end for event in of)))
    return Measured(
        name=program.name,
        calls=count // len(devices),
        parts=tuple(_parts(by_name, program.origins)),
        collectives=tuple(_collective(one, by_name, by_awaited) for one in program.sent),
        devices=tuple(_devices(shares, windows)),
        unknown={
            name: time.computing for name, time in by_name.items() if name not in program.origins
        },
        notes=tuple(notes),
    )


def _calls(
    events: Sequence[ProfiledEvent], origins: Mapping[str, InstructionOrigin]
) -> dict[tuple[int, int], list[ProfiledEvent]]:
    """The events of each call on each device, in their order. An instruction whose parts have
    events of their own, such as a loop, is no work itself.
    """
    names = {event.name for event in events}
    containers = {name for name in names & origins.keys() if origins[name].inside & names}
    calls: dict[tuple[int, int], list[ProfiledEvent]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.start):
        if event.name not in containers:
            calls[event.device, event.call].append(event)
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
    for event in computing:
        alone = max(0.0, event.end - max(reached, event.start))
        yield _Spent(event.name, device, device, _Time(computing=alone, runs=1))
        reached = max(reached, event.end)
    work, reached = Spans((event.start, event.end) for event in computing), 0.0
    for flight in sorted(flights, key=lambda flight: flight.start):
        begin, arrived = max(reached, flight.start), min(flight.arrived, flight.end)
        time = _Time(
            exposed=work.outside(begin, flight.end),
            waiting=work.outside(begin, arrived),
            flying=flight.end - flight.start,
            sending=flight.end - max(arrived, flight.start),
            runs=1,
        )
        yield _Spent(flight.step, device, flight.awaited, time)
        reached = max(reached, flight.end)


def _summed(times: Iterable[tuple[K, _Time]], count: float) -> dict[K, _Time]:
    """Sums by key, in seconds, divided by the number of calls."""
    sums: dict[K, list[float]] = {}
    for key, time in times:
        of = sums.setdefault(key, [0.0] * len(_Time._fields))
        for i, part in enumerate(time):
            of[i] += part
    means = {key: _Time(*(part / 1e9 / count for part in of)) for key, of in sums.items()}
    return {key: mean._replace(runs=mean.runs * 1e9) for key, mean in means.items()}


def _parts(
    by_name: Mapping[str, _Time], origins: Mapping[str, InstructionOrigin]
) -> Iterator[MeasuredPart]:
    by_place: dict[tuple[str, str, str], list[_Time]] = defaultdict(list)
    for name, time in by_name.items():
        if name in origins:
            scope, phase, source, _ = origins[name]
            by_place[scope, phase, source].append(time)
    for place, times in by_place.items():
        computing, exposed = sum(t.computing for t in times), sum(t.exposed for t in times)
        yield MeasuredPart(*place, computing, exposed)


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
        sum(t.runs * size for t, size in times), sending,
    )  # fmt: skip


def _devices(
    shares: Sequence[_Spent], windows: Mapping[int, Sequence[Span]]
) -> Iterator[MeasuredDevice]:
    calls = len(next(iter(windows.values())))
    sums = _summed(((spent.device, spent.time) for spent in shares), calls)
    waits = _summed((((spent.device, spent.awaited), spent.time) for spent in shares), calls)
    for device, spans in sorted(windows.items()):
        t, length = sums[device], sum(end - start for start, end in spans)
        between = max(end for _, end in spans) - min(start for start, _ in spans) - length
        waits_for = {
            awaited: time.waiting
            for (waiting, awaited), time in sorted(waits.items())
            if waiting == device != awaited
        }
        yield MeasuredDevice(
            device, length / 1e9 / calls, t.computing, t.exposed, t.waiting, waits_for,
            max(0.0, between) / 1e9 / max(1, calls - 1),
        )  # fmt: skip

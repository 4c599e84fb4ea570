"""What was measured, as data, as text, and as a page for notebooks."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ..._core.show import columns, for_stdout, paint_for_stdout
from ..._core.text import counted, more, show_bytes, show_time


@dataclass(frozen=True)
class MeasuredPart:
    """The time of a part of a program, in seconds a call, as a mean of the devices.

    **Attributes:**

    - `scope`: the scopes around it, as in `mylib.results.Collective`; empty if all are summed
        up.
    - `phase`: the pass, as there.
    - `source`: the line of Python, as `"file.py:31"`; empty if unknown, or if all are summed up.
    - `computing`: while it computes.
    - `exposed`: while it communicates, and the device computes nothing.

    !!! Example

        ```python
        def slowest_line(measured: mylib.results.Measured):
            part = measured.lines[0]
            return part.source, part.seconds
        ```
    """

    scope: str
    phase: str
    source: str
    computing: float
    exposed: float

    @property
    def seconds(self) -> float:
        """Computing and exposed communication."""
        return self.computing + self.exposed


@dataclass(frozen=True)
class MeasuredCollective:
    """The time of a collective, in seconds a call, as a mean of the devices.

    **Attributes:**

    - `kind`, `axes`, `source`: as in `mylib.results.Collective`.
    - `what`: the arrays that it moves, as in the report.
    - `times`: how often its instructions run in a call.
    - `in_flight`: from its start to its end.
    - `exposed`: how much of that the device computes nothing.
    - `waiting`: how much of that it waits for another device, which starts later.
    - `awaited`: the number of the device that most of the waiting is for; None without waiting.
    - `wire_bytes`: the bytes that a device sends in a call.
    - `sending`: how long it takes after the last device has started it.

    !!! Example

        ```python
        def waits(measured: mylib.results.Measured):
            return {(x.kind, x.what): x.waiting for x in measured.collectives}
        ```
    """

    kind: str
    axes: tuple[str, ...] | None
    source: str
    what: str
    times: float
    in_flight: float
    exposed: float
    waiting: float
    awaited: int | None
    wire_bytes: float
    sending: float

    @property
    def rate(self) -> float:
        """The bytes that a device sends in a second, after the last one has started."""
        return self.wire_bytes / self.sending if self.sending else 0.0


@dataclass(frozen=True)
class MeasuredDevice:
    """The time of a device, in seconds a call.

    **Attributes:**

    - `device`: its number in the trace.
    - `seconds`: from the first instruction of a call to the end of the last.
    - `computing`: while at least one instruction computes.
    - `exposed`: while it only communicates.
    - `waiting`: how much of that it waits for other devices.
    - `waits_for`: the waiting, by the number of the device that comes last.
    - `between`: from the end of a call to the start of the next one, which is not in `seconds`.

    !!! Example

        ```python
        def idle(measured: mylib.results.Measured):
            return {x.device: x.idle / x.seconds for x in measured.devices}
        ```
    """

    device: int
    seconds: float
    computing: float
    exposed: float
    waiting: float
    waits_for: Mapping[int, float]
    between: float

    @property
    def busy(self) -> float:
        """Computing and exposed communication."""
        return self.computing + self.exposed

    @property
    def idle(self) -> float:
        """While no instruction runs."""
        return max(0.0, self.seconds - self.busy)


@dataclass(frozen=True, repr=False)
class Measured:
    """The time of a program, as `jax.profiler` has measured it. It is printed as tables.

    **Attributes:**

    - `name`: the name of the program.
    - `calls`: how many calls of it are in the trace, without those that are cut off.
    - `parts`: a tuple of `mylib.results.MeasuredPart`s, one for each scope, pass and line.
    - `collectives`: a tuple of `mylib.results.MeasuredCollective`s, in the order of
        `Report.collectives`.
    - `devices`: a tuple of `mylib.results.MeasuredDevice`s.
    - `unknown`: the seconds a call of instructions that the program doesn't have, by their names.
    - `notes`: what is to be known about the trace.

    !!! Example

        ```python
        def measured(compiled, folder, *args):
            with jax.profiler.trace(folder):
                for _ in range(3):
                    jax.block_until_ready(compiled(*args))
            return compiled.audit().measured(folder)
        ```
    """

    name: str
    calls: int
    parts: tuple[MeasuredPart, ...]
    collectives: tuple[MeasuredCollective, ...]
    devices: tuple[MeasuredDevice, ...]
    unknown: Mapping[str, float]
    notes: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """The seconds of a call, as a mean of the devices."""
        return sum(device.seconds for device in self.devices) / len(self.devices)

    @property
    def attributed(self) -> float:
        """The share of the devices' busy time that has a line of Python."""
        total = sum(part.seconds for part in self.parts) + sum(self.unknown.values())
        return sum(part.seconds for part in self.parts if part.source) / total if total else 0.0

    @property
    def layers(self) -> tuple[MeasuredPart, ...]:
        """The time by scope and pass, the longest first."""
        return _longest(_merged(self.parts, lambda part: (part.scope, part.phase), source=""))

    @property
    def lines(self) -> tuple[MeasuredPart, ...]:
        """The time by line of Python, the longest first."""
        return _longest(_merged(self.parts, lambda part: part.source, scope="", phase=""))

    def awaited(self, device: int) -> float:
        """How long the other devices wait for one in a call, on average.

        **Arguments:**

        - `device`: its number.

        **Returns:**

        Seconds.
        """
        others = [one.waits_for.get(device, 0.0) for one in self.devices if one.device != device]
        return sum(others) / len(others) if others else 0.0

    def __repr__(self) -> str:
        paint, lines = paint_for_stdout(), self._title()
        for rows, left in self._tables():
            lines += ["", *columns(rows, paint), *left]
        return for_stdout(lines)

    def _title(self) -> list[str]:
        size = f"{counted(self.calls, 'call')} on {counted(len(self.devices), 'device')}"
        computing, exposed, waiting, idle = (
            show_time(sum(getattr(device, name) for device in self.devices) / len(self.devices))
            for name in ("computing", "exposed", "waiting", "idle")
        )
        lines = [
            f"{self.name}, measured: {size}, {show_time(self.seconds)} a call",
            f"  computing {computing}, exposed communication {exposed} (waiting {waiting}), "
            f"idle {idle}",
        ]
        late = max((device.device for device in self.devices), key=self.awaited)
        if self.awaited(late) > _LATE * self.seconds:
            lines.append(
                f"  device {late} is late: others wait {show_time(self.awaited(late))} for it"
            )
        lines.append(f"  {self.attributed:.1%} of the busy time has a line of Python")
        return lines + [f"  {note}" for note in self.notes]

    def _tables(self) -> "Iterator[tuple[list[Sequence[str]], list[str]]]":
        """Tables, and the lines below each."""
        layers = [(part.scope or "(none)", part.phase, *_of_part(part)) for part in self.layers]
        yield _table(("layer", "pass", *_OF_PART), layers)
        lines = [(part.source or "(unknown)", *_of_part(part)) for part in self.lines]
        yield _table(("line", *_OF_PART), lines)
        alike = _merged(self.collectives, lambda one: (one.kind, one.axes, one.source, one.what))
        if alike:
            exposed = sorted(alike, key=lambda one: -one.exposed)
            yield _table(_OF_COLLECTIVE, [_of_collective(one) for one in exposed])
        devices: list[tuple[str, ...]] = []
        for device in sorted(self.devices, key=lambda device: -self.awaited(device.device)):
            times = (getattr(device, name) for name in _TIMES)
            awaited = self.awaited(device.device)
            devices.append((f"device {device.device}", *map(show_time, (*times, awaited))))
        yield _table(_OF_DEVICE, devices)


_LATE = 0.1  # of the time of a call
_SHOWN = 12
_OF_PART = "computing", "exposed"
_OF_COLLECTIVE = (
    "collective", "over", "times", "in flight", "exposed", "waiting", "for device", "sent", "rate",
    "what",
)  # fmt: skip
_TIMES = "seconds", "computing", "exposed", "waiting", "idle", "between"
_OF_DEVICE = (
    "device", "a call", "computing", "exposed", "waiting", "idle", "between calls", "awaited",
)  # fmt: skip
T = TypeVar("T", MeasuredPart, MeasuredCollective)


def _longest(parts: Iterable[MeasuredPart]) -> tuple[MeasuredPart, ...]:
    return tuple(sorted(parts, key=lambda part: -part.seconds))


def _of_part(part: MeasuredPart) -> tuple[str, ...]:
    return show_time(part.computing), show_time(part.exposed)


def _of_collective(one: MeasuredCollective) -> tuple[str, ...]:
    return (
        one.kind,
        "?" if one.axes is None else ", ".join(one.axes),
        f"{one.times:.4g}",
        *map(show_time, (one.in_flight, one.exposed, one.waiting)),
        "" if one.awaited is None else str(one.awaited),
        show_bytes(one.wire_bytes),
        f"{one.rate / 1e9:.3g} GB/s" if one.rate else "",
        f"{one.what} at {one.source}" if one.source else one.what,
    )


def _table(
    header: Sequence[str], rows: Sequence[Sequence[str]]
) -> tuple[list[Sequence[str]], list[str]]:
    """The first rows, without empty columns, and how many are left out."""
    full = [i for i, column in enumerate(zip(*rows, strict=True)) if any(column)]
    shown: list[Sequence[str]] = [[row[i] for i in full] for row in (header, *rows[:_SHOWN])]
    return shown, more(len(rows) - _SHOWN, header[0])


def _merged(items: Iterable[T], key: Callable[[T], Hashable], **same: str) -> list[T]:
    """Those of one key as one, with the sums of their times."""
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    merged: list[T] = []
    for group in groups.values():
        numbers = [name for name, value in vars(group[0]).items() if type(value) is float]
        sums = {name: sum(getattr(item, name) for item in group) for name in numbers}
        most = max(group, key=lambda item: getattr(item, "waiting", 0.0))
        merged.append(replace(most, **sums, **same))
    return merged

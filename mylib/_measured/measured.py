"""What was measured, as data, as text, and as a page for notebooks."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from .._show import BOLD, columns, for_stdout, html, paint_for_stdout, stacked
from .._text import counted, more, show_bytes


@dataclass(frozen=True)
class MeasuredPart:
    """The time of a part of a program, in seconds a call, as a mean of the devices.

    **Attributes:**

    - `scope`: the scopes around it, as in [`mylib.Collective`][]; empty if all are summed up.
    - `phase`: the pass, as there.
    - `source`: the line of Python, as `"file.py:31"`; empty if unknown, or if all are summed up.
    - `computing`: while it computes.
    - `exposed`: while it communicates, and the device computes nothing.
    - `estimated`: how long it computes by the data sheet of the machine; None without one.

    !!! Example

        ```python
        def slowest_line(measured: mylib.Measured):
            part = measured.lines[0]
            return part.source, part.seconds
        ```
    """

    scope: str
    phase: str
    source: str
    computing: float
    exposed: float
    estimated: float | None

    @property
    def seconds(self) -> float:
        """Computing and exposed communication."""
        return self.computing + self.exposed


@dataclass(frozen=True)
class MeasuredCollective:
    """The time of a collective, in seconds a call, as a mean of the devices.

    **Attributes:**

    - `kind`, `axes`, `source`: as in [`mylib.Collective`][].
    - `what`: the arrays that it moves, as in the report.
    - `times`: how often its instructions run in a call.
    - `in_flight`: from its start to its end.
    - `exposed`: how much of that the device computes nothing.
    - `waiting`: how much of that it waits for another device, which starts later.
    - `awaited`: the number of the device that most of the waiting is for; None without waiting.
    - `wire_bytes`: the bytes that a device sends in a call.
    - `sending`: how long it takes after the last device has started it.
    - `estimated`: the same by the data sheet of the machine; None without one.

    !!! Example

        ```python
        def waits(measured: mylib.Measured):
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
    estimated: float | None

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
        def idle(measured: mylib.Measured):
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


class Cost(NamedTuple):
    """What an instruction does, how often it runs in a call, and for how many seconds."""

    work: Any
    runs: float
    seconds: float


@dataclass(frozen=True, repr=False)
class Measured:
    """The time of a program, as `jax.profiler` has measured it. `print` shows it as tables, a
    notebook as a page.

    **Attributes:**

    - `name`: the name of the program.
    - `calls`: how many calls of it are in the trace, without those that are cut off.
    - `parts`: a tuple of [`mylib.MeasuredPart`][]s, one for each scope, pass and line.
    - `collectives`: a tuple of [`mylib.MeasuredCollective`][]s, in the order of
        `Report.collectives`.
    - `devices`: a tuple of [`mylib.MeasuredDevice`][]s.
    - `unknown`: the seconds a call of instructions that the program doesn't have, by their names.
    - `machine`: the machine that times were estimated for; empty without one.
    - `estimated`: the estimated seconds of a call, and those of exposed communication; None without
        a machine.
    - `notes`: what is to be known about the trace.
    - `costs`: what each instruction does, how often and how long, from which `Report.estimate`
        takes rates.

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
    machine: str
    estimated: tuple[float, float] | None
    notes: tuple[str, ...]
    costs: tuple[Cost, ...] = field(repr=False, compare=False)

    @property
    def seconds(self) -> float:
        """The seconds of a call, as a mean of the devices."""
        return sum(x.seconds for x in self.devices) / len(self.devices)

    @property
    def attributed(self) -> float:
        """The share of the devices' busy time that has a line of Python."""
        total = sum(x.seconds for x in self.parts) + sum(self.unknown.values())
        return sum(x.seconds for x in self.parts if x.source) / total if total else 0.0

    @property
    def layers(self) -> tuple[MeasuredPart, ...]:
        """The time by scope and pass, the longest first."""
        merged = _merged(self.parts, lambda x: (x.scope, x.phase), source="")
        return tuple(sorted(merged, key=lambda x: -x.seconds))

    @property
    def lines(self) -> tuple[MeasuredPart, ...]:
        """The time by line of Python, the longest first."""
        merged = _merged(self.parts, lambda x: x.source, scope="", phase="")
        return tuple(sorted(merged, key=lambda x: -x.seconds))

    def awaited(self, device: int) -> float:
        """How long the other devices wait for one in a call, on average.

        **Arguments:**

        - `device`: its number.

        **Returns:**

        Seconds.
        """
        others = [x.waits_for.get(device, 0.0) for x in self.devices if x.device != device]
        return sum(others) / len(others) if others else 0.0

    def __repr__(self) -> str:
        paint, lines = paint_for_stdout(), self._title()
        for rows, left, _ in self._tables():
            lines += ["", *columns(rows, paint, lambda i, _: "" if i else BOLD), *left]
        return for_stdout(lines)

    def _repr_html_(self) -> str:
        title, *notes = self._title()
        parts = [html.tag("p", title, class_="strong")]
        parts += [html.tag("p", note.strip(), class_="faint") for note in notes]
        for (header, *body), left, pictures in self._tables():
            numbers = [i for i, name in enumerate(header) if name in _NUMBERS]
            if pictures:
                header = (*header, "computing, exposed")
                body = [(*row, x) for row, x in zip(body, pictures, strict=False)]
            parts += [html.table(header, body, numbers=numbers)]
            parts += [html.tag("p", text) for text in left]
        return str(html.page(*parts))

    def _title(self) -> list[str]:
        size = f"{counted(self.calls, 'call')} on {counted(len(self.devices), 'device')}"
        computing, exposed, waiting, idle = (
            _ms(sum(getattr(x, name) for x in self.devices) / len(self.devices))
            for name in ("computing", "exposed", "waiting", "idle")
        )
        lines = [
            f"{self.name}, measured: {size}, {_ms(self.seconds)} a call",
            f"  computing {computing}, exposed communication {exposed} (waiting {waiting}), "
            f"idle {idle}",
        ]
        if self.estimated is not None:
            seconds, shown = map(_ms, self.estimated)
            lines.append(f"  estimated for {self.machine}: {seconds} a call, exposed {shown}")
        late = max(self.devices, key=lambda x: self.awaited(x.device)).device
        if self.awaited(late) > _LATE * self.seconds:
            lines.append(f"  device {late} is late: others wait {_ms(self.awaited(late))} for it")
        lines.append(f"  {self.attributed:.1%} of the busy time has a line of Python")
        return lines + [f"  {note}" for note in self.notes]

    def _tables(self) -> "Iterator[_Tabulated]":
        rows = [(x.scope or "(none)", x.phase, *_of_part(x)) for x in self.layers]
        yield _table(("layer", "pass", *_OF_PART), rows)
        rows = [(x.source or "(unknown)", *_of_part(x)) for x in self.lines]
        yield _table(("line", *_OF_PART), rows)
        alike = _merged(self.collectives, lambda x: (x.kind, x.axes, x.source, x.what))
        rows = [_of_collective(x) for x in sorted(alike, key=lambda x: -x.exposed)]
        if rows:
            yield _table(_OF_COLLECTIVE, rows)
        devices = sorted(self.devices, key=lambda x: -self.awaited(x.device))
        rows: list[tuple[str, ...]] = []
        for x in devices:
            times = x.seconds, x.computing, x.exposed, x.waiting, x.idle, x.between
            rows.append((f"device {x.device}", *map(_ms, (*times, self.awaited(x.device)))))
        longest = max(x.seconds for x in devices) or 1.0
        pictures = [
            stacked(
                [x.computing / longest, x.exposed / longest],
                f"computing {_ms(x.computing)}, exposed {_ms(x.exposed)}, idle {_ms(x.idle)}",
            )
            for x in devices
        ]
        yield _table(_OF_DEVICE, rows, pictures)


_LATE = 0.1  # of the time of a call
_SHOWN = 12
_OF_PART = "computing", "exposed", "estimated"
_OF_COLLECTIVE = (
    "collective", "over", "times", "in flight", "exposed", "waiting", "for device", "sent", "rate",
    "estimated", "link", "what",
)  # fmt: skip
_OF_DEVICE = (
    "device", "a call", "computing", "exposed", "waiting", "idle", "between calls", "awaited",
)  # fmt: skip
_NUMBERS = {*_OF_PART, *_OF_COLLECTIVE[2:-1], *_OF_DEVICE[1:]}
T = TypeVar("T", MeasuredPart, MeasuredCollective)


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.3g} ms"


def _rate(size: float, seconds: float | None) -> str:
    return f"{size / seconds / 1e9:.3g} GB/s" if seconds else ""


def _of_part(x: MeasuredPart) -> tuple[str, ...]:
    return _ms(x.computing), _ms(x.exposed), _ms(x.estimated)


def _of_collective(x: MeasuredCollective) -> tuple[str, ...]:
    return (
        x.kind, "?" if x.axes is None else ", ".join(x.axes), f"{x.times:.4g}", _ms(x.in_flight),
        _ms(x.exposed), _ms(x.waiting), "" if x.awaited is None else str(x.awaited),
        show_bytes(x.wire_bytes), _rate(x.wire_bytes, x.sending), _ms(x.estimated),
        _rate(x.wire_bytes, x.estimated), f"{x.what} at {x.source}" if x.source else x.what,
    )  # fmt: skip


class _Tabulated(NamedTuple):
    """A header and rows, the lines below them, and a picture for each row, or none."""

    rows: list[Sequence[str]]
    left: list[str]
    pictures: Sequence[str]


def _table(
    header: Sequence[str], rows: Sequence[Sequence[str]], pictures: Sequence[str] = ()
) -> _Tabulated:
    """The first rows, without empty columns, and how many are left out."""
    full = [i for i, column in enumerate(zip(*rows, strict=True)) if any(column)]
    left = more(len(rows) - _SHOWN, header[0])
    return _Tabulated([[row[i] for i in full] for row in (header, *rows[:_SHOWN])], left, pictures)


def _merged(items: Iterable[T], key: Callable[[T], Hashable], **same: str) -> list[T]:
    """Those of one key as one, with the sums of their times."""
    groups: dict[Hashable, list[T]] = {}
    for x in items:
        groups.setdefault(key(x), []).append(x)
    merged: list[T] = []
    for of in groups.values():
        sums = {
            k: sum(getattr(x, k) for x in of) for k, v in vars(of[0]).items() if type(v) is float
        }
        most = max(of, key=lambda x: getattr(x, "waiting", 0.0))
        merged.append(replace(most, **sums, **same))
    return merged

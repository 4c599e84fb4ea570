"""What was measured, as data, as text, and as a page for notebooks."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
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
    wire_bytes: int
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
        return self._mean(lambda x: x.seconds)

    @property
    def attributed(self) -> float:
        """The share of the devices' busy time that has a line of Python."""
        total = sum(x.seconds for x in self.parts) + sum(self.unknown.values())
        return sum(x.seconds for x in self.parts if x.source) / total if total else 0.0

    @property
    def layers(self) -> tuple[MeasuredPart, ...]:
        """The time by scope and pass, the longest first."""
        return _merged(self.parts, lambda x: (x.scope, x.phase), source="")

    @property
    def lines(self) -> tuple[MeasuredPart, ...]:
        """The time by line of Python, the longest first."""
        return _merged(self.parts, lambda x: x.source, scope="", phase="")

    def awaited(self, device: int) -> float:
        """How long the other devices wait for one in a call, on average.

        **Arguments:**

        - `device`: its number.

        **Returns:**

        Seconds.
        """
        others = [x.waits_for.get(device, 0.0) for x in self.devices if x.device != device]
        return sum(others) / len(others) if others else 0.0

    def _mean(self, of: Callable[[MeasuredDevice], float]) -> float:
        return sum(map(of, self.devices)) / len(self.devices)

    def __repr__(self) -> str:
        paint = paint_for_stdout()
        lines = [*self._title()]
        for table, left in self._tables():
            lines += ["", *columns(table, paint, lambda i, _: "" if i else BOLD), *left]
        return for_stdout(lines)

    def _repr_html_(self) -> str:
        title, *notes = self._title()
        longest = max(x.seconds for x in self.devices)
        parts = [html.tag("p", title, class_="strong")]
        parts += [html.tag("p", note.strip(), class_="faint") for note in notes]
        for (header, *body), left in self._tables():
            numbers = [i for i, name in enumerate(header) if name in _NUMBERS]
            if header[0] == "device":
                header = (*header, "computing, exposed")
                pictures = [_picture(x, longest) for x in self.devices]
                pictures += [""] * (len(body) - len(pictures))
                body = [(*row, x) for row, x in zip(body, pictures, strict=True)]
            parts += [html.table(header, body, numbers=numbers), *map(_paragraph, left)]
        return str(html.page(*parts))

    def _title(self) -> list[str]:
        size = f"{counted(self.calls, 'call')} on {counted(len(self.devices), 'device')}"
        exposed, waiting = self._mean(lambda x: x.exposed), self._mean(lambda x: x.waiting)
        lines = [
            f"{self.name}, measured: {size}, {_ms(self.seconds)} a call",
            f"  computing {_ms(self._mean(lambda x: x.computing))}, exposed communication "
            f"{_ms(exposed)} (waiting {_ms(waiting)}), idle {_ms(self._mean(lambda x: x.idle))}",
        ]
        if self.estimated is not None:
            seconds, hidden = map(_ms, self.estimated)
            lines.append(f"  estimated for {self.machine}: {seconds} a call, exposed {hidden}")
        late = max(self.devices, key=lambda x: self.awaited(x.device)).device
        if self.awaited(late) > _LATE * self.seconds:
            lines.append(f"  device {late} is late: others wait {_ms(self.awaited(late))} for it")
        lines.append(f"  {self.attributed:.1%} of the busy time has a line of Python")
        return lines + [f"  {note}" for note in self.notes]

    def _tables(self) -> list[tuple[list[tuple[str, ...]], list[str]]]:
        estimated = ("estimated",) * (self.estimated is not None)
        first = ("computing", "exposed", *estimated)
        rows = [(x.scope or "(none)", x.phase, *_times(x, estimated)) for x in self.layers]
        tables = [_table(("layer", "pass", *first), rows, "layer")]
        rows = [(x.source or "(unknown)", *_times(x, estimated)) for x in self.lines]
        tables.append(_table(("line", *first), rows, "line"))
        if self.collectives:
            alike = _alike(self.collectives)
            rows = [_of_collective(x, estimated) for x in alike]
            tables.append(_table((*_OF_COLLECTIVE, *_LINK[: 2 * len(estimated)], "what"), rows, ""))
        return [*tables, _table(_OF_DEVICE, self._of_devices(), "device")]

    def _of_devices(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        for x in sorted(self.devices, key=lambda x: x.device):
            times = x.seconds, x.computing, x.exposed, x.waiting, x.idle, x.between
            rows.append((f"device {x.device}", *map(_ms, (*times, self.awaited(x.device)))))
        if self.estimated is not None:
            seconds, exposed = self.estimated
            times = seconds, seconds - exposed, exposed
            rows.append(("estimated", *map(_ms, times), *[""] * 4))
        return rows


_LATE = 0.1  # of the time of a call
_SHOWN = 12
_OF_COLLECTIVE = (
    "collective", "over", "times", "in flight", "exposed", "waiting", "for device", "sent", "rate",
)  # fmt: skip
_LINK = "estimated", "link"
_OF_DEVICE = (
    "device", "a call", "computing", "exposed", "waiting", "idle", "between calls", "awaited",
)  # fmt: skip
_NUMBERS = {*_OF_COLLECTIVE[2:], *_LINK, *_OF_DEVICE[1:]}
T = TypeVar("T")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _rate(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s"


def _paragraph(text: str) -> html.Html:
    return html.tag("p", text)


def _times(x: MeasuredPart, estimated: Sequence[str]) -> tuple[str, ...]:
    last = ["" if x.estimated is None else _ms(x.estimated)] * len(estimated)
    return (_ms(x.computing), _ms(x.exposed), *last)


def _of_collective(x: MeasuredCollective, estimated: Sequence[str]) -> tuple[str, ...]:
    over = "?" if x.axes is None else ", ".join(x.axes)
    link = ["", ""] if not x.estimated else [_ms(x.estimated), _rate(x.wire_bytes / x.estimated)]
    return (
        x.kind, over, f"{x.times:.4g}", _ms(x.in_flight), _ms(x.exposed), _ms(x.waiting),
        "" if x.awaited is None else str(x.awaited), show_bytes(x.wire_bytes), _rate(x.rate),
        *link[: 2 * len(estimated)], f"{x.what} at {x.source}" if x.source else x.what,
    )  # fmt: skip


def _table(
    header: tuple[str, ...], rows: Sequence[tuple[str, ...]], what: str
) -> tuple[list[tuple[str, ...]], list[str]]:
    left = more(len(rows) - _SHOWN, what or "collective") if what != "device" else []
    return [header, *(rows[:_SHOWN] if left else rows)], left


def _groups(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    groups: dict[Hashable, list[T]] = {}
    for x in items:
        groups.setdefault(key(x), []).append(x)
    return [*groups.values()]


def _added(values: Iterable[float | None]) -> float | None:
    known = [x for x in values if x is not None]
    return sum(known) if known else None


def _merged(
    parts: Sequence[MeasuredPart], key: Callable[[MeasuredPart], Hashable], **without: str
) -> tuple[MeasuredPart, ...]:
    merged = (
        replace(
            of[0],
            computing=sum(x.computing for x in of),
            exposed=sum(x.exposed for x in of),
            estimated=_added(x.estimated for x in of),
            **without,
        )
        for of in _groups(parts, key)
    )
    return tuple(sorted(merged, key=lambda x: -x.seconds))


def _alike(all_: Sequence[MeasuredCollective]) -> list[MeasuredCollective]:
    """Those that differ only in their layer as one, the most exposed first."""
    merged: list[MeasuredCollective] = []
    names = "times", "in_flight", "exposed", "waiting", "wire_bytes", "sending"
    for of in _groups(all_, lambda x: (x.kind, x.axes, x.source, x.what)):
        sums: dict[str, Any] = {name: sum(getattr(x, name) for x in of) for name in names}
        sums["estimated"] = _added(x.estimated for x in of)
        sums["awaited"] = max(of, key=lambda x: x.waiting).awaited
        merged.append(replace(of[0], **sums))
    return sorted(merged, key=lambda x: -x.exposed)


def _picture(x: MeasuredDevice, longest: float) -> html.Html:
    """The parts of a device's time, one after the other."""
    text = f"computing {_ms(x.computing)}, exposed {_ms(x.exposed)}, idle {_ms(x.idle)}"
    return stacked([x.computing / longest, x.exposed / longest], text)

"""The result of an audit, and how it is printed."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._errors import AuditError, folded
from .._measured import Measured, Sent, measured_of
from .._show import columns, for_stdout, wrapped
from .._text import counted, listed, show_bytes
from ..machines import Machine, Memory
from .attribution import UNKNOWN
from .flow import Flow
from .groups import axis_of, in_words
from .joined import program_of
from .links import Message, seconds
from .memory import lines_of
from .opcodes import KINDS
from .page import report_page
from .roofline import Estimate, estimate, speeds
from .work import Work


@dataclass(frozen=True)
class Collective:
    """One collective of a program.

    **Attributes:**

    - `kind`: `"all-reduce"`, `"all-gather"`, `"reduce-scatter"`, `"all-to-all"`,
        `"ragged-all-to-all"`, `"collective-permute"` or `"broadcast"`.
    - `axes`: the mesh axes that it goes over, in the order of the mesh. `"data:(2)4"` is a part of
        an axis (4 devices in each of its 2 blocks), `"~data"` a group of devices that isn't a part
        of the mesh. None if the mesh is unknown.
    - `times`: how often it runs in a call of the program; None if that is unknown, as in a
        `while_loop` that depends on data.
    - `bytes`: the size of the result on one device, in one execution; for a reduce-scatter the size
        of the operand.
    - `wire_bytes`: the bytes that a device sends in one execution, if the algorithm is a ring.
    - `dtype`: the dtype that is sent. The CPU's compiler, for example, sends bfloat16 as float32.
    - `arrays`: the paths of arguments that are moved unchanged. Computed values have no path; see
        `gradients`, `primitive` and `source`.
    - `gradients`: the paths of arguments whose gradients are summed or moved, if the program then
        updates them.
    - `primitive`: the JAX primitive that it belongs to, such as `"dot_general"`.
    - `scope`: the scopes around that: of `jax.named_scope`, and the names of Equinox's layers, such
        as `"eqx.nn.MultiheadAttention/eqx.nn.Linear"`.
    - `source`: the line of Python, as `"file.py:31"`.
    - `phase`: `"forward"`, `"backward"` or `"recomputed"` in a gradient, else empty; `"unknown"` if
        the program doesn't tell.
    - `inserted`: whether the partitioner has inserted it. Otherwise the function calls it, such as
        by `jax.lax.psum`. None if the program doesn't tell.
    - `overlapped`: whether other work is scheduled while it runs.
    - `sometimes`: whether it runs only if a condition takes its branch. `times` is then an upper
        bound.
    - `loops`: the lines of the loops around it, the outermost first.
    - `devices`: the number of devices in each group.
    - `spelling`: how the compiler has written it, if not as an instruction of this kind. It
        contains `"gathered, then split otherwise"` if each device keeps only another part of what
        is gathered: XLA's "involuntary full rematerialization".
    - `branches`: the conditions around it, the outermost first: each as a name, and the number of
        the branch.
    - `instructions`: the names of the instructions that start it, and of those that end it, as
        profilers have them.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=8)
        x = mylib.filter_shard(jnp.ones(8), P("data"), mesh=mesh)
        (collective,) = mylib.audit(lambda x: x.sum(), x).collectives
        assert (collective.kind, collective.axes) == ("all-reduce", ("data",))
        ```
    """

    kind: str
    axes: tuple[str, ...] | None
    times: int | None
    bytes: int
    wire_bytes: int
    dtype: str
    arrays: tuple[str, ...]
    gradients: tuple[str, ...]
    primitive: str
    scope: str
    source: str
    phase: str
    inserted: bool | None
    overlapped: bool
    sometimes: bool
    loops: tuple[str, ...]
    devices: int
    spelling: str
    branches: tuple[tuple[str, int], ...] = ()
    instructions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Parameter:
    """An argument or a result of a program.

    **Attributes:**

    - `path`: its name, such as `model.layers[0].weight`.
    - `dtype`, `shape`, `bytes`: those of the part on one device.
    - `axes`: the mesh axes that it is split over; None if unknown.

    !!! Example

        ```python
        (x,) = mylib.audit(lambda x: x + 1, jnp.ones((8, 8))).parameters
        assert (x.path, x.shape, x.bytes) == ("x", (8, 8), 256)
        ```
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    axes: tuple[str, ...] | None


@dataclass(frozen=True, repr=False)
class Report:
    """The communication and the memory of a compiled program. `print` shows it as a table, a
    notebook as a page.

    **Attributes:**

    - `collectives`: a tuple of [`mylib.Collective`][]s, one for each in the program.
    - `memory`: a [`mylib.machines.Memory`][]; None if only text was given.
    - `axes`: the mesh axes and their sizes; empty if the mesh is unknown.
    - `name`: the name of the program.
    - `work`: a [`mylib.Work`][]: how much is computed.
    - `parameters`: a tuple of [`mylib.Parameter`][]s, the arguments that the
        program uses.
    - `results`: the same for its results; empty if only text was given.
    - `flow`: what its results and collectives depend on, which contracts judge by.
    - `share`: the part of the function's products that each device computes: 1 if they are not
        divided. None if that is unknown, as for a program without its function, with kernels or
        decompositions of matrices, or if the compiler has merged products.
    - `platform`: `"cpu"`, `"gpu"` or `"tpu"`; empty if only text was given.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=8)
        x = mylib.filter_shard(jnp.ones((64, 64)), P("data"), mesh=mesh)
        report = mylib.audit(lambda x: (x @ x.T).sum(), x)
        print(report)
        assert report.count() == len(report.collectives)
        ```
    """

    collectives: tuple[Collective, ...]
    memory: Memory | None
    axes: dict[str, int]
    name: str
    parameters: tuple[Parameter, ...]
    work: Work
    results: tuple[Parameter, ...]
    flow: Flow = field(repr=False, compare=False)
    share: float | None = None
    platform: str = ""

    def count(self, kind: str | None = None, axes: str | Sequence[str] | None = None) -> int:
        """How many collectives run in a call of the program. Of the branches of a condition only
        the one with most of them counts.

        **Arguments:**

        - `kind`: only those of this kind; None for all.
        - `axes`: only those over exactly these mesh axes; None for all.

        **Raises:**

        `AuditError` if the number is unknown, because the length of a loop depends on data.
        """
        return _most((c.branches, times_of(c)) for c in self.among(kind, axes))

    def bytes(self, kind: str | None = None, axes: str | Sequence[str] | None = None) -> int:
        """The bytes of all executions of these collectives, as in `Collective.bytes`. `kind` and
        `axes` are as for `count`.
        """
        return bytes_of(self.among(kind, axes))

    def wire_bytes(self, kind: str | None = None, axes: str | Sequence[str] | None = None) -> int:
        """The bytes that a device sends in all executions of these collectives. `kind` and `axes`
        are as for `count`.
        """
        return _most((c.branches, times_of(c) * c.wire_bytes) for c in self.among(kind, axes))

    def among(
        self, kind: str | None = None, axes: str | Sequence[str] | None = None
    ) -> list[Collective]:
        """The collectives of a `kind`, over exactly these mesh `axes`; None for all."""
        if kind is not None and kind not in KINDS:
            raise ValueError(f"there is no collective {kind!r}: write one of {', '.join(KINDS)}")
        of_kind = [c for c in self.collectives if kind in (None, c.kind)]
        if axes is None:
            return of_kind
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        if not self.axes and of_kind:
            raise no_mesh(self)
        for name in names if self.axes else ():
            size_of(self, axis_of(name))
        return [c for c in of_kind if c.axes is not None and set(c.axes) == set(names)]

    def estimate(self, machine: Machine, measured: Measured | None = None) -> Estimate:
        """How long a call takes on a machine, by its data sheet, with an interval. The result
        prints its assumptions.

        **Arguments:**

        - `machine`: from `mylib.machines`. Its mesh is assumed to be laid out as
            `machine.mesh(...)` does.
        - `measured`: a step that was measured on it, by [`mylib.Report.measured`][]: the rates that
            its products, its memory and its links (by mesh axis) reach replace assumed ones.

        **Returns:**

        An [`mylib.Estimate`][].

        **Raises:**

        `ValueError` if the program is for another number of devices than the machine has, or the
        machine's data sheet lacks a figure.
        """
        _check_sheet(machine)
        if not all(c.axes for c in self.collectives):
            raise no_mesh(self)
        return estimate(self.work, self._messages(), self.axes, machine, measured)

    def _messages(self) -> list[Message]:
        # A loop whose length is unknown counts once, which the estimate says.
        return [
            Message(c.kind, c.axes or (), c.wire_bytes, 1 if c.times is None else c.times)
            for c in self.collectives
        ]

    def measured(self, folder: str | Path, machine: Machine | None = None) -> Measured:
        """Where the time of the program went, by a trace of `jax.profiler`: by layer and pass, by
        line of Python, by collective and by device, and which devices wait for which.

        The trace and the program are joined by the names of instructions. Run the audited program
        inside of `jax.profiler.trace(folder)`, and wait there for its result.

        **Arguments:**

        - `folder`: what was given to `jax.profiler.trace`, or one `*.xplane.pb` file in it.
        - `machine`: from `mylib.machines`: its `estimate` stands beside the times.

        **Returns:**

        A [`mylib.Measured`][].

        **Raises:**

        [`mylib.AuditError`][] if the trace is not of this program, has several traces or none, or
        is cut off.
        """
        found = None if machine is None else self.estimate(machine)
        each: Sequence[float | None] = [None] * len(self.collectives)
        if machine is not None:
            each = [seconds(x, self.axes, machine)[0] * x.times for x in self._messages()]
        what = {id(c): what_of(group) for group in _by_layer(self.collectives) for c in group}
        sent = [
            Sent(c.kind, c.axes, c.source, what[id(c)], estimated)
            for c, estimated in zip(self.collectives, each, strict=True)
        ]
        speed = None if machine is None else speeds(machine.chip, self.work.flops)[1]
        program = program_of(self.flow, sent, speed)
        estimated = found and (found.seconds, found.exposed)
        return measured_of(folder, program, str(machine or ""), estimated)

    def expect(self, *contracts: "Contract") -> None:
        """Checks the program, in a test.

        **Arguments:**

        - `contracts`: what is expected, from `mylib.contracts` or your own: functions from this
            report to a list of faults.

        **Raises:**

        `AssertionError` that lists everything that is not as expected.
        """
        faults = [fault for contract in contracts for fault in contract(self)]
        if faults:
            lines = "\n".join(f"  {fault}" for fault in faults)
            raise AssertionError(f"{self.name} is not as expected:\n{lines}\n\n{self}")

    def __repr__(self) -> str:
        lines = wrapped([_title(self)])
        if self.collectives:
            rows = [_COLUMNS, *map(_row, _by_layer(self.collectives))]
            lines += columns(rows, heading=_COLUMNS.index("collective"), indent="  ")
        lines += wrapped([_sum(self), *_divided(self), *_each_turn(self)])
        return for_stdout([*lines, *([] if self.memory is None else lines_of(self.memory))])

    def _repr_html_(self) -> str:
        groups = _by_layer(self.collectives)
        notes = [_sum(self), *_divided(self), *_each_turn(self)]
        rows, sent = [*map(_row, groups)], [*map(_sent, groups)]
        return report_page(_title(self), notes, _COLUMNS, rows, sent, self.memory)


def _check_sheet(machine: Machine) -> None:
    chip = machine.chip
    rates = {"memory bandwidth": chip.memory_bandwidth, "rates of products": chip.flops}
    unknown = [name for name, rate in rates.items() if not rate]
    if unknown:
        raise ValueError(
            f"no time can be estimated for {machine}: mylib has no data sheet of it, and its "
            f"{' and '.join(unknown)} are unknown. Pass a machine of mylib.machines.gpu or tpu, or "
            "describe this one: dataclasses.replace(machine, chip=dataclasses.replace("
            "machine.chip, memory_bandwidth=50e9, flops={'float32': 1e12}))"
        )


Contract = Callable[[Report], Sequence[str]]


def no_mesh(report: Report) -> AuditError:
    return AuditError(
        f"the mesh of {report.name} is not known: its devices have no names. Pass mesh= to "
        "mylib.audit"
    )


def size_of(report: Report, axis: str) -> int:
    """The number of devices along an axis, which there must be."""
    if axis not in report.axes:
        raise ValueError(f"the mesh has no axis {axis!r}: it has {', '.join(report.axes)}")
    return report.axes[axis]


def bytes_of(collectives: Iterable[Collective]) -> int:
    """The bytes of all executions in a call."""
    return _most((c.branches, times_of(c) * c.bytes) for c in collectives)


def _most(amounts: Iterable[tuple[Sequence[tuple[str, int]], int]]) -> int:
    """The sum of amounts, each with its branches; of a condition's branches only the largest."""
    total = 0
    # In nested conditions, too: by the outermost one, and then those inside of its branches.
    inside: dict[str, dict[int, list[tuple[Sequence[tuple[str, int]], int]]]] = {}
    for branches, amount in amounts:
        if branches:
            condition, number = branches[0]
            inside.setdefault(condition, {}).setdefault(number, []).append((branches[1:], amount))
        else:
            total += amount
    return total + sum(max(map(_most, by_branch.values())) for by_branch in inside.values())


def times_of(c: Collective) -> int:
    """How often it runs in a call; an error if that is unknown."""
    if c.times is None:
        raise AuditError(
            f"it is unknown how often the {c.kind} of {c.source or c.primitive} runs: it is in a "
            "loop whose end depends on data"
        )
    return c.times


_SHOWN = 3
_COLUMNS = ("times", "collective", "over", "bytes", "sent", "who", "pass", "what", "line")


def _title(report: Report) -> str:
    return f"{report.name} on {in_words(report.axes) or 'devices of an unknown mesh'}"


def _divided(report: Report) -> list[str]:
    """How much each of several devices computes."""
    share, devices = report.share, math.prod(report.axes.values())
    if share is None or devices == 1:
        return []
    parts = round(1 / share)
    # Compilers add a few products of their own, and simplify others. How many is a guess.
    if abs(share * parts - 1) < 0.02:
        return [f"  each device does {'all' if parts == 1 else f'1/{parts}'} of the products"]
    return [f"  each device does {share:.0%} of the products"]


def sums_each_turn(report: Report, c: Collective) -> bool:
    """Whether it is XLA:CPU that sums a gradient in each iteration of a loop: other compilers sum
    it once, after the loop.
    """
    is_sum = c.kind in ("all-reduce", "reduce-scatter")
    is_inserted = c.inserted is not False  # what the function calls, it calls in each iteration
    return report.platform == "cpu" and is_sum and is_inserted and bool(c.loops)


def _each_turn(report: Report) -> list[str]:
    if not any(c.gradients and sums_each_turn(report, c) for c in report.collectives):
        return []
    return ["  XLA:CPU sums gradients in each iteration of a loop; GPUs sum them once, after it"]


def _by_layer(collectives: Iterable[Collective]) -> list[list[Collective]]:
    """Groups collectives that differ only in their layer, and sorts them by kind, axes and bytes
    sent.
    """
    alike: dict[Any, list[Collective]] = {}
    for c in collectives:
        same = c.kind, c.axes, c.bytes, c.dtype, c.inserted, c.phase, c.source, c.times
        same += c.primitive, c.scope
        # Without numbers, which differ between layers.
        paths = (tuple(re.sub(r"\d", "#", x) for x in paths) for paths in (c.arrays, c.gradients))
        alike.setdefault((*same, *paths), []).append(c)
    return sorted(alike.values(), key=lambda group: (group[0].kind, group[0].axes or ()))


def _row(group: Sequence[Collective]) -> tuple[str, ...]:
    c = group[0]
    times = "?" if c.times is None else f"{c.times * len(group)}"
    notes = [c.spelling] if c.spelling else []
    notes += ["overlapped"] if c.overlapped else []
    notes += ["in a branch"] if c.sometimes else []
    return (
        ("≤ " if c.sometimes else "") + times,
        c.kind,
        over(c),
        f"{show_bytes(c.bytes)} {c.dtype}",
        show_bytes(c.wire_bytes),
        {True: "inserted", False: "written", None: "?"}[c.inserted],
        "?" if c.phase == UNKNOWN else c.phase,
        what_of(group) + (f" ({', '.join(notes)})" if notes else ""),
        c.source + (f" in the loop of {c.loops[-1]}" if c.loops else ""),
    )


def over(c: Collective) -> str:
    return "?" if c.axes is None else ", ".join(c.axes)


def folded_names(paths: Sequence[str]) -> str:
    """The names of leaves, those of equal layers together: `a[0..5].b, c and 2 more`."""
    return listed([*folded(paths)], _SHOWN)


def what_of(group: Sequence[Collective]) -> str:
    """The names of the arrays that equal collectives move."""
    moved = folded_names([path for c in group for path in c.arrays])
    summed = folded_names([path for c in group for path in c.gradients])
    if moved or summed:
        return moved or f"gradient of {summed}"
    return group[0].primitive + (f" in {group[0].scope}" if group[0].scope else "")


def _sent(group: Sequence[Collective]) -> int:
    """The bytes that a device sends in a call, for collectives with known `times`."""
    return sum((c.times or 0) * c.wire_bytes for c in group)


def _sum(report: Report) -> str:
    if not report.collectives:
        return "nothing is communicated"
    with_times = [c for c in report.collectives if c.times is not None]
    sent = show_bytes(_sent(with_times))
    bounded = any(c.sometimes for c in with_times)
    text = f"  each device sends {'at most ' if bounded else ''}{sent} in a call"
    unknown = len(report.collectives) - len(with_times)
    if not unknown:
        return text
    run = counted(unknown, "collective runs", "collectives run")
    return f"{text}, and {run} an unknown number of times"

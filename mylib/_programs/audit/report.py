"""The result of an audit, and how it is printed."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..._core.errors import AuditError, listed as all_listed
from ..._core.show import for_stdout, wrapped
from ..._core.text import counted, show_bytes
from ..machines import Machine, Memory
from ..measured import Measured, Sent, measured_of
from .entries import Collective, ProgramArray
from .flow import Flow
from .groups import axis_of, in_words
from .joined import program_of
from .links import Message
from .memory import lines_of
from .opcodes import KINDS
from .page import report_page
from .roofline import Estimate, estimate
from .table import COLUMNS, alike, row_of, table, what_of
from .work import Work


@dataclass(frozen=True, repr=False)
class Report:
    """The communication and the memory of a compiled program. `print` shows it as a table, a
    notebook as a page.

    **Attributes:**

    - `collectives`: a tuple of `mylib.results.Collective`s, one for each in the program.
    - `memory`: a `mylib.machines.Memory`; None if only text was given.
    - `axes`: the mesh axes and their sizes; empty if the mesh is unknown.
    - `name`: the name of the program.
    - `work`: a `mylib.results.Work`: how much is computed.
    - `parameters`: a tuple of `mylib.results.ProgramArray`s, the arguments that the
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
    parameters: tuple[ProgramArray, ...]
    work: Work
    results: tuple[ProgramArray, ...]
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

    def estimate(self, machine: Machine) -> Estimate:
        """How long a call takes on a machine, by its data sheet, with an interval. The result
        prints its assumptions.

        **Arguments:**

        - `machine`: from `mylib.machines`. Its mesh is assumed to be laid out as
            `machine.mesh(...)` does.

        **Returns:**

        An `mylib.results.Estimate`.

        **Raises:**

        `ValueError` if the program is for another number of devices than the machine has, or the
        machine's data sheet lacks a figure.
        """
        if not all(c.axes for c in self.collectives):
            raise no_mesh(self)
        # A loop whose length is unknown counts once, which the estimate says.
        sent = [
            Message(c.kind, c.axes or (), c.wire_bytes, 1 if c.times is None else c.times)
            for c in self.collectives
        ]
        return estimate(self.work, sent, self.axes, machine)

    def measured(self, folder: str | Path) -> Measured:
        """Where the time of the program went, by a trace of `jax.profiler`: by layer and pass, by
        line of Python, by collective and by device, and which devices wait for which.

        The trace and the program are joined by the names of instructions. Run the audited program
        inside of `jax.profiler.trace(folder)`, and wait there for its result.

        **Arguments:**

        - `folder`: what was given to `jax.profiler.trace`, or one `*.xplane.pb` file in it.

        **Returns:**

        A `mylib.results.Measured`.

        **Raises:**

        `mylib.errors.AuditError` if the trace is not of this program, has several traces or
        none, or is cut off.
        """
        what = {id(c): what_of(group) for group in alike(self.collectives) for c in group}
        sent = [Sent(c.kind, c.axes, c.source, what[id(c)]) for c in self.collectives]
        return measured_of(folder, program_of(self.flow, sent))

    def expect(self, *contracts: "Contract") -> None:
        """Checks the program, in a test.

        Contracts check what a step sends, gathers and holds; `mylib.testing.verify` runs it and
        checks its numbers. The two lines belong together:

            report.expect(mylib.contracts.fsdp("data"))
            mylib.testing.verify(step, model, batch)

        **Arguments:**

        - `contracts`: what is expected, from `mylib.contracts` or your own: functions from this
            report to a list of faults.

        **Raises:**

        `mylib.errors.ContractError`, an `AssertionError`: everything that is not as
        expected.
        """
        __tracebackhide__ = True
        found = [contract(self) for contract in contracts]
        for made in filter(callable, found):
            name = made.__qualname__.partition(".")[0]
            raise TypeError(f"call the contract: contracts.{name}(...), not contracts.{name}")
        faults = [fault for each in found for fault in each]
        if faults:
            raise ContractError(self, faults)

    def __repr__(self) -> str:
        lines = wrapped([_title(self)])
        lines += table(self.collectives) if self.collectives else []
        lines += wrapped([_sum(self), *_divided(self), *_each_turn(self)])
        return for_stdout([*lines, *([] if self.memory is None else lines_of(self.memory))])

    def _repr_html_(self) -> str:
        notes = [_sum(self), *_divided(self), *_each_turn(self)]
        rows = [row_of(group).cells() for group in alike(self.collectives)]
        return report_page(_title(self), notes, COLUMNS, rows, self.memory)


Contract = Callable[[Report], Sequence[str]]


class ContractError(AssertionError):
    """A program is not as `mylib.results.Report.expect` expects. `report` is the program's
    report, and `violations` are the sentences that the contracts return.

    !!! Example

        ```python
        report = mylib.audit(lambda x: x + 1, jnp.ones(8))
        try:
            report.expect(lambda report: ["a contract of your own"])
        except mylib.errors.ContractError as error:
            print(error, error.report)
        ```
    """

    def __init__(self, report: Report, violations: Sequence[str]):
        self.report: Report = report
        self.violations: tuple[str, ...] = tuple(violations)
        count = counted(len(violations), "violation")
        several = all_listed({(): [*violations]}, "all of them are in `.violations`")
        several *= len(violations) > 1
        first = f"{report.name}: {count}{'; the first' if several else ''}: {violations[0]}"
        super().__init__("\n".join([first, *several]))


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


def _sum(report: Report) -> str:
    if not report.collectives:
        return "nothing is communicated"
    with_times = [c for c in report.collectives if c.times is not None]
    sent = show_bytes(sum(times_of(c) * c.wire_bytes for c in with_times))
    bounded = any(c.sometimes for c in with_times)
    text = f"  each device sends {'at most ' if bounded else ''}{sent} in a call"
    unknown = len(report.collectives) - len(with_times)
    if not unknown:
        return text
    run = counted(unknown, "collective runs", "collectives run")
    return f"{text}, and {run} an unknown number of times"

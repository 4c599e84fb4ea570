"""Estimates how long a program takes, from its operations and a machine's data sheet."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..._core.text import show_time
from ..machines import Machine
from .groups import axis_of, in_words
from .links import Message, seconds
from .moments import Begin, End
from .speed import Speed, slowest, speeds
from .work import Loop, Operation, Step, Work


@dataclass(frozen=True, repr=False)
class Estimate:
    """An estimate of the time of a call.

    **Attributes:**

    - `seconds`: the time of a call.
    - `interval`: the seconds of a call at least and at most. At least: each operation reaches the
        data sheet's rates, and all communication is hidden behind computation. At most: none is
        hidden, and each operation first moves its data and then computes, where the shares of a
        chip are unknown at the lowest of those that are known; infinite if something is unknown.
    - `parts`: the seconds of each part: `"compute"`, `"memory"`, and `"communication over ..."` the
        mesh axes.
    - `exposed`: the seconds in which a device waits for communication, which are a part of
        `seconds`. The rest of the communication is hidden behind computation. Waiting for copies to
        and from the host is not among them.
    - `bound_by`: the part that takes longest.
    - `unknown`: how many operations could not be counted, see `mylib.results.Work`.
    - `assumptions`: the assumptions of the estimate.

    !!! Example

        ```python
        report = mylib.audit(lambda x: x @ x, jnp.ones((8, 8)))
        estimate = report.estimate(mylib.machines.gpu("h100", devices_per_host=1))
        low, high = estimate.interval
        assert low <= estimate.seconds <= high
        ```
    """

    seconds: float
    interval: tuple[float, float]
    parts: Mapping[str, float]
    exposed: float
    bound_by: str
    unknown: int
    assumptions: tuple[str, ...]

    def __repr__(self) -> str:
        low, high = self.interval
        most = "an unknown time" if math.isinf(high) else show_time(high)
        total = f"{show_time(self.seconds)} a call, between {show_time(low)} and {most}"
        lines = [f"an estimate: {total}, bound by {self.bound_by}"]
        lines += [f"  {name}: {show_time(part)}" for name, part in self.parts.items()]
        if len(self.parts) > 2:
            lines.append(f"  of the communication, not hidden: {show_time(self.exposed)}")
        if self.unknown:
            lines.append(f"  unknown: {self.unknown} kernels or loops, counted once or not at all")
        return "\n".join([*lines, *(f"  assuming {text}" for text in self.assumptions)])


def _reached(speed: Speed) -> str:
    shares = speed.of_products, speed.of_kernels, speed.of_memory
    products, kernels, memory = (f"{100 * share:.3g}%" for share in shares)
    return (
        f"matrix products reach {products} of the data sheet's rate, kernels {kernels}, memory "
        f"{memory}"
    )


_ONE_AT_A_TIME = (
    "one collective runs at a time, beside the operations that are scheduled before its end"
)


def estimate(
    work: Work,
    sent: Sequence[Message],
    axes: Mapping[str, int],
    machine: Machine,
) -> Estimate:
    """`sent` are all collectives of the program. The interval ignores the order in which things
    run: at least, one of computation, communication and copies hides the others. The estimate goes
    through the schedule.
    """
    _check_size(axes, machine)
    ideal, real, assumed = speeds(machine.chip, work.flops)
    least = slowest(machine.chip, real)
    assumed += [_reached(real), _ONE_AT_A_TIME]
    times = [(op.times, *real.seconds(op)) for op in work.operations]
    parts = {"compute": sum(n * x for n, x, _ in times), "memory": sum(n * y for n, _, y in times)}
    body = sum(n * max(x, y) for n, x, y in times)
    low = sum(op.times * max(ideal.seconds(op)) for op in work.operations)
    links = [seconds(message, axes, machine) for message in sent]
    assumed += [text for _, text in links]
    over = _over_axes(sent, [each for each, _ in links])
    parts, communication = parts | over, sum(over.values())
    copied, most_copied, about_copies = _copies(work, real)
    parts |= {"host memory": copied} if copied else {}
    assumed += about_copies
    computing = sum(op.times * sum(least.seconds(op)) for op in work.operations)
    most = communication + most_copied + computing
    low = max(low, communication, copied)
    # Then as if copies took no time: what is waited for beyond that is the host.
    total, communicating = (
        played(work.schedule, speed, [each for each, _ in links])
        for speed in (real, real._replace(host=math.inf))
    )
    return Estimate(
        seconds=total,
        interval=(min(total, low), math.inf if work.unknown else most),
        parts=parts,
        exposed=max(0.0, communicating - body),
        bound_by=max(parts, key=lambda name: parts[name]),
        unknown=work.unknown,
        assumptions=tuple(dict.fromkeys(assumed)),
    )


def _over_axes(sent: Sequence[Message], taken: Sequence[float]) -> dict[str, float]:
    """The seconds of all collectives, by the axes that they are over."""
    parts: dict[str, float] = {}
    for message, each in zip(sent, taken, strict=True):
        part = f"communication over {', '.join(map(axis_of, message.axes))}"
        parts[part] = parts.get(part, 0.0) + each * message.times
    return parts


def _copies(work: Work, real: Speed) -> tuple[float, float, list[str]]:
    """The seconds of copies between the device and its host, those at most, and what is assumed
    about them.
    """
    if not any(op.host for op in work.operations):
        return 0.0, 0.0, []
    if math.isinf(real.host):
        return 0.0, math.inf, ["copies to and from the host cost nothing, as their rate is unknown"]
    copied = sum(op.times * real.copying(op.host) for op in work.operations)
    text = "copies to and from the host run beside the operations of their iteration"
    return copied, copied, [text]


def played(steps: Sequence[Step], speed: Speed, sent: Sequence[float]) -> float:
    """The seconds of a schedule whose operations run one after the other, and whose collectives run
    one after the other beside them, and so do copies between a device and its host. `sent` is how
    long each collective takes.
    """
    now = free = copied = 0.0
    ends: dict[int, float] = {}
    for step in steps:
        match step:
            case Operation():
                if step.host:
                    copied = max(now, copied) + step.times * speed.copying(step.host)
                now += step.times * max(speed.seconds(step))
            case Begin():
                free = ends[step.collective] = max(now, free) + step.share * sent[step.collective]
            case End():
                now = max(now, ends.pop(step.collective, now))
            case Loop():
                now += step.times * played(step.steps, speed, sent)
    return max(now, copied, *ends.values(), 0.0)


def _check_size(axes: Mapping[str, int], machine: Machine) -> None:
    count = math.prod(axes.values())
    # A program for one device runs on one of any machine.
    if count not in (1, machine.count):
        raise ValueError(
            f"the program runs on {count} devices ({in_words(axes)}), and {machine} has "
            f"{machine.count}: pass a machine of the program's size, or compile for the mesh "
            "machine.mesh(...)"
        )

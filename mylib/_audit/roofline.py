"""Estimates how long a program takes, from its operations and a machine's data sheet."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .._measured import Measured
from ..machines import CHIPS, Chip, Machine
from .groups import axis_of, in_words
from .links import Message, stated
from .moments import Begin, End
from .rates import links_of, measured_speed
from .speed import Speed
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
    - `unknown`: how many operations could not be counted, see [`mylib.Work`][].
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
        most = "an unknown time" if math.isinf(high) else _ms(high)
        total = f"{_ms(self.seconds)} a call, between {_ms(low)} and {most}"
        lines = [f"an estimate: {total}, bound by {self.bound_by}"]
        lines += [f"  {name}: {_ms(part)}" for name, part in self.parts.items()]
        if len(self.parts) > 2:
            lines.append(f"  of the communication, not hidden: {_ms(self.exposed)}")
        if self.unknown:
            lines.append(
                f"  unknown: {self.unknown} kernels or loops, which count once or not at all"
            )
        return "\n".join([*lines, *(f"  assuming {text}" for text in self.assumptions)])


def _reached(speed: Speed) -> str:
    shares = (f"{100 * x:.3g}%" for x in (speed.of_products, speed.of_kernels, speed.of_memory))
    products, kernels, memory = shares
    return (
        f"matrix products reach {products} of the data sheet's rate, kernels {kernels}, memory "
        f"{memory}"
    )


def _ms(time: float) -> str:
    return f"{time * 1e3:.3g} ms"


_ONE_AT_A_TIME = (
    "one collective runs at a time, beside the operations that are scheduled before its end"
)


def estimate(
    work: Work,
    sent: Sequence[Message],
    axes: Mapping[str, int],
    machine: Machine,
    measured: Measured | None = None,
) -> Estimate:
    """`sent` are all collectives of the program; `measured` may be another one. The interval
    ignores the order in which things run: at least, one of computation, communication and copies
    hides the others. The estimate goes through the schedule.
    """
    _check_size(axes, machine)
    ideal, real, assumed = speeds(machine.chip, work.flops)
    slowest = _slowest(machine.chip, real)
    if measured is not None:
        slowest = real = measured_speed(measured, ideal, real)
        assumed = [f"rates are those of {measured.name}, as measured; waiting and idle time are 0"]
    assumed += [_reached(real), _ONE_AT_A_TIME]
    times = [(op.times, *real.seconds(op)) for op in work.operations]
    parts = {"compute": sum(n * x for n, x, _ in times), "memory": sum(n * y for n, _, y in times)}
    body = sum(n * max(x, y) for n, x, y in times)
    low = sum(op.times * max(ideal.seconds(op)) for op in work.operations)
    links = links_of(sent, axes, machine, measured)
    assumed += [text for _, text in links]
    over = _over_axes(sent, [each for each, _ in links])
    parts, communication = parts | over, sum(over.values())
    copied, most_copied, about_copies = _copies(work, real)
    parts |= {"host memory": copied} if copied else {}
    assumed += about_copies
    computing = sum(op.times * sum(slowest.seconds(op)) for op in work.operations)
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


def _over_axes(sent: Sequence[Message], seconds: Sequence[float]) -> dict[str, float]:
    """The seconds of all collectives, by the axes that they are over."""
    parts: dict[str, float] = {}
    for message, each in zip(sent, seconds, strict=True):
        part = f"communication over {', '.join(map(axis_of, message.axes))}"
        parts[part] = parts.get(part, 0.0) + each * message.times
    return parts


def _copies(work: Work, real: Speed) -> tuple[float, float, list[str]]:
    """The seconds of copies between the device and its host, those at most, and what is assumed
    about them.
    """
    copied = sum(op.times * real.copying(op) for op in work.operations)
    if copied:
        text = "copies to and from the host run beside the operations of their iteration"
        return copied, copied, [text]
    if any(op.host for op in work.operations):
        text = "copies to and from the host cost nothing, as their rate is not known"
        return 0.0, math.inf, [text]
    return 0.0, 0.0, []


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
                    copied = max(now, copied) + step.times * speed.copying(step)
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


def speeds(chip: Chip, dtypes: Iterable[str]) -> tuple[Speed, Speed, list[str]]:
    """The speed of the data sheet for products of these dtypes, the part of it that is reached, and
    what is assumed. An operation whose rate is unknown costs only what it reads and writes.
    """
    rates: dict[str, float] = {}
    assumed: list[str] = []
    for dtype in dtypes:
        instead, rate = _rate(chip, dtype)
        # Data sheets are of chips, and some chips are two devices.
        rates[dtype] = math.inf if rate is None else rate / chip.devices
        if rate is None:
            assumed.append(f"products of {dtype}, without a rate, cost only their memory")
        elif instead != dtype:
            assumed.append(f"{dtype} is multiplied as {instead}")
    if rates and all(map(math.isinf, rates.values())):
        raise ValueError(f"the data sheet of {chip.name} has no rate for {', '.join(rates)}")
    memory = stated(chip, "memory bandwidth", chip.memory_bandwidth)
    ideal = Speed(rates, memory / chip.devices, _of_host(chip))
    like = CHIPS[_LIKE.get(chip.platform, "h100")]
    missing = [name for name in _SHARES if name not in chip.reached]
    if missing:
        assumed.append(
            f"the shares that {', '.join(missing)} reach on {chip.name} are not known (`reached` "
            f"in mylib.machines.Chip), and are those of {like.name}"
        )
    shares = {f"of_{name}": chip.reached.get(name, like.reached[name]) for name in _SHARES}
    return ideal, ideal._replace(**shares), assumed


def _slowest(chip: Chip, real: Speed) -> Speed:
    """With the lowest share that is known of any chip in the place of one that is not."""
    known = [x.reached for x in CHIPS.values()]
    missing = [name for name in _SHARES if name not in chip.reached]
    return real._replace(**{f"of_{n}": min(x[n] for x in known if n in x) for n in missing})


def _of_host(chip: Chip) -> float:
    return math.inf if chip.host_bandwidth is None else chip.host_bandwidth / chip.devices


_SHARES = "products", "kernels", "memory"
# The chip whose shares stand for unknown ones: the newest with which published steps were compared.
_LIKE = {"tpu": "v6e"}


# The dtype that a chip multiplies instead, if it has no rate for one.
_AS = {
    "float8_e5m2": "float8_e4m3fn",
    "float8_e4m3fn": "bfloat16",
    "int4": "int8",
    "uint8": "int8",
    "int8": "bfloat16",
    "float16": "bfloat16",
}


def _rate(chip: Chip, dtype: str) -> tuple[str, float | None]:
    """The dtype that a chip multiplies instead of this one, and operations per second."""
    while dtype not in chip.flops:
        # JAX's default on TPUs is to multiply float32 as bfloat16.
        instead = "bfloat16" if (chip.platform, dtype) == ("tpu", "float32") else _AS.get(dtype)
        if instead is None:
            return dtype, None
        dtype = instead
    return dtype, chip.flops[dtype]

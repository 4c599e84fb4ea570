"""Estimates how long a program takes, from its operations and a machine's data sheet."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..machines import CHIPS, Chip, Machine
from .groups import axis_of
from .links import Message, seconds, stated
from .moments import Begin, End
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
        `seconds`. The rest of the communication is hidden behind computation.
    - `bound_by`: the part that takes longest.
    - `unknown`: how many operations could not be counted, see [`mylib.Work`][].
    - `assumptions`: the assumptions of the estimate.
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


def _ms(time: float) -> str:
    return f"{time * 1e3:.3g} ms"


class Speed(NamedTuple):
    """What a device does in a second: products by dtype, bytes of its memory, and bytes from and to
    its host's. And the shares of the first two that are reached.
    """

    flops: Mapping[str, float]
    memory: float
    host: float
    of_products: float = 1
    of_kernels: float = 1
    of_memory: float = 1

    def seconds(self, operation: Operation) -> tuple[float, float]:
        """The seconds of the products of an operation, and of its memory traffic."""
        products = sum(n / self.flops[dtype] for dtype, n in operation.flops)
        share = self.of_kernels if operation.is_kernel else self.of_products
        return products / share, operation.bytes / self.memory / self.of_memory

    def copying(self, operation: Operation) -> float:
        """The seconds of an operation's copies between the device and its host."""
        return operation.host / self.host


def estimate(
    work: Work, sent: Sequence[Message], axes: Mapping[str, int], machine: Machine
) -> Estimate:
    """`sent` are all collectives of the program."""
    _check_size(axes, machine)
    ideal, real, assumed = speeds(machine.chip, work.flops)
    assumed += [
        f"matrix products reach {real.of_products:.0%} of the data sheet's rate, kernels "
        f"{real.of_kernels:.0%}, memory {real.of_memory:.0%}",
        "one collective runs at a time, beside the operations that are scheduled before its end",
    ]
    times = [(op.times, *real.seconds(op)) for op in work.operations]
    parts = {"compute": sum(n * x for n, x, _ in times), "memory": sum(n * y for n, _, y in times)}
    body = sum(n * max(x, y) for n, x, y in times)
    low = sum(op.times * max(ideal.seconds(op)) for op in work.operations)
    links = [seconds(message, axes, machine) for message in sent]
    for message, (each, text) in zip(sent, links, strict=True):
        part = f"communication over {', '.join(map(axis_of, message.axes))}"
        parts[part] = parts.get(part, 0.0) + each * message.times
        assumed.append(text)
    communication = sum(parts.values()) - parts["compute"] - parts["memory"]
    copied = sum(op.times * real.copying(op) for op in work.operations)
    unknown = any(op.host for op in work.operations) and math.isinf(real.host)
    if unknown:
        assumed.append("copies to and from the host cost nothing, as their rate is not known")
    elif copied:
        parts["host memory"] = copied
        assumed.append("copies to and from the host run beside the operations of their iteration")
    slowest = _slowest(machine.chip, real)
    most = sum(op.times * sum(slowest.seconds(op)) for op in work.operations)
    most += communication + copied
    low = max(low, communication, copied)
    total = played(work.schedule, real, [each for each, _ in links])
    return Estimate(
        seconds=total,
        interval=(min(total, low), math.inf if work.unknown or unknown else most),
        parts=parts,
        exposed=max(0.0, total - body),
        bound_by=max(parts, key=lambda name: parts[name]),
        unknown=work.unknown,
        assumptions=tuple(dict.fromkeys(assumed)),
    )


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
    if count not in (1, machine.count):
        mesh = ", ".join(f"{name}={size}" for name, size in axes.items())
        raise ValueError(
            f"the program runs on {count} devices ({mesh}), and {machine} has {machine.count}: "
            "pass a machine of the program's size, or compile for the mesh machine.mesh(...)"
        )


def speeds(chip: Chip, dtypes: Iterable[str]) -> tuple[Speed, Speed, list[str]]:
    """The speed of the data sheet for products of these dtypes, the part of it that is reached, and
    what is assumed. An operation whose rate is unknown costs only what it reads and writes.
    """
    rates: dict[str, float] = {}
    assumed: list[str] = []
    for dtype in dtypes:
        instead, rate = _rate(chip, dtype)
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
    shares = (chip.reached.get(name, like.reached[name]) for name in _SHARES)
    return ideal, Speed(*ideal[:3], *shares), assumed


def _slowest(chip: Chip, real: Speed) -> Speed:
    """With the lowest share that is known of any chip in the place of one that is not."""
    known = [x.reached for x in CHIPS.values()]
    lowest = {name: min(x[name] for x in known if name in x) for name in _SHARES}
    given = (real.of_products, real.of_kernels, real.of_memory)
    shares = (
        share if name in chip.reached else lowest[name]
        for name, share in zip(_SHARES, given, strict=True)
    )
    return Speed(*real[:3], *shares)


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

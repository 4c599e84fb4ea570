"""Estimates how long a program takes, from its operations and a machine's data sheet."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..machines import Chip, Machine
from .links import Message, seconds
from .work import Work

# The shares of the data sheet's rates that matrix products, and everything that is bound by memory,
# reach in training steps whose times are published.
_PRODUCTS = {"gpu": 0.55, "tpu": 0.95}
_MEMORY = 0.7


@dataclass(frozen=True, repr=False)
class Estimate:
    """An estimate of the time of a call.

    **Attributes:**

    - `seconds`: the time of a call.
    - `interval`: the seconds of a call at least and at most. At least: each operation reaches the
        data sheet's rates, and all communication is hidden behind computation. At most: none is
        hidden, and each operation first moves its data and then computes; infinite if something
        is unknown.
    - `parts`: the seconds of each part: `"compute"`, `"memory"`, and `"communication over ..."` the
        mesh axes.
    - `bound_by`: the part that takes longest.
    - `unknown`: how many operations could not be counted, see [`mylib.Work`][].
    - `assumptions`: the assumptions of the estimate.
    """

    seconds: float
    interval: tuple[float, float]
    parts: Mapping[str, float]
    bound_by: str
    unknown: int
    assumptions: tuple[str, ...]

    def __repr__(self) -> str:
        low, high = self.interval
        most = "an unknown time" if math.isinf(high) else _ms(high)
        total = f"{_ms(self.seconds)} a call, between {_ms(low)} and {most}"
        lines = [f"an estimate: {total}, bound by {self.bound_by}"]
        lines += [f"  {name}: {_ms(part)}" for name, part in self.parts.items()]
        if self.unknown:
            lines.append(
                f"  unknown: {self.unknown} kernels or loops, which count once or not at all"
            )
        return "\n".join([*lines, *(f"  assuming {text}" for text in self.assumptions)])


def _ms(time: float) -> str:
    return f"{time * 1e3:.3g} ms"


def estimate(
    work: Work, sent: Sequence[Message], axes: Mapping[str, int], machine: Machine
) -> Estimate:
    """`sent` are all collectives of the program."""
    _check_size(axes, machine)
    chip = machine.chip
    rates, assumed = _rates(chip, work)
    if chip.memory_bandwidth is None:
        raise ValueError(f"the data sheet of {chip.name} has no memory bandwidth")
    memory_rate = chip.memory_bandwidth / chip.devices
    reached = _PRODUCTS.get(chip.platform, 0.55)
    compute = memory = body = low = 0.0
    for times, flops, size in work.operations:
        products = sum(n / rates[dtype] for dtype, n in flops)
        moved = size / memory_rate
        low += times * max(products, moved)
        compute += times * products / reached
        memory += times * moved / _MEMORY
        body += times * max(products / reached, moved / _MEMORY)
    parts = {"compute": compute, "memory": memory}
    assumed += [
        f"matrix products reach {reached:.0%} of the data sheet's rate, memory {_MEMORY:.0%}",
        "overlapped communication costs only what is longer than the computation",
    ]
    hidden = exposed = 0.0
    for one in sent:
        each, text = seconds(one, axes, machine)
        part = f"communication over {', '.join(map(_axis, one.axes))}"
        parts[part] = parts.get(part, 0.0) + each * one.times
        if one.overlapped:
            hidden += each * one.times
        else:
            exposed += each * one.times
        assumed.append(text)
    total = max(body, hidden) + exposed
    most = math.inf if work.unknown else compute + memory + hidden + exposed
    interval = min(total, max(low, hidden + exposed)), most
    bound = max(parts, key=lambda name: parts[name])
    return Estimate(total, interval, parts, bound, work.unknown, tuple(dict.fromkeys(assumed)))


def _axis(name: str) -> str:
    return name.lstrip("~").split(":")[0]


def _check_size(axes: Mapping[str, int], machine: Machine) -> None:
    count = math.prod(axes.values())
    if count not in (1, machine.count):
        mesh = ", ".join(f"{name}={size}" for name, size in axes.items())
        raise ValueError(
            f"the program runs on {count} devices ({mesh}), and {machine} has {machine.count}: "
            "pass a machine of the program's size, or compile for the mesh machine.mesh(...)"
        )


def _rates(chip: Chip, work: Work) -> tuple[dict[str, float], list[str]]:
    """Operations per second of a device by dtype, and what is assumed about them. An operation
    whose rate is unknown costs only what it reads and writes.
    """
    rates: dict[str, float] = {}
    assumed: list[str] = []
    for dtype in work.flops:
        instead, rate = _rate(chip, dtype)
        rates[dtype] = math.inf if rate is None else rate / chip.devices
        if rate is None:
            assumed.append(f"products of {dtype}, without a rate, cost only their memory")
        elif instead != dtype:
            assumed.append(f"{dtype} is multiplied as {instead}")
    if rates and all(map(math.isinf, rates.values())):
        raise ValueError(f"the data sheet of {chip.name} has no rate for {', '.join(rates)}")
    return rates, assumed


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

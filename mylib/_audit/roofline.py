"""Estimates how long a program takes, from its operations and a machine's data sheet."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..machines import Chip, Machine
from .work import Work


@dataclass(frozen=True, repr=False)
class Estimate:
    """An estimate of the time of a call, by peak rates that no program reaches.

    **Attributes:**

    - `seconds`: the time of a call.
    - `parts`: the seconds of each part: `"compute"`, `"memory"`, and `"communication over ..."` the
        mesh axes.
    - `bound_by`: the part that takes longest, of those that can't be hidden.
    - `assumptions`: the assumptions of the estimate.
    """

    seconds: float
    parts: Mapping[str, float]
    bound_by: str
    assumptions: tuple[str, ...]

    def __repr__(self) -> str:
        share = self.parts[self.bound_by] / self.seconds if self.seconds else 0
        total = f"{self.seconds * 1e3:.3g} ms a call"
        lines = [f"an estimate: {total}, bound by {self.bound_by}: {share:.0%}"]
        lines += [f"  {name}: {part * 1e3:.3g} ms" for name, part in self.parts.items()]
        return "\n".join([*lines, *(f"  assuming {text}" for text in self.assumptions)])


def estimate(
    work: Work,
    sent: Mapping[tuple[tuple[str, ...], bool], int],
    axes: Mapping[str, int],
    machine: Machine,
) -> Estimate:
    """`sent` are the bytes that a device sends over these axes, by whether that is overlapped."""
    chip = machine.chip
    parts: dict[str, float] = {}
    assumed = ["peak rates", "each operation reads its operands from memory and writes its result"]
    compute = 0.0
    unrated: list[str] = []
    for dtype, count in work.flops.items():
        as_, rate = _rate(chip, dtype)
        if rate is None:
            unrated.append(dtype)
            continue
        if as_ != dtype:
            assumed.append(f"{dtype} is multiplied as {as_}")
        compute += count / rate * chip.devices
    if unrated and not compute:
        raise ValueError(f"the data sheet of {chip.name} has no rate for {', '.join(unrated)}")
    if unrated:
        assumed.append(f"products of {', '.join(unrated)}, without a rate, cost only their memory")
    parts["compute"] = compute
    if chip.memory_bandwidth is None:
        raise ValueError(f"the data sheet of {chip.name} has no memory bandwidth")
    parts["memory"] = work.traffic / chip.memory_bandwidth * chip.devices
    hidden = 0.0
    for (names, overlapped), size in sorted(sent.items()):
        rate, text = _bandwidth(machine, names, axes)
        part = f"communication over {', '.join(names)}"
        parts[part] = parts.get(part, 0.0) + size / rate
        hidden += size / rate if overlapped else 0.0
        assumed.append(text)
    if work.unknown:
        assumed.append(f"that {work.unknown} kernels or loops of unknown length cost nothing more")
    communication = sum(t for name, t in parts.items() if name.startswith("communication"))
    body = max(parts["compute"], parts["memory"])
    assumed.append("overlapped communication costs only what is longer than the computation")
    seconds = max(body, hidden) + communication - hidden
    bound = max(parts, key=lambda name: parts[name])
    return Estimate(seconds, parts, bound, tuple(dict.fromkeys(assumed)))


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


def _bandwidth(
    machine: Machine, names: tuple[str, ...], axes: Mapping[str, int]
) -> tuple[float, str]:
    """Bytes a second over some mesh axes, and the assumption behind it."""
    chip = machine.chip
    over = ", ".join(names)
    if chip.platform == "tpu":
        if chip.link_bandwidth is None:
            raise ValueError(f"the data sheet of {chip.name} has no link bandwidth")
        return 2 * chip.link_bandwidth, f"{over} is a ring of links, used in both directions"
    stride, reach = 1, 0
    for name in reversed(list(axes)):
        reach += stride * (axes[name] - 1) if name in names else 0
        stride *= axes[name]
    if reach < chip.host and chip.links and chip.link_bandwidth:
        return chip.links * chip.link_bandwidth, f"{over} is within a host, over all its links"
    if chip.network_bandwidth is None:
        raise ValueError(f"the data sheet of {chip.name} has no network bandwidth")
    return chip.network_bandwidth, f"{over} crosses hosts, over the network"

"""Estimates how long a program takes, from its operations and a machine's data sheet."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ..machines import Machine
from .flow import runs_of, target_of
from .hlo import Instruction, Module

# Operations that read their operands from memory and write their results there.
_FREE = frozenset(
    {
        "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional",
        "call", "after-all", "optimization-barrier", "partition-id", "replica-id",
    }
)  # fmt: skip
_NAMES = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16", "s8": "int8"}


@dataclass(frozen=True)
class Work:
    """The operations and the memory traffic of one device in a call.

    **Attributes:**

    - `flops`: of matrix products and convolutions, by dtype. Everything else is bound by memory.
    - `traffic`: bytes read and written, if each operation reads its operands and writes its result.
    - `unknown`: how many operations could not be counted: custom kernels, and loops whose length
        depends on data, which count as one step.
    """

    flops: Mapping[str, int]
    traffic: int
    unknown: int


def work_of(module: Module) -> Work:
    flops: Counter[str] = Counter()
    traffic = unknown = 0
    for name, runs in runs_of(module).items():
        times = sum(1 if run.times is None else run.times for run in runs)
        computation = module.computations[name]
        fused = any(caller.opcode.startswith("fusion") for caller in computation.callers)
        unknown += sum(run.times is None for run in runs)
        for x in computation.instructions:
            products = _products(x)
            if products:
                flops[_NAMES.get(x.arrays[0].dtype, "float32")] += times * 2 * products
            elif x.opcode == "custom-call" and target_of(x) in (
                "tpu_custom_call",
                "__gpu$xla.gpu.triton",
            ):
                unknown += 1
            if not fused and x.opcode not in _FREE and not x.opcode.endswith("-done"):
                moved = sum(array.bytes for y in x.inputs() for array in y.arrays)
                traffic += times * (moved + x.bytes)
    return Work(dict(flops), traffic, unknown)


def _products(x: Instruction) -> int:
    """The number of pairs that are multiplied and added."""
    if x.opcode == "dot":
        dims = re.findall(r"\d+", x.attribute("lhs_contracting_dims") or "")
        shape = x.operand(0).arrays[0].shape
        size = x.arrays[0].size
        for dim in dims:
            size *= shape[int(dim)]
        return size
    if x.opcode == "convolution":
        labels = x.attribute("dim_labels") or ""
        kernel = labels.split("_")[1].split("->")[0] if "_" in labels else ""
        size = x.arrays[0].size
        for label, n in zip(kernel, x.operand(1).arrays[0].shape, strict=True):
            size *= 1 if label == "o" else n
        return size
    if x.opcode == "custom-call" and "gemm" in target_of(x):
        match = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', x.attributes)
        size = x.arrays[0].size
        for dim in re.findall(r"\d+", match[1] if match else ""):
            size *= x.operand(0).arrays[0].shape[int(dim)]
        return size
    return 0


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
    for dtype, count in work.flops.items():
        rate = chip.flops.get(dtype)
        if rate is None and chip.platform == "tpu" and dtype == "float32":
            rate = chip.flops.get("bfloat16")
            assumed.append("float32 is multiplied as bfloat16, JAX's default on TPUs")
        if rate is None:
            raise ValueError(f"the data sheet of {chip.name} has no rate for {dtype}")
        compute += count / rate * chip.devices
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

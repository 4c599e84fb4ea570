"""Training steps whose times are published, with what is known of their programs.

- MaxText publishes TFLOP/s (README.md in src/maxtext/configs/gpu/a3/llama_2_7b and
  src/maxtext/configs/tpu/v4, v5e, v5p, with a script for each row), which count full attention; for
  v6e seconds (AI-Hypercomputer/tpu-recipes, training/trillium). 70B on 32 v6e is left out: it keeps
  its weights in bfloat16. Llama 2 70B on 256 v6e has 3 sequences a chip in its configuration, but 2
  in its log.
- TorchTitan publishes tokens a second of H100s with 96 GB, 2.4 TB/s and a limit of 500 W
  (benchmarks/llama3_h100_202412_torchtitan.md and asyncTP_llama3_h100_2025-06_torchtitan.md), and
  before that of 405B on 128 of them, and of A100s (docs/performance.md).
- NVIDIA publishes seconds of MaxText (NVIDIA/dgxc-benchmarking, maxtext, version 25.04).
- IBM and PyTorch publish tokens a second of 128 A100s, whose hosts have a network of 400 Gb/s
  (foundation-model-stack/fms-fsdp, README.md; pytorch.org/blog/maximizing-training).

Of the compilers' options only those of MaxText on GPUs are set, and one for PyTorch's FSDP.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from training_step import DOTS, QUERIES, Size, Work

from mylib import machines
from mylib.machines import CHIPS, Chip, Machine

LLAMA2_7B = Size(32, 4096, 32, 32, 11008)
LLAMA2_13B = Size(40, 5120, 40, 40, 13824)
LLAMA_34B = Size(48, 8192, 64, 8, 22016)
LLAMA2_70B = Size(80, 8192, 64, 8, 28672)
LLAMA3_8B = Size(32, 4096, 32, 8, 14336, vocab=128256)
LLAMA3_70B = Size(80, 8192, 64, 8, 28672, vocab=128256)
LLAMA3_405B = Size(126, 16384, 128, 8, 53248, vocab=128256)
MISTRAL_7B = Size(32, 4096, 32, 8, 14336)
# MaxText's `global_parameter_scale`.
SCALED = {
    "16B": Size(32, 4096, 64, 64, 28672),
    "32B": Size(32, 8192, 64, 64, 28672),
    "64B": Size(64, 8192, 64, 64, 28672),
    "128B": Size(64, 8192, 128, 128, 57344),
    "256B": Size(64, 16384, 128, 128, 57344),
    "512B": Size(128, 16384, 128, 128, 57344),
    "1024B": Size(128, 16384, 256, 256, 114688),
}
# What TorchTitan saves with "selective" activation checkpointing: attention, and every second
# product.
INPUT = "decoder_layer_input"
SAVED = (*DOTS, "context")
SELECTIVE = "query_proj", "value_proj", "mlpwi_0", "mlpwo", "context"
# a3-highgpu-8g has four network cards of 200 Gb/s for eight GPUs.
A3 = replace(CHIPS["h100"], network_bandwidth=12.5e9)
A100 = CHIPS["a100-80gb"]
IBM = replace(A100, network_bandwidth=400e9 / 8 / 8)
# TorchTitan's note says that their peak is between those of H100 SXM and NVL, 989 and 835 TFLOP/s.
OF_500_WATTS = replace(
    CHIPS["h100"],
    memory=96 * 10**9,
    memory_bandwidth=2.4e12,
    flops={dtype: rate * 912 / 989.5 for dtype, rate in CHIPS["h100"].flops.items()},
)


class Row(NamedTuple):
    """One step. `seconds` are the published ones. The constants of the estimate may be fitted to
    rows that are not `held_out`. A row that isn't `judged` has a part that wasn't published, or
    that this library can't do.
    """

    name: str
    machine: Machine
    size: Size
    axes: Mapping[str, int]
    work: Work
    seconds: float
    held_out: bool = False
    judged: bool = True
    options: Mapping[str, object] = {}


def counted(size: Size, work: Work) -> float:
    """The operations that MaxText counts for one device's step."""
    layer = size.width * HEADS * (2 * size.heads + 2 * size.kv_heads)
    layer += 3 * size.width * size.hidden
    products = size.depth * layer + size.width * size.vocab
    attention = 2 * size.depth * work.time * size.heads * HEADS
    return 6 * (products + attention) * work.sequences * work.time


HEADS = 128
# FSDP in PyTorch gathers the next layer's weights while a layer runs. XLA starts one gather at a
# time, unless it may start several.
_AHEAD = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
}
_ON_GPU = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_all_gather_combine_threshold_bytes": 134217728,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 134217728,
    "xla_gpu_all_reduce_combine_threshold_bytes": 1073741824,
    "xla_gpu_enable_while_loop_double_buffering": True,
}


def on_a3(hosts: int, teraflops: float, held_out: bool) -> Row:
    work = Work(4, 4096, saved=(*DOTS, "context"), scan=False)
    axes = {"data": hosts, "fsdp": 8} if hosts > 1 else {"fsdp": 8}
    machine = machines.gpu(A3, hosts=hosts)
    seconds = counted(LLAMA2_7B, work) / (teraflops * 1e12)
    name = f"7B, {8 * hosts} H100"
    return Row(name, machine, LLAMA2_7B, axes, work, seconds, held_out, options=_ON_GPU)


# Layers in a list: in a scan, XLA would sum gradients over hosts after the last layer only.
HSDP = Work(1, 4096, SAVED, scan=False)


def on_dgx() -> Row:
    """NVIDIA's MaxText on its own H100s of 700 W, with a network of 400 Gb/s for each GPU."""
    work = Work(2, 8192, saved=QUERIES[:3])
    options = _ON_GPU | {
        "xla_gpu_all_gather_combine_threshold_bytes": 2**31,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**25,
        "xla_gpu_all_reduce_combine_threshold_bytes": 2**31,
        "xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON",
    }
    machine = machines.gpu("h100", hosts=16)
    return Row("Llama 3 70B, 128 H100", machine, LLAMA3_70B, {"fsdp": 128}, work, 15.563, True,
               options=options)  # fmt: skip


def titan(
    name: str, hosts: int, size: Size, tensor: int, work: Work, rate: float, held_out: bool
) -> Row:
    axes = {"fsdp": 8 * hosts // tensor} | ({"tensor": tensor} if tensor > 1 else {})
    machine = machines.gpu(OF_500_WATTS, hosts=hosts)
    seconds = work.sequences * work.time / rate
    title = f"{name}, {machine.count} H100"
    return Row(title, machine, size, axes, work, seconds, held_out, options=_AHEAD)


def on_a100(
    name: str, chip: Chip, hosts: int, size: Size, fsdp: int, work: Work, rate: float,
    held_out: bool,
) -> Row:  # fmt: skip
    machine = machines.gpu(chip, hosts=hosts)
    axes = {"data": machine.count // fsdp} if fsdp < machine.count else {}
    axes["fsdp"] = fsdp
    seconds = work.sequences * work.time / rate
    title = f"{name}, {machine.count} A100"
    return Row(title, machine, size, axes, work, seconds, held_out, options=_AHEAD)


def scaled(
    name: str, chip: str, shape: tuple[int, ...], tensor: int, work: Work, teraflops: float,
    held_out: bool, judged: bool = True,
) -> Row:  # fmt: skip
    machine = machines.tpu(chip, shape)
    axes = {"fsdp": machine.count // tensor} | ({"tensor": tensor} if tensor > 1 else {})
    size = SCALED[name]
    seconds = counted(size, work) / (teraflops * 1e12)
    title = f"{name}, {machine.count} {chip}"
    return Row(title, machine, size, axes, work, seconds, held_out, judged)


def on_v6e(
    name: str, size: Size, shape: tuple[int, int], offloaded: tuple[str, ...], sequences: int,
    time: int, seconds: float, held: bool,
) -> Row:  # fmt: skip
    machine = machines.tpu("v6e", shape)
    work = Work(sequences, time, offloaded=offloaded, loss_blocks=8)
    axes = {"fsdp": machine.count}
    return Row(f"{name}, {machine.count} v6e", machine, size, axes, work, seconds, held)


def llama3(name: str, shape: tuple[int, int], sequences: int, seconds: float, held: bool) -> Row:
    size, queries = (LLAMA3_8B, QUERIES) if name == "8B" else (LLAMA3_70B, QUERIES[:3])
    return on_v6e(name, size, shape, (INPUT, *queries), sequences, 8192, seconds, held)


def v4(depth: int, width: int, heads: int, sequences: int, shape: tuple[int, ...], name: str,
       teraflops: float, held_out: bool) -> Row:  # fmt: skip
    size = Size(depth, width, heads, heads, 4 * width)
    work = Work(sequences, 2048, loss_blocks=8)
    machine = machines.tpu("v4", shape)
    seconds = counted(size, work) / (teraflops * 1e12)
    title = f"{name}, {machine.count} v4"
    return Row(title, machine, size, {"fsdp": machine.count}, work, seconds, held_out)


def full(sequences: int, time: int = 2048) -> Work:
    return Work(sequences, time)


def minimal(sequences: int) -> Work:
    return Work(sequences, 2048, saved=DOTS)


# Of each list every second row is held out: decided before any constant was fitted.
ROWS = (
    on_a3(1, 492, False),
    on_a3(2, 422, True),
    on_a3(4, 407, False),
    on_a3(8, 409, True),
    on_a3(16, 375, False),
    titan("8B", 1, LLAMA3_8B, 1, Work(2, 8192, SELECTIVE, looked_up=True), 6667, False),
    titan("8B", 16, LLAMA3_8B, 1, Work(2, 8192, SELECTIVE, looked_up=True), 6514, True),
    titan("8B TP 8", 8, LLAMA3_8B, 8, Work(1.5, 8192, SELECTIVE, looked_up=True), 4378, False),
    titan("70B TP 8", 32, LLAMA3_70B, 8, Work(2, 8192, looked_up=True), 597.3, True),
    titan("405B TP 8", 16, LLAMA3_405B, 8, Work(0.25, 8192, looked_up=True), 109, True),
    on_dgx(),
    on_a100("8B", A100, 8, LLAMA3_8B, 64, Work(1, 8192, SELECTIVE, looked_up=True), 2973, False),
    on_a100("70B", A100, 8, LLAMA3_70B, 64, full(1, 8192), 331, True),
    on_a100("7B", IBM, 16, LLAMA2_7B, 8, HSDP._replace(sequences=2), 3760, False),
    on_a100("13B", IBM, 16, LLAMA2_13B, 8, HSDP, 1700, True),
    on_a100("34B", IBM, 16, LLAMA_34B, 128, full(8, 4096), 772, False),
    on_a100("Llama 2 70B", IBM, 16, LLAMA2_70B, 128, full(6, 4096), 380, True),
    scaled("16B", "v5e", (16, 16), 1, full(6), 120, False),
    scaled("32B", "v5e", (16, 16), 1, full(4), 132, True),
    scaled("64B", "v5e", (16, 16), 1, full(2), 118, False),
    scaled("128B", "v5e", (16, 16), 16, Work(1, 2048, offloaded=QUERIES[:3]), 110, True),
    scaled("32B", "v5p", (4, 4, 4), 4, minimal(6), 328, False),
    scaled("64B", "v5p", (4, 4, 4), 4, minimal(3), 323, True),
    scaled("128B", "v5p", (4, 4, 8), 8, minimal(1), 315, False),
    scaled("128B", "v5p", (4, 8, 8), 8, minimal(1), 316, True),
    scaled("256B", "v5p", (8, 8, 8), 8, minimal(1), 308, False),
    scaled("512B", "v5p", (8, 8, 8), 8, full(2), 294, True),
    scaled("1024B", "v5p", (8, 8, 16), 16, full(2), 254, False),
    scaled("1024B", "v5p", (8, 16, 16), 16, full(2), 297, True),
    llama3("8B", (2, 4), 3, 3.443, False),
    llama3("8B", (4, 4), 3, 3.393, True),
    llama3("8B", (4, 8), 3, 3.495, False),
    llama3("8B", (8, 8), 5, 5.652, True),
    llama3("8B", (8, 16), 4, 4.602, False),
    llama3("8B", (16, 16), 4, 4.546, True),
    llama3("70B", (8, 8), 2, 18.688, True),
    llama3("70B", (8, 16), 4, 34.786, False),
    llama3("70B", (16, 16), 5, 42.656, True),
    on_v6e("Mistral 7B", MISTRAL_7B, (2, 4), (INPUT, *QUERIES), 6, 8192, 6.320, True),
    on_v6e("Llama 2 70B", LLAMA2_70B, (16, 16), QUERIES[:3], 2, 4096, 9.052, True),
    v4(48, 6144, 24, 13, (4, 4, 4), "22B", 156, False),
    v4(32, 12288, 32, 7, (4, 4, 12), "52B", 154, True),
)  # fmt: skip

# What ranks strategies: a 7B on 64 H100 as MaxText runs it, and its 32B on 64 v5p without tensor
# parallelism. Data parallelism doesn't fit; it is there for its time.
ORDER = (
    *(
        Row(
            f"7B, {name}",
            machines.gpu("h100", hosts=8),
            LLAMA2_7B,
            axes,
            ROWS[0].work._replace(scan=True),
            0.0,
        )
        for name, axes in (
            ("FSDP 64", {"fsdp": 64}),
            ("HSDP 8 x 8", {"data": 8, "fsdp": 8}),
            ("data parallel 64", {"data": 64}),
            ("FSDP 8 x TP 8", {"fsdp": 8, "tensor": 8}),
        )
    ),
    *(
        Row(f"32B, {name}", machines.tpu("v5p", (4, 4, 4)), SCALED["32B"], axes, minimal(6), 0.0)
        for name, axes in (
            ("FSDP 64", {"fsdp": 64}),
            ("FSDP 16 x TP 4", {"fsdp": 16, "tensor": 4}),
        )
    ),
)

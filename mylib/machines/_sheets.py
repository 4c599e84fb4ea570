"""The data sheet of each chip, with the sources of its figures."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

GiB = 2**30


@dataclass(frozen=True)
class Chip:
    """The data sheet of one GPU or TPU. Write your own for a chip that [`mylib.machines.CHIPS`][]
    doesn't have.

    **Attributes:**

    - `name`: the name that `gpu` and `tpu` take. For a TPU it is the compiler's own name.
    - `platform`: `"gpu"`, `"tpu"` or `"cpu"`.
    - `memory`: the bytes of the chip's memory that a program can use.
    - `flops`: the peak number of dense operations per second, by the name of the dtype.
    - `memory_bandwidth`: bytes per second between the chip and its memory.
    - `links`, `link_bandwidth`: the number of direct links to other chips (NVLink, or a TPU's ICI),
        and the bytes per second of each in one direction.
    - `network_bandwidth`: bytes per second of the network in one direction, for each chip: to other
        hosts for GPUs, to other slices for TPUs.
    - `devices`: the number of JAX devices per chip: 2 for TPUs whose cores are separate.
    - `host`: the number of chips per host.
    - `largest`: for TPUs, the shape of the largest slice.
    - `wraps`: for TPUs, in which directions a slice is a ring: those whose number of chips is a
        multiple of this. In three directions, either all of them are rings or none.
    - `target`: for GPUs, the description that XLA's compiler needs: a `GpuTargetConfigProto` as
        text.
    - `kinds`: the values of `device.device_kind` for this chip.
    - `sources`: the sources of the figures, by the name of the attribute.

    Unknown figures are None, or missing in `flops`.
    """

    name: str
    platform: str
    memory: int | None = None
    flops: Mapping[str, float] = field(default_factory=dict, hash=False)
    memory_bandwidth: float | None = None
    links: int | None = None
    link_bandwidth: float | None = None
    network_bandwidth: float | None = None
    devices: int = 1
    host: int = 8
    largest: tuple[int, ...] | None = None
    wraps: int | None = None
    target: str | None = field(default=None, repr=False)
    kinds: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, repr=False)


_XLA = "https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs"
_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
_DGX = "https://docs.nvidia.com/dgx/"
_TPU = "https://docs.cloud.google.com/tpu/docs/"
_SCALING_BOOK = "https://jax-ml.github.io/scaling-book/tpus/"

_AMPERE = {
    "float64": 19.5e12,
    "float32": 156e12,
    "float16": 312e12,
    "bfloat16": 312e12,
    "int8": 624e12,
}
_HOPPER = {
    "float64": 67e12,
    "float32": 494.5e12,
    "float16": 989.5e12,
    "bfloat16": 989.5e12,
    "float8_e4m3fn": 1979e12,
    "int8": 1979e12,
}
_BLACKWELL = {
    "float64": 37e12,
    "float32": 1125e12,
    "float16": 2250e12,
    "bfloat16": 2250e12,
    "float8_e4m3fn": 4500e12,
    "int8": 4500e12,
    "float4_e2m1fn": 9000e12,
}


def _gpu(
    name: str,
    kind: str,
    memory: int,
    memory_bandwidth: float,
    flops: dict[str, float],
    links: tuple[int, float],
    network: float,
    sheets: tuple[str, str],
    *,
    capability: int,
    cores: int,
    fpus: int,
    shared: int,
    cache: int,
    clock: float,
) -> Chip:
    # Instructions that exist on one generation only, such as Hopper's matrix multiplication.
    accelerated = "feature_extension: ACCELERATED_FEATURES" if capability > 8 else ""
    target = f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {capability} {accelerated} }}
  core_count: {cores}
  fpus_per_core: {fpus}
  clock_rate_ghz: {clock}
  device_memory_size: {memory}
  memory_bandwidth: {int(memory_bandwidth)}
  l2_cache_size: {cache}
  shared_memory_per_core: {shared}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {shared - 1024}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_core_limit: 2048
  threads_per_block_limit: 1024
  threads_per_warp: 32
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{kind}"
"""
    sources = dict.fromkeys(("memory", "memory_bandwidth", "target"), _XLA)
    sources |= dict.fromkeys(("flops", "links", "link_bandwidth"), sheets[0])
    return Chip(
        name,
        "gpu",
        memory,
        MappingProxyType(flops),
        memory_bandwidth,
        *links,
        network,
        target=target,
        kinds=(kind,),
        sources=MappingProxyType(sources | {"network_bandwidth": sheets[1]}),
    )


def _a100(name: str, kind: str, memory: int, bandwidth: float) -> Chip:
    return _gpu(
        name,
        kind,
        memory,
        bandwidth,
        _AMPERE,
        (12, 25e9),
        25e9,
        (
            _NVIDIA + "a100/",
            _DGX + "dgxa100-user-guide",
        ),
        capability=8,
        cores=108,
        fpus=64,
        shared=167936,
        cache=41943040,
        clock=1.41,
    )


def _hopper(name: str, kind: str, memory: int, bandwidth: float, sheet: str) -> Chip:
    return _gpu(
        name,
        kind,
        memory,
        bandwidth,
        _HOPPER,
        (18, 25e9),
        50e9,
        (_NVIDIA + sheet, _DGX + "dgxh100-user-guide"),
        capability=9,
        cores=132,
        fpus=128,
        shared=233472,
        cache=52428800,
        clock=1.98,
    )


def _tpu(
    name: str,
    memory: float,
    flops: dict[str, float],
    bandwidth: float,
    links: int,
    link: float,
    network: float,
    largest: tuple[int, ...],
    kinds: tuple[str, ...],
    devices: int = 1,
    in_scaling_book: tuple[str, ...] = (),
) -> Chip:
    figures = "flops", "memory_bandwidth", "links", "link_bandwidth", "network_bandwidth", "largest"
    return Chip(
        name,
        "tpu",
        int(memory * GiB),
        MappingProxyType(flops),
        bandwidth,
        links,
        link,
        network,
        devices=devices,
        # The compiler's own unit, which it has programs for.
        host=4,
        largest=largest,
        # A cube of 4 x 4 x 4, whose faces are optical; or the whole of the largest slice.
        wraps=4 if len(largest) == 3 else largest[0],
        kinds=kinds,
        sources=MappingProxyType(
            dict.fromkeys(figures, _TPU + name)
            | dict.fromkeys(in_scaling_book, _SCALING_BOOK)
            | {"memory": "what the TPU compiler says a program has, when one doesn't fit"}
        ),
    )


_SHEETS = (
    _a100("a100-40gb", "NVIDIA A100-SXM4-40GB", 42_331_013_120, 1555.2e9),
    _a100("a100-80gb", "NVIDIA A100-SXM4-80GB", 85_100_068_864, 2039.04e9),
    _hopper(
        "h100",
        "NVIDIA H100 80GB HBM3",
        84_942_979_072,
        3352.32e9,
        "h100/",
    ),
    _hopper(
        "h200",
        "NVIDIA H200",
        151_397_597_184,
        4800e9,
        "h200/",
    ),
    _gpu(
        "b200",
        "NVIDIA B200",
        191_514_411_008,
        7672.32e9,
        _BLACKWELL,
        (18, 50e9),
        50e9,
        (_NVIDIA + "hgx/", _DGX + "dgxb200-user-guide"),
        capability=10,
        cores=148,
        fpus=128,
        shared=233472,
        cache=132644864,
        clock=1.965,
    ),
    _tpu(
        "v4",
        30.75,
        {"bfloat16": 275e12, "int8": 275e12},
        1200e9,
        6,
        45e9,
        6.25e9,
        (12, 16, 16),
        ("TPU v4",),
        in_scaling_book=("link_bandwidth", "network_bandwidth"),
    ),
    _tpu(
        "v5e",
        15.75,
        {"bfloat16": 197e12, "int8": 393e12},
        819e9,
        4,
        50e9,
        3.125e9,
        (16, 16),
        ("TPU v5 lite", "TPU v5e"),
    ),
    _tpu(
        "v5p",
        95.73,
        {"bfloat16": 459e12, "int8": 918e12},
        2765e9,
        6,
        100e9,
        6.25e9,
        (16, 16, 24),
        ("TPU v5", "TPU v5p"),
        in_scaling_book=("flops",),
    ),
    _tpu(
        "v6e",
        31.24,
        {"bfloat16": 918e12, "int8": 1836e12},
        1638e9,
        4,
        100e9,
        12.5e9,
        (16, 16),
        ("TPU v6 lite", "TPU v6e"),
    ),
    _tpu(
        "tpu7x",
        189.48,
        {"bfloat16": 2307e12, "float8_e4m3fn": 4614e12},
        7380e9,
        6,
        100e9,
        12.5e9,
        (16, 16, 36),
        ("TPU7x",),
        2,
    ),
)

CHIPS: Mapping[str, Chip] = MappingProxyType({chip.name: chip for chip in _SHEETS})
"""The data sheets of the chips that [`mylib.machines.gpu`][] and [`mylib.machines.tpu`][] know by
name.
"""

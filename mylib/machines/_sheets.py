"""The data sheet of each chip."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

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


def _chip(name: str, sheet: dict[str, Any]) -> Chip:
    """A chip by its entry in the file."""
    del sheet["sources"]
    kind, memory, bandwidth = sheet["kinds"][0], sheet["memory"], sheet["memory_bandwidth"]
    if "target" in sheet:
        sheet["target"] = _target(kind, memory, bandwidth, **sheet["target"])
    sheet |= {"flops": MappingProxyType(sheet["flops"]), "kinds": tuple(sheet["kinds"])}
    if "largest" in sheet:
        sheet["largest"] = tuple(sheet["largest"])
    return Chip(name, **sheet)


def _target(
    kind: str,
    memory: int,
    bandwidth: float,
    *,
    capability: int,
    cores: int,
    fpus: int,
    shared: int,
    cache: int,
    clock: float,
) -> str:
    # Instructions that exist on one generation only, such as Hopper's matrix multiplication.
    accelerated = "feature_extension: ACCELERATED_FEATURES" if capability > 8 else ""
    return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {capability} {accelerated} }}
  core_count: {cores}
  fpus_per_core: {fpus}
  clock_rate_ghz: {clock}
  device_memory_size: {memory}
  memory_bandwidth: {int(bandwidth)}
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


def _read() -> dict[str, Chip]:
    text = Path(__file__).with_name("chips.toml").read_text(encoding="utf-8")
    return {name: _chip(name, sheet) for name, sheet in tomllib.loads(text).items()}


CHIPS: Mapping[str, Chip] = MappingProxyType(_read())
"""The data sheets of the chips that [`mylib.machines.gpu`][] and [`mylib.machines.tpu`][] know by
name.
"""

"""The data sheet of each chip."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from types import MappingProxyType
from typing import Any

GiB = 2**30


@dataclass(frozen=True)
class Chip:
    """The data sheet of one GPU or TPU. Write your own for a chip that `mylib.machines.CHIPS`
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
    - `host_bandwidth`: bytes per second between the chip and its host's memory in one direction.
    - `reached`: the shares of these rates that programs reach, for estimates: of `flops` in matrix
        products (`"products"`) and in kernels of attention (`"kernels"`), of `memory_bandwidth`
        (`"memory"`), and of the links in an all-reduce on a host of 8 GPUs (`"all-reduce"`). An
        estimate uses that of another chip for a missing one, and reports it.
    - `devices`: the number of JAX devices per chip: 2 for TPUs whose cores are separate.
    - `host`: the number of chips per host.
    - `largest`: for TPUs, the shape of the largest slice.
    - `wraps`: for TPUs, in which directions a slice is a ring: those whose number of chips is a
        multiple of this. In three directions, either all of them are rings or none.
    - `target`: for GPUs, the description that XLA's compiler needs: a `GpuTargetConfigProto` as
        text.
    - `kinds`: the values of `device.device_kind` for this chip.

    Unknown figures are None, or missing in `flops` and `reached`.

    !!! Example

        ```python
        from dataclasses import replace

        half = replace(mylib.machines.CHIPS["h100"], memory=40 * 2**30)
        assert mylib.machines.gpu(half).memory == 40 * 2**30
        ```
    """

    name: str
    platform: str
    memory: int | None = None
    flops: Mapping[str, float] = field(default_factory=dict, hash=False)
    memory_bandwidth: float | None = None
    links: int | None = None
    link_bandwidth: float | None = None
    network_bandwidth: float | None = None
    host_bandwidth: float | None = None
    reached: Mapping[str, float] = field(default_factory=dict, hash=False)
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
        sheet["target"] = _target(kind, memory, bandwidth, sheet["target"])
    sheet |= {name: MappingProxyType(sheet.get(name, {})) for name in ("flops", "reached")}
    sheet["kinds"] = tuple(sheet["kinds"])
    if "largest" in sheet:
        sheet["largest"] = tuple(sheet["largest"])
    return Chip(name, **sheet)


def _target(kind: str, memory: int, bandwidth: float, numbers: Mapping[str, float]) -> str:
    # Instructions that exist on one generation only, such as Hopper's matrix multiplication.
    newest = "feature_extension: ACCELERATED_FEATURES" if numbers["capability"] > 8 else ""
    return Template(_text("gpu_target.textproto")).substitute(
        numbers,
        kind=kind,
        memory=memory,
        bandwidth=int(bandwidth),
        accelerated=newest,
        optin=numbers["shared"] - 1024,
    )


def _text(file: str) -> str:
    return Path(__file__).with_name(file).read_text(encoding="utf-8")


_SHEETS = tomllib.loads(_text("chips.toml"))
CHIPS: Mapping[str, Chip] = MappingProxyType({name: _chip(name, x) for name, x in _SHEETS.items()})
"""The data sheets of the chips that `mylib.machines.gpu` and `mylib.machines.tpu` know by
name.
"""

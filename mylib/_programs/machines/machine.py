"""Machines: devices that programs can be compiled for, whether you have them or not."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from ..._core.meshes import make_mesh
from ..._core.text import counted, show_bytes
from .compilers import Devices, gpus, tpus
from .sheets import CHIPS, Chip


@dataclass(frozen=True, repr=False)
class Machine:
    """Devices that programs can be compiled for. Except for `mylib.machines.here`, nothing can
    be placed or run on them. Its `repr` is a data sheet.

    **Attributes:**

    - `chip`: the kind of chip, a `mylib.machines.Chip`.
    - `hosts`: the number of hosts.
    - `shape`: for GPUs the number of hosts and of chips per host, for TPUs the shape of the slice.
    - `is_here`: whether its devices are those of this process.

    !!! Example

        ```python
        machine = mylib.machines.Machine.of("v5e 4x4")
        assert machine.count == 16 and not machine.is_here
        print(repr(machine))
        ```
    """

    chip: Chip
    hosts: int
    shape: tuple[int, ...]
    is_here: bool = False

    def __post_init__(self) -> None:
        if self.chip.platform == "gpu" and self.hosts != self.shape[0]:
            raise ValueError(
                f"write hosts={self.shape[0]} for shape={self.shape}, which is the number of hosts "
                f"and of GPUs in each, not hosts={self.hosts}"
            )

    @classmethod
    def of(cls, name: str) -> "Machine":
        """The machine with this name, such as `"h100 x 64"` or `"v5e 4x4"`.

        **Arguments:**

        - `name`: a GPU and their number, or a TPU and the shape of the slice. For GPUs in hosts of
            another size the numbers of hosts and of GPUs in each: `"h100 4x2"`.

        **Returns:**

        A `mylib.machines.Machine`. Its `str` is `name`.
        """
        many = re.fullmatch(r"(\S+) +x *(\d+)", name.strip())
        if many:
            chip, count = _sheet(many[1], "gpu"), int(many[2])
            per_host = min(count, chip.host)
            if count and count % per_host == 0:
                return gpu(chip, hosts=count // per_host, devices_per_host=per_host)
            raise ValueError(
                f"{name!r}: a host has {chip.host} GPUs. Write a multiple of that, or the numbers "
                f"of hosts and of GPUs in each, '{many[1]} 4x2'"
            )
        shaped = re.fullmatch(r"(\S+) +(\d+(?:x\d+)+)", name.strip())
        if shaped:
            shape = tuple(map(int, shaped[2].split("x")))
            sheet = CHIPS.get(shaped[1].lower())
            if sheet is not None and sheet.platform == "gpu" and len(shape) == 2:
                return gpu(sheet, hosts=shape[0], devices_per_host=shape[1])
            return tpu(shaped[1], shape)
        raise ValueError(
            f"{name!r} is not a machine. Write the number of GPUs, or the shape of a slice of "
            "TPUs: 'h100 x 8' or 'v5e 4x4'"
        )

    @functools.cached_property
    def devices(self) -> Devices:
        """Its devices. The first use starts the compiler, which takes less than a second. Raises
        `mylib.machines.CompilerError` if it is not installed.
        """
        if self.is_here:
            return tuple(jax.devices())
        if self.chip.platform == "tpu":
            return tpus(self.chip.name, self.shape)
        assert self.chip.target is not None
        return gpus(self.chip.target, *self.shape)

    @property
    def count(self) -> int:
        """The number of devices."""
        return math.prod(self.shape) * self.chip.devices

    @property
    def memory(self) -> int | None:
        """The bytes that a program can use on each device, or None if unknown."""
        return None if self.chip.memory is None else self.chip.memory // self.chip.devices

    def flops(self, dtype: Any) -> float | None:
        """The peak number of dense operations per second of each device.

        **Arguments:**

        - `dtype`: the dtype of the operands. `float32` on GPUs is TensorFloat-32.

        **Returns:**

        A number, or None if it is unknown.
        """
        peak = self.chip.flops.get(jax.numpy.dtype(dtype).name)
        return None if peak is None else peak / self.chip.devices

    def mesh(self, *, explicit: Iterable[str] | str = (), **axes: int) -> Mesh:
        """A mesh of all its devices; see `mylib.make_mesh`.

        **Arguments:**

        - `explicit`: the names of axes that are Explicit; the others are Auto.
        - `axes`: the size of each axis by its name, in order. One may be -1, and is then computed.

        **Returns:**

        A `jax.sharding.Mesh`.
        """
        return make_mesh(devices=self.devices, explicit=explicit, **axes)

    def __str__(self) -> str:
        is_gpu = self.chip.platform == "gpu"
        in_whole_hosts = is_gpu and self.shape[-1] == min(self.count, self.chip.host)
        if self.is_here or in_whole_hosts:
            return f"{self.chip.name} x {self.count}"
        return f"{self.chip.name} {'x'.join(map(str, self.shape))}"

    def __repr__(self) -> str:
        chip, devices, hosts = self.chip, counted(self.count, "device"), counted(self.hosts, "host")
        lines = [f"{self}: {devices} on {hosts}"]
        if self.memory is not None:
            lines.append(f"memory     {show_bytes(self.memory)} on each device")
        if chip.memory_bandwidth is not None:
            lines[-1] += f", {chip.memory_bandwidth / chip.devices / 1e9:.0f} GB/s"
        if chip.flops:
            rates = (f"{x} {peak / chip.devices / 1e12:g}" for x, peak in chip.flops.items())
            lines.append(f"peak       {', '.join(rates)} TFLOP/s on each device")
        if chip.links is not None and chip.link_bandwidth is not None:
            rate = chip.link_bandwidth / 1e9
            lines.append(f"links      {chip.links} for each chip, {rate:g} GB/s each way")
        for name, rate in ("network", chip.network_bandwidth), ("host", chip.host_bandwidth):
            if rate is not None:
                lines.append(f"{name:11}{rate / 1e9:g} GB/s each way for each chip")
        return "\n  ".join(lines)


def gpu(name: str | Chip, *, hosts: int = 1, devices_per_host: int | None = None) -> Machine:
    """GPUs that programs can be compiled for although you don't have them. Needs the extra
    `mylib[gpu-compiler]`, but no GPU and no CUDA.

    **Arguments:**

    - `name`: a GPU in `mylib.machines.CHIPS`, or a `mylib.machines.Chip` with a `target`.
    - `hosts`: the number of hosts.
    - `devices_per_host`: the number of GPUs per host; 8 by default.

    **Returns:**

    A `mylib.machines.Machine`.

    **Raises:**

    `ValueError` for a chip that is not known, one without a `target`, or a machine without devices.

    !!! Example

        ```python
        machine = mylib.machines.gpu("h100", hosts=8)
        assert machine.count == 64
        ```
    """
    chip = _sheet(name, "gpu")
    if chip.target is None:
        raise ValueError(
            f"{chip.name} has no `target`, the description that XLA's compiler needs: a "
            "GpuTargetConfigProto in text form, such as those in XLA's repository"
        )
    shape = hosts, chip.host if devices_per_host is None else devices_per_host
    if min(shape) < 1:
        raise ValueError(f"a machine of {hosts} hosts with {shape[1]} GPUs has no devices")
    return Machine(chip, hosts, shape)


def tpu(version: str | Chip, shape: Sequence[int]) -> Machine:
    """A slice of TPUs that programs can be compiled for although you don't have it. Needs the extra
    `mylib[tpu-compiler]`, but no TPU.

    **Arguments:**

    - `version`: a TPU in `mylib.machines.CHIPS`, or a `mylib.machines.Chip` whose name the
        compiler knows.
    - `shape`: the number of chips in each direction, such as `(4, 4)` or `(4, 4, 8)`.

    **Returns:**

    A `mylib.machines.Machine`.

    **Raises:**

    `ValueError` for a chip that is not known, or a shape that no slice of it has.

    !!! Example

        ```python
        machine = mylib.machines.tpu("v5p", (4, 4, 8))
        assert machine.count == 128
        ```
    """
    chip = _sheet(version, "tpu")
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    text = "x".join(map(str, shape))
    largest = chip.largest or shape
    if len(shape) != len(largest) or min(shape, default=0) < 1:
        example = "x".join(["4"] * len(largest))
        raise ValueError(
            f"a slice of {chip.name} has {len(largest)} directions, such as {example}, not {text}"
        )
    # For a larger slice the compiler would end the process.
    if any(x > y for x, y in zip(sorted(shape), sorted(largest), strict=True)):
        raise ValueError(
            f"{text} is larger than the largest slice of {chip.name}, {'x'.join(map(str, largest))}"
        )
    return Machine(chip, max(1, math.prod(shape) // chip.host), shape)


def _sheet(name: str | Chip, platform: str) -> Chip:
    if isinstance(name, Chip):
        return name
    chip = CHIPS.get(name.lower())
    if chip is None or chip.platform != platform:
        names = ", ".join(x.name for x in CHIPS.values() if x.platform == platform)
        raise ValueError(
            f"mylib has no data sheet of a {platform.upper()} called {name!r}. It has {names}; "
            "describe others with mylib.machines.Chip"
        )
    return chip


def here() -> Machine:
    """The machine that this process runs on, whose devices are `jax.devices()`.

    **Returns:**

    A `mylib.machines.Machine`. Its memory is the number that JAX reports, which is unknown on
    the CPU.

    !!! Example

        ```python
        assert mylib.machines.here().devices == tuple(jax.devices())
        ```
    """
    devices = jax.devices()
    hosts = len({device.process_index for device in devices})
    kind = devices[0].device_kind
    sheets = (chip for chip in CHIPS.values() if kind in chip.kinds)
    chip = next(sheets, None) or Chip(kind, devices[0].platform, host=len(devices) // hosts)
    # Those of other processes have none to ask for.
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        chip = dataclasses.replace(chip, memory=stats["bytes_limit"] * chip.devices)
    shape = hosts, len(devices) // hosts // chip.devices
    return Machine(chip, hosts, shape, is_here=True)

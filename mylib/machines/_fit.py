"""Whether a compiled program fits into the memory of a machine's devices."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .._sizes import scaled
from ._sheets import GiB

_SHOWN = 5


class Argument(NamedTuple):
    """An array that a program takes: its path, its shape, and its bytes on each device."""

    path: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Fit:
    """Whether a program fits on a machine: true if it does. As text, it shows how much memory is
    missing, and the program's largest arguments.

    **Attributes:**

    - `needed`, `available`: bytes on each device.
    - `largest`: the largest arguments, each with `path`, `shape` and `nbytes` on each device.
    - `parts`: the uses of the memory, as text.
    """

    needed: int
    available: int
    largest: tuple[Argument, ...] = ()
    parts: str = ""

    @property
    def missing(self) -> int:
        """The bytes that each device lacks; 0 if the program fits."""
        return max(0, self.needed - self.available)

    def __bool__(self) -> bool:
        return not self.missing

    def __str__(self) -> str:
        needs = f"the program needs {in_bytes(self.needed)} on each device"
        if self:
            return f"{needs}, of {in_bytes(self.available)}"
        lines = [
            f"{needs}, which has {in_bytes(self.available)}: {in_bytes(self.missing)} are missing",
            *([f"  {self.parts}"] if self.parts else []),
        ]
        if self.largest:
            lines.append("  its largest arguments, by their bytes on each device:")
            lines += [f"    {in_bytes(x.nbytes):>10}  {x.path} {x.shape}" for x in self.largest]
        return "\n".join(lines)


class OutOfMemoryError(RuntimeError):
    """The compiler found that a program doesn't fit into the memory of the devices.

    **Attributes:**

    - `fit`: a [`mylib.machines.Fit`][].
    """

    def __init__(self, fit: Fit):
        self.fit = fit
        super().__init__(
            f"{fit}\nShard the large arrays over more devices, recompute more "
            "(mylib.filter_checkpoint), or take a smaller batch"
        )

    def __reduce__(self) -> tuple[type["OutOfMemoryError"], tuple[Fit]]:
        return type(self), (self.fit,)


def largest(arguments: Sequence[Argument]) -> tuple[Argument, ...]:
    return tuple(sorted(arguments, key=lambda x: -x.nbytes)[:_SHOWN])


def out_of_memory(error: Exception, arguments: Sequence[Argument]) -> OutOfMemoryError | None:
    """A readable form of the TPU compiler's error, or None if it is another error."""
    text = str(error)
    found = _EXCEEDED.search(text)
    if "RESOURCE_EXHAUSTED" not in text or found is None:
        return None
    needed, available = (int(float(x[:-1]) * _UNITS[x[-1]]) for x in found.groups())
    return OutOfMemoryError(Fit(needed, available, largest(arguments)))


_EXCEEDED = re.compile(r"\(([\d.]+[KMGT])\) exceeds available HBM \(([\d.]+[KMGT])\)")
_UNITS = {"K": 2**10, "M": 2**20, "G": GiB, "T": 2**40}


def in_bytes(count: float) -> str:
    size, unit = scaled(count)
    return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"

"""Where the devices of a mesh are in a slice of TPUs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .._meshes import ordered

if TYPE_CHECKING:
    from ._machine import Machine


@dataclass(frozen=True)
class _Place:
    """What JAX orders the devices of a mesh by. The compiler need not be installed."""

    id: int
    coords: tuple[int, ...]
    core_on_chip: int
    device_kind: str
    process_index: int
    platform: str = "tpu"
    slice_index: int = 0


def shape_of(machine: "Machine") -> tuple[int, ...]:
    """The number of chips in each direction."""
    if not machine.is_here:
        return machine.shape
    coords = np.array([device.coords for device in machine.devices])
    return tuple(int(n) for n in np.ptp(coords, axis=0) + 1)


def coordinates(machine: "Machine", sizes: Sequence[int]) -> np.ndarray:
    """The coordinates of each device of the mesh that `machine.mesh` makes, with the number of its
    core last.
    """
    devices = machine.devices if machine.is_here else _places(machine)
    return np.array([(*d.coords, d.core_on_chip) for d in ordered(devices, tuple(sizes)).flat])


def _places(machine: "Machine") -> list[_Place]:
    """In the compiler's order: hosts of 2 x 2 chips, the first direction fastest."""
    chip, size = machine.chip, (*machine.shape, 1)[:3]
    places = [(*at, core) for at in np.ndindex(*size) for core in range(chip.devices)]
    places.sort(key=lambda at: (at[2], at[1] // 2, at[0] // 2, at[1] % 2, at[0] % 2, at[3]))
    kind = (*chip.kinds, chip.name)[0]
    per_host = chip.host * chip.devices
    return [_Place(i, at[:3], at[3], kind, i // per_host) for i, at in enumerate(places)]

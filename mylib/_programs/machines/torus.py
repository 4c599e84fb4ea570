"""Where the devices of a mesh are in a slice of TPUs."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..._core.meshes import ordered
from .machine import Machine


def shape_of(machine: Machine) -> tuple[int, ...]:
    """The number of chips in each direction."""
    if not machine.is_here:
        return machine.shape
    coords = np.array([device.coords for device in machine.devices])
    return tuple(int(n) for n in np.ptp(coords, axis=0) + 1)


def coordinates(machine: Machine, sizes: Sequence[int]) -> np.ndarray:
    """The coordinates of each device of the mesh that `machine.mesh` makes, with the number of its
    core last.
    """
    devices = machine.devices if machine.is_here else _places(machine)
    return np.array([(*d.coords, d.core_on_chip) for d in ordered(devices, tuple(sizes)).flat])


def _places(machine: Machine) -> list[Any]:
    """What JAX orders the devices of a mesh by: the compiler need not be installed. As there, hosts
    have 2 x 2 chips, and the first direction is the fastest.
    """
    chip, size = machine.chip, (*machine.shape, 1)[:3]
    places = [(*at, core) for at in np.ndindex(*size) for core in range(chip.devices)]
    places.sort(key=lambda at: (at[2], at[1] // 2, at[0] // 2, at[1] % 2, at[0] % 2, at[3]))
    kind = (*chip.kinds, chip.name)[0]
    alike = {"device_kind": kind, "platform": "tpu", "slice_index": 0}
    host = chip.host * chip.devices
    return [
        SimpleNamespace(id=i, coords=at[:3], core_on_chip=at[3], process_index=i // host, **alike)
        for i, at in enumerate(places)
    ]

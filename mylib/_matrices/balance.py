"""How evenly the update of matrices is divided among devices."""

import math
from collections.abc import Sequence

import numpy as np

from .._text import counted
from .group import MatrixGroup, shares

# Above this it is said what would help.
_UNEVEN = 1.3


def loads_of(groups: Sequence[MatrixGroup], works: Sequence[float]) -> np.ndarray:
    """What each device of the mesh computes. `works` is what one matrix of each group takes."""
    mesh = groups[0].mesh
    total = np.zeros(tuple(mesh.shape.values()))
    for group, work in zip(groups, works, strict=True):
        axes = [*group.copied, *group.cut]
        loads = group.loads.reshape([mesh.shape[axis] for axis in axes])
        order = [axes.index(axis) for axis in mesh.axis_names if axis in axes]
        sizes = [n if axis in axes else 1 for axis, n in mesh.shape.items()]
        total += work * np.transpose(loads, order).reshape(sizes)
    return total


def note_on(groups: Sequence[MatrixGroup], works: Sequence[int | None]) -> str:
    """A line about the balance; and, if it is bad, about fewer devices in its place."""
    number = sum(group.count * group.stacks for group in groups)
    devices = groups[0].mesh.size
    text = f"by_matrix: {counted(number, 'matrix', 'matrices')} on {counted(devices, 'device')}"
    known = [work for work in works if work is not None]
    if len(known) < len(works):
        return f"{text}; what an update computes is unknown, so its balance is, too"
    loads = loads_of(groups, known)
    idle = np.count_nonzero(loads == 0)
    text += f"; the most loaded one computes {_balance(loads):.2f} times the mean"
    text += f", and {idle} of them own no matrix" if idle else ""
    return text + (_instead(groups, known, loads.max()) if _balance(loads) > _UNEVEN else "")


def _balance(loads: np.ndarray) -> float:
    return loads.max() / loads.mean() if loads.any() else 1.0


def _instead(groups: Sequence[MatrixGroup], works: Sequence[int], most: float) -> str:
    """The most devices that matrices could be given to evenly, and what that costs."""
    owners = {group.owners for group in groups}
    if len(owners) > 1 or any(group.stacks > 1 for group in groups):
        return ". Fewer devices to own them (HSDP) may be better balanced"
    (owners,) = owners
    for fewer in (n for n in range(owners - 1, 1, -1) if owners % n == 0):
        loads, start = np.zeros(fewer), 0
        for group, work in zip(groups, works, strict=True):
            loads += work * shares(group.count, fewer, start)
            start += group.count
        if _balance(loads) <= _UNEVEN:
            longer = loads.max() / most
            time = "as long" if longer < 1.01 else f"{longer:.1f} times as long"
            over = math.prod(groups[0].mesh.shape[axis] for axis in groups[0].cut)
            how = f", over={groups[0].cut[0]!r}" if over == fewer else ""
            return (
                f". With HSDP, {owners // fewer} replicas of {fewer} devices{how}, it would be "
                f"{_balance(loads):.2f}; updates take {time} then, and send over fewer devices"
            )
    return ". No smaller number of devices would be much better balanced"

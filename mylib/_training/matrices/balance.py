"""How evenly the update of matrices is divided among devices."""

from collections.abc import Sequence

import numpy as np

from ..._core.text import counted
from .group import MatrixGroup


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
    """A line about the balance."""
    number = sum(group.count * group.stacks for group in groups)
    devices = groups[0].mesh.size
    text = f"by_matrix: {counted(number, 'matrix', 'matrices')} on {counted(devices, 'device')}"
    known = [work for work in works if work is not None]
    if len(known) < len(works):
        return f"{text}; what an update computes is unknown, so its balance is, too"
    loads = loads_of(groups, known)
    idle = np.count_nonzero(loads == 0)
    balance = loads.max() / loads.mean() if loads.any() else 1.0
    text += f"; the most loaded one computes {balance:.2f} times the mean"
    return text + (f", and {idle} of them own no matrix" if idle else "")

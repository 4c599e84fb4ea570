"""The replicas of a model that are left, and the processes of their devices."""

import logging
import math
import time
from collections import Counter
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from ..._core.errors import TeamError
from ..._core.text import counted
from ..._moving.processes import Gate, Processes, about_lost, gate_of, named, processes_of
from .joining import check_joined

_log = logging.getLogger("mylib")


class Loss(NamedTuple):
    """What a team has lost.

    **Attributes:**

    - `processes`: their indices.
    - `step`: the step that was made again, without them.
    - `seconds`: from the beginning of that step until the others went on.

    !!! Example

        ```python
        def seconds_lost(team):
            return sum(loss.seconds for loss in team.lost)
        ```
    """

    processes: Processes
    step: int
    seconds: float


class Replicas:
    """The arguments and attributes are those of `Team`."""

    def __init__(self, *, replica: str = "replica", at_least: int = 1, **axes: int):
        check_joined()
        self.replica: str = replica
        self.at_least: int = at_least
        self.axes: dict[str, int] = axes
        self.lost: list[Loss] = []
        devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
        self._check(Counter(d.process_index for d in devices))
        self.devices: np.ndarray = np.array(devices).reshape(-1, *axes.values())
        if not 1 <= at_least <= len(self.devices):
            raise ValueError(
                f"write at_least=1 to {len(self.devices)}, the number of replicas; it is {at_least}"
            )
        self.gate: Gate = gate_of(self.processes)

    def _check(self, counts: Counter[int]) -> None:
        sizes, size = {*counts.values()}, math.prod(self.axes.values())
        if len(sizes) > 1:
            raise ValueError(
                f"start each process with as many devices: they have {sorted(counts.values())}"
            )
        (own,) = sizes
        if own % size and (size % own or len(counts) * own % size):
            raise ValueError(
                f"choose axes whose sizes multiply to a divisor of {own}, the devices of a "
                f"process, or to a multiple of it that divides {own * len(counts)}, those of all: "
                f"a replica of {self.axes} has {size} devices, and a process that is lost would "
                "take a part of one with it"
            )

    @property
    def mesh(self) -> Mesh:
        return self.mesh_of(len(self.devices))

    def mesh_of(self, replicas: int) -> Mesh:
        """The mesh of the first of these replicas."""
        return Mesh(self.devices[:replicas], (self.replica, *self.axes))

    @property
    def processes(self) -> Processes:
        return processes_of(self.devices.flat)

    def go_on_without(self, gone: Processes, step: int, since: float) -> None:
        """Leaves out the replicas of these processes. Raises if no team is left."""
        what = f"{named(gone)} {'was' if len(gone) == 1 else 'were'} lost in step {step}"
        before, kept = len(self.devices), self._left(gone, what)
        self.devices, seconds = np.array(kept), time.monotonic() - since
        self.gate = gate_of(self.processes)
        self.lost.append(Loss(gone, step, seconds))
        left = f"{counted(len(kept), 'replica')} of {before} go on, from step {step}"
        _log.warning(f"mylib: {what}, after {seconds:.1f} s. {left}")

    def _left(self, gone: Processes, what: str) -> list[np.ndarray]:
        """The replicas without these processes."""
        me = jax.process_index()
        if me in gone:
            raise TeamError(f"{about_lost([me], me)} has to end", restart=False)
        kept = [one for one in self.devices if not {*processes_of(one.flat)}.intersection(gone)]
        left = processes_of(device for one in kept for device in one.flat)
        again = "Start all processes again, from the last checkpoint"
        if len(kept) < self.at_least:
            raise TeamError(
                f"{what}, and {counted(len(kept), 'replica')} of {len(self.devices)} left are "
                f"fewer than at_least={self.at_least}. {again}",
                restart=True,
            )
        if 0 not in left:
            raise TeamError(f"{what}, and with it the replica of process 0. {again}", restart=True)
        if me not in left:
            raise TeamError(
                f"{what}, which had a part of this process's replica. The others go on without it",
                restart=False,
            )
        return kept

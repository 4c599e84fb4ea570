"""The options of a loader, for every batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.tree_util as jtu
from jax.sharding import Mesh, Sharding
from jaxtyping import PyTree

from ..._core.errors import PlacementError
from ..._core.placement import AnyMesh, Placement, current_world
from ..processes import Processes, everybody, processes_of
from ..transfer import is_flag
from .rows import no_device, rules_in, shardings_in

Tail = Literal["error", "drop", "pad"]
_TAILS = get_args(Tail)


@dataclass
class BatchRequest:
    """The options for every batch of a loader. `shardings` are those of its placement that are
    known without a batch; `processes` are those that have a share of a batch, and `loop` identifies
    the loop that they must all be in.
    """

    placement: Any
    mesh: AnyMesh | None
    tail: Tail
    may_alias: PyTree[bool | None]
    check: bool | None
    shardings: tuple[Sharding, ...]
    processes: Processes
    loop: str = ""

    @property
    def is_alone(self) -> bool:
        """Whether this process doesn't compare batches with others."""
        return len(self.processes) == 1 or self.check is False


def request_of(
    placement: PyTree[Placement],
    mesh: AnyMesh | None,
    tail: Tail,
    may_alias: PyTree[bool | None],
    check: bool | None,
) -> BatchRequest:
    if tail not in _TAILS:
        raise ValueError(f"tail={tail!r}: write one of {_TAILS}")
    if not is_flag(check):
        raise TypeError(f"check={check!r}: write True or False, for the whole batch")
    if not all(map(is_flag, jtu.tree_leaves(may_alias))):
        raise TypeError(f"may_alias={may_alias!r}: write True or False, or a prefix of them")
    mesh = current_world().devices if mesh is None else mesh
    request = BatchRequest(placement, mesh, tail, may_alias, check, (), (0,))
    # Without other processes nothing must be known before the first batch.
    if jax.process_count() > 1:
        # Their faults are found with the first batch, and reported to all processes.
        request.shardings = tuple(shardings_in(placement, mesh)[0])
        request.processes = _processes_in(placement, mesh, request.shardings)
        if jax.process_index() not in request.processes:
            raise PlacementError([no_device(placement, mesh)])
    return request


def _processes_in(
    placement: PyTree[Placement], mesh: AnyMesh | None, shardings: Sequence[Sharding]
) -> Processes:
    if mesh is None and rules_in(placement):
        # A rule may return any placement.
        return everybody()
    devices = {device for sharding in shardings for device in sharding.device_set}
    devices |= set(mesh.devices.flat) if isinstance(mesh, Mesh) else set()
    # A placement of None concerns only this process.
    return processes_of(devices) or (jax.process_index(),)

"""Calls in which processes meet. One that is interrupted fails in all, whatever the moment."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..._core.placement import AnyMesh, World
from .coordination import Processes, Series
from .meeting import CALLS, FAILED, VOID, Visit, processes_at, series_of, waiting


@dataclass(eq=False)
class CommonCall:
    """A call of the processes that `find` returns, if they are several.

    What is raised before its first meeting, or before one with which it goes on, ends that for the
    others. If this process may have come `alone`, it counts its call, and only Ctrl-C and the like
    end the first meeting, for this call only.

    Ctrl-C may come at any line of the thread that calls. So that thread only counts, which can be
    repeated, and another one ends the meeting.
    """

    find: Callable[[], Processes]
    alone: bool = False
    processes: Processes = ()
    # Of its first meeting.
    turn: int = 0
    _number: int = 0
    _series: Series | None = None
    _is_begun: bool = False
    _thread: int = field(default_factory=threading.get_ident)

    def __enter__(self) -> "CommonCall":
        try:
            self._begin()
            return self
        except BaseException as error:
            self._end(error)
            raise

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None:
            self._end(error)

    def _begin(self) -> None:
        self.processes = self.find()
        if len(self.processes) > 1:
            series = self._series = series_of(CALLS, self.processes)
            if series.only.is_held():  # by a meeting that was interrupted, and ends
                waiting.submit(series.only.wait_for, self._thread).result()
            self.turn = series.turn
            self._number = self._number or series.calls + self.alone
            series.calls = self._number
        self._is_begun = True

    def _end(self, error: BaseException) -> None:
        if self._series is not None or not self._is_begun:
            waiting.submit(self._break_off, error).result()

    def _break_off(self, error: BaseException) -> None:
        if not self._is_begun:
            self._begin()
        series, is_ours = self._series, not (self.alone and isinstance(error, Exception))
        if series is not None and (is_ours or series.is_owed):
            visit = Visit(series, thread=self._thread, turn=self.turn)
            visit.break_off(error, VOID if self.alone else FAILED)


def call_on(mesh: AnyMesh | None, world: World) -> CommonCall:
    """A call that may place arrays on the devices of the mesh."""
    return CommonCall(partial(_processes_of, mesh, world), alone=True)


def _processes_of(mesh: AnyMesh | None, world: World) -> Processes:
    """The processes of the mesh, if they are several, and this one is among them."""
    mesh = world.devices if mesh is None else mesh
    if not isinstance(mesh, Mesh):
        return ()
    processes = processes_at(NamedSharding(mesh, PartitionSpec()))
    return processes if len(processes) > 1 and jax.process_index() in processes else ()

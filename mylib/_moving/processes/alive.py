"""Who is alive, as JAX's service knows it.

With `jax_enable_recoverability` a process outlives the others; without it JAX ends them all, so
there is nothing to ask. JAX answers only once all that are alive have asked. So a thread of each
process asks about every second, and ends between two answers.
"""

import atexit
import functools
import threading

import jax

from ..._core.compat import (
    CoordinationClient,
    coordination_client,
    index_of_process,
    is_recoverable,
    living,
    number_of_processes,
)
from .coordination import connected, ended
from .environment import patience
from .groups import named

# Seconds between two questions, for up to a hundred processes: all of them answer to each.
_PAUSE = 1.0


class _Watch:
    """Asks from its beginning to the end of this process."""

    def __init__(self, client: CoordinationClient):
        self.lost: frozenset[int] = frozenset()
        self.client, self._me, self._count = client, index_of_process(), number_of_processes()
        self._alive = set(range(self._count))
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._look, name="mylib-alive", daemon=True)
        self._thread.start()
        # Before JAX leaves the other processes: it can't while a question is open.
        atexit.register(self._end)

    def _look(self) -> None:
        while not self._ends.wait(_PAUSE * max(1.0, self._count / 100)):
            self._ask()
            if self._me in self.lost or coordination_client() is not self.client:
                return

    def _ask(self) -> None:
        try:
            self._alive = living(self.client, self._count)
            self.lost |= {*range(self._count)} - self._alive - ended()
        except jax.errors.JaxRuntimeError:
            self._ends.set()  # The service is gone: JAX ends this process.

    def _end(self) -> None:
        self._ends.set()
        self._thread.join(patience())
        # The service ends with process 0, and JAX would abort those that have not left it.
        self._ends.clear()
        limit = patience()
        while self._me == 0 and self._alive != {0} and limit > 0 and not self._ends.is_set():
            self._ask()
            limit -= _PAUSE
            self._ends.wait(_PAUSE)


_starting = threading.Lock()
_watch_of = functools.lru_cache(maxsize=1)(_Watch)


def lost() -> frozenset[int]:
    """The processes that are gone without a word. Their meetings and arrays never come."""
    if not is_recoverable():
        return frozenset()
    with _starting:
        return _watch_of(connected()).lost


def about_lost(who: list[int], me: int) -> str:
    """What has happened, the beginning of a sentence."""
    if me in who:
        return (
            "this process was taken for lost, as it had stopped, or its network had: the others "
            "go on without it, and it can't come back. It"
        )
    return f"{named(who)} {'was' if len(who) == 1 else 'were'} lost, and"

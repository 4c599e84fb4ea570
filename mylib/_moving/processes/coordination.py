"""Meetings of processes through JAX's coordination service: on the host, without their devices."""

import atexit
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import NamedTuple

import jax

from ..._core.compat import (
    CoordinationClient,
    coordination_client,
    index_of_process,
    names,
    set_once,
    value_at,
    values_by_process,
)

# Process indices, in order.
Processes = tuple[int, ...]
# Decides about the messages of all processes.
Judge = Callable[[dict[int, str]], str]

JUDGED = "judged"
_ENDED = "mylib/ended"


class OneThread:
    """Held by the thread that makes calls with other processes: the calls of two threads could come
    in another order in each process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread = 0

    def hold(self, thread: int, does: str, advice: str = "", waits: bool = True) -> None:
        if not self.try_to_hold(thread, waits):
            raise RuntimeError(
                f"two threads {does}, so their order may differ between processes. Let one thread "
                f"do so{advice}"
            )

    def try_to_hold(self, thread: int, waits: bool = True) -> bool:
        # A call of this thread that was interrupted may take a moment to end, if another thread
        # makes it; else it has ended, and may not have let go.
        ours = self._thread == thread
        if not self._lock.acquire(blocking=ours and waits) and not ours:
            return False
        self._thread = thread
        return True

    def release(self) -> None:
        self._lock.release()

    def is_held(self) -> bool:
        return self._lock.locked()

    def wait_for(self, thread: int) -> None:
        if self.try_to_hold(thread):
            self.release()


class Conclusion(NamedTuple):
    """The result of a meeting: its kind, and a text."""

    kind: str
    text: str


class Series:
    """A series of meetings of some processes under one key.

    Each process sends a message and counts itself, and the last one to come decides. If that
    process dies before it has decided, another one decides. A process that gives up concludes a
    meeting as well. The first conclusion counts: all processes read the same one, however late they
    come.
    """

    def __init__(self, place: str, processes: Processes, me: int):
        self.place = place
        self.processes = processes
        self.turn = 0
        self.only = OneThread()
        # Whether the call that is being made goes on with the next meeting.
        self.is_owed = False
        # Calls of this process that would meet the others if they had something to compare.
        self.calls = 0
        self._me = me
        self._begun = False
        # The first meeting whose keys the service may still hold.
        self._first_held = 0

    def begin(self) -> bool:
        """False if this process has begun these meetings before: it has died, and been replaced."""
        if not self._begun:
            tell_end_at_exit()
            self._begun = set_once(connected(), f"{self.place}-begun/{self._me}", "")
        return self._begun

    def say(self, mine: str, judge: Judge) -> None:
        client, meeting = connected(), self._key()
        client.key_value_set(f"{meeting}/said/{self._me}", mine)
        if client.key_value_increment(f"{meeting}/count", 1) == len(self.processes):
            self.conclude(JUDGED, judge(self.messages()))

    def hear(self, judge: Judge, seconds: float) -> Conclusion | None:
        """The conclusion; None if there is none within this time."""
        conclusion = self.read(seconds)
        if conclusion is None and self._come() == len(self.processes):
            # All have come, but the last one has not decided.
            self.conclude(JUDGED, judge(self.messages()))
            return self.read(seconds)
        return conclusion

    def read(self, seconds: float) -> Conclusion | None:
        """`hear`, for a process that has sent no message."""
        conclusion = value_within(f"{self._key()}/conclusion", seconds)
        if conclusion is None:
            return None
        kind, _, text = conclusion.partition(" ")
        return Conclusion(kind, text)

    def conclude(self, kind: str, text: str) -> bool:
        """Ends the meeting. Returns False if another process was faster."""
        return set_once(connected(), f"{self._key()}/conclusion", f"{kind} {text}")

    def messages(self) -> dict[int, str]:
        """The messages so far, by process."""
        return values_by_process(connected(), f"{self._key()}/said")

    def go_on(self, *, judged: bool = True, is_owed: bool = False) -> None:
        """Moves on to the next meeting. `judged` is whether all processes attended this one."""
        turn, self.turn, self.is_owed = self.turn, self.turn + 1, is_owed
        if judged:
            first, self._first_held = self._first_held, turn
            # All processes have read the conclusions of the meetings before this one.
            for meeting in range(first, turn) if self._me == self.processes[0] else ():
                connected().key_value_delete(f"{self.place}/{meeting}/")

    def count(self, what: str) -> int:
        """Counts this process, and returns the count."""
        return connected().key_value_increment(f"{self.place}/{what}", 1)

    def forget(self) -> None:
        """Deletes all keys of these meetings."""
        connected().key_value_delete(f"{self.place}/")

    def _come(self) -> int:
        """The number of processes that have come. It is less to read than their messages."""
        return int(value_at(connected(), f"{self._key()}/count") or 0)

    def _key(self) -> str:
        """The folder of the current meeting."""
        return f"{self.place}/{self.turn}"


@cache
def tell_end_at_exit() -> None:
    # Python calls the latest first: this comes before JAX leaves the other processes.
    atexit.register(_tell_end)


def _tell_end() -> None:
    """Informs the other processes that this one makes no more calls."""
    client = coordination_client()
    if client is not None:
        with suppress(jax.errors.JaxRuntimeError):  # The service may be gone.
            set_once(client, f"{_ENDED}/{index_of_process()}", "")


def ended() -> set[int]:
    """The processes whose programs have ended."""
    return {*values_by_process(connected(), _ENDED)}


def value_within(key: str, seconds: float) -> str | None:
    """The value of a key; None if nobody sets it within this time."""
    try:
        return connected().blocking_key_value_get(key, int(1000 * seconds))
    except jax.errors.JaxRuntimeError as error:
        if names.TEXT_DEADLINE not in str(error):
            raise
        return None


def connected() -> CoordinationClient:
    """The client by which this process speaks to the others."""
    client = coordination_client()
    if client is None:
        raise RuntimeError(
            "the processes are not connected: call jax.distributed.initialize() at the start of "
            "each, or write check=False where mylib only compares what they place"
        )
    return client

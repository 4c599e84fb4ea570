"""Keeps the loaders of several processes in step.

As in `processes`, they meet at JAX's coordination service. But here a thread of each process waits
without a deadline, because the consumer has one; and a process that leaves wakes up all that
wait.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import jax

from ..._core.compat import coordination_client
from ..._core.watched import waits
from ..processes import (
    JUDGED,
    Conclusion,
    Judge,
    Processes,
    Series,
    about_lost,
    digest,
    lost,
    named,
)

# The conclusion of a meeting that a process does not attend.
_LEFT = "left"
_FAILED = "failed"
# In seconds. JAX's service needs a limit for each wait; then the thread waits again.
_LONG = 10.0
# Seconds between two looks for processes that were lost.
_STEP = 1.0

# The number of channels opened so far, in all threads, by the set of processes.
_opened: Counter[Processes] = Counter()
_opening = threading.Lock()


class Channel:
    """A series of meetings of one loop.

    All processes must open their channels in the same order. A channel is skipped if the others
    have already left it before its first meeting.
    """

    def __init__(self, processes: Processes):
        self.processes = processes
        # Read now: when Python exits, JAX may already be shut down.
        self.me = jax.process_index()
        self._farewell = json.dumps(
            f"process {self.me} has left its loop, and makes no more batches. Make all processes "
            "leave the loop after the same batch"
        )
        self._open()
        self._has_left = False
        # After the end no messages are sent: nobody would delete them. Garbage collection of the
        # consumer's iterator, in any thread, may end the channel at any point.
        self._ending, self._ended = threading.RLock(), False
        self._since: float | None = None

    @waits("", lambda channel, *_: ("their next batch", channel.processes))
    def meet(self, mine: str, judge: Judge) -> str:
        """Sends a message to the others, and returns the conclusion that the last one to come draws
        from all messages.
        """
        if len(self.processes) == 1:
            return judge({self.me: mine})
        self._since = time.monotonic()
        try:
            while True:
                kind, text = self._meet(mine, judge)
                if not self._goes_on(kind):
                    raise RuntimeError(json.loads(text))
                if kind == JUDGED:
                    return text
        finally:
            self._since = None

    def leave(self) -> None:
        """Ends the current or next meeting for all processes."""
        with self._ending:
            self._has_left = True
            if not self._ended:
                self._quietly(lambda: self._series.conclude(_LEFT, self._farewell))

    def fail(self, why: str) -> None:
        """Called by the thread that meets: leaves, and sends the others the reason, without waiting
        for them.
        """
        with self._ending:
            # A file name, for example, may contain bytes that are not text.
            self._quietly(lambda: self._tell(json.dumps(why)))
            self._has_left = True

    def end(self) -> None:
        """Called by the thread that meets: leaves for good."""
        self.leave()
        with self._ending:
            self._ended = True
        self._quietly(self._close)

    def waited(self, since: float) -> float:
        """The seconds spent waiting for the others, from `since` on."""
        begun = self._since
        return 0.0 if begun is None else time.monotonic() - max(begun, since)

    def missing(self) -> str:
        """Names the processes that have not come yet."""
        come = self._series.messages()
        return named([i for i in self.processes if i not in come] or self.processes)

    def _open(self) -> None:
        with _opening:
            _opened[self.processes] += 1
            number = _opened[self.processes]
        place = f"mylib/prefetch/{digest(self.processes)}/{number}"
        self._series = Series(place, self.processes, self.me)

    def _goes_on(self, kind: str) -> bool:
        """Moves on to the next meeting after one that has ended so, if there may be one."""
        if kind == JUDGED:
            self._series.go_on()
        elif kind == _LEFT and self._series.turn == 0 and not self._has_left:
            with self._ending:
                self._close()
                self._open()
        else:
            return False
        return True

    def _meet(self, mine: str, judge: Judge) -> Conclusion:
        if self._has_left:
            # The message was about an earlier meeting.
            self._series.conclude(_LEFT, self._farewell)
        self._series.say(mine, judge)
        while (conclusion := self._series.hear(judge, _STEP)) is None:
            if gone := sorted(lost().intersection(self.processes)):
                why = f"{about_lost(gone, self.me)} can't make its part of the next batch"
                self._series.conclude(_FAILED, json.dumps(why))
        return conclusion

    def _tell(self, why: str) -> None:
        """Sends the reason to the first meeting that others may still attend."""
        while not self._series.conclude(_FAILED, why):
            # If all attended it, this process has not read the conclusion.
            conclusion = self._series.read(_LONG)
            if conclusion is not None and not self._goes_on(conclusion.kind):
                return

    def _close(self) -> None:
        # The last process deletes the keys.
        if self._series.count("closed") == len(self.processes):
            self._series.forget()

    def _quietly(self, tell: Callable[[], object]) -> None:
        if len(self.processes) > 1 and coordination_client() is not None:
            # If the service is gone, processes waiting there have had an error of their own.
            with suppress(jax.errors.JaxRuntimeError):
                tell()

"""How the loaders of several processes keep in step.

As in `mylib._processes`, they meet at JAX's coordination service. But here a thread of each waits
for as long as it takes, since it is the consumer that loses patience; and whoever leaves wakes up
all who wait.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable

import jax

from .._compat import coordination_client
from .._processes import JUDGED, Conclusion, Judge, Processes, Series, digest, named

# How a meeting ends to which a process does not come.
_LEFT = "left"
_FAILED = "failed"
# In seconds. Waiting has to have a limit there; then a thread waits again.
_LONG = 10.0

# How many channels some processes have opened, in several threads.
_opened: Counter[Processes] = Counter()
_opening = threading.Lock()


class Channel:
    """A series of meetings, all of which are of one loop.

    All processes have to open their channels in the same order. A channel at which others have
    waited in vain, and have left before the first meeting, is passed over.
    """

    def __init__(self, processes: Processes):
        self._processes = processes
        # Asked for now: when Python ends, JAX may have been taken down already.
        self.me = jax.process_index()
        self._open()
        self._has_left = False
        # After its end nothing is said here: there would be nobody to tidy that up. Collecting what
        # the consumer had, in whichever thread, may come in between.
        self._ending, self._ended = threading.RLock(), False
        self._since: float | None = None

    def meet(self, mine: str, judge: Judge) -> str:
        """Says something to the others, and returns what the last to come makes of it all."""
        if len(self._processes) == 1:
            return judge({self.me: mine})
        self._since = time.monotonic()
        kind, text = self._meet(mine, judge)
        while self._may_pass_over(kind):
            self._pass_over()
            kind, text = self._meet(mine, judge)
        self._since = None
        if kind == _LEFT:
            raise RuntimeError(
                f"process {text} has left its loop, and makes no more batches. Let all processes "
                "leave it after the same batch"
            )
        if kind == _FAILED:
            raise RuntimeError(json.loads(text))
        self._series.go_on()
        return text

    def leave(self) -> None:
        """Ends the next meeting, or the one that is under way, for all who are or will be there."""
        with self._ending:
            self._has_left = True
            if not self._ended:
                self._quietly(lambda: self._series.conclude(_LEFT, str(self.me)))

    def fail(self, why: str) -> None:
        """Leaves, for the thread that meets, and tells the others why, without waiting for them."""
        with self._ending:
            # A name of a file, say, may have bytes that are no text.
            self._quietly(lambda: self._tell(json.dumps(why)))
            self._has_left = True

    def end(self) -> None:
        """Leaves, for the thread that meets: it does not come back."""
        self.leave()
        with self._ending:
            self._ended = True
        self._quietly(self._close)

    def waited(self, since: float) -> float:
        """For how many seconds the others have been waited for, counted from `since`."""
        begun = self._since
        return 0.0 if begun is None else time.monotonic() - max(begun, since)

    def missing(self) -> str:
        """Who has not come yet."""
        said = self._series.said()
        return named([i for i in self._processes if i not in said] or self._processes)

    def _open(self) -> None:
        with _opening:
            _opened[self._processes] += 1
            number = _opened[self._processes]
        place = f"mylib/prefetch/{digest(self._processes)}/{number}"
        self._series = Series(place, self._processes, self.me)

    def _may_pass_over(self, kind: str) -> bool:
        return kind == _LEFT and self._series.turn == 0 and not self._has_left

    def _pass_over(self) -> None:
        with self._ending:
            self._close()
            self._open()

    def _meet(self, mine: str, judge: Judge) -> Conclusion:
        if self._has_left:
            # When that was said, the meeting was another one.
            self._series.conclude(_LEFT, str(self.me))
        self._series.say(mine, judge)
        while (conclusion := self._series.hear(judge, _LONG)) is None:
            pass
        return conclusion

    def _tell(self, why: str) -> None:
        """Says it at the first meeting to which others may still come."""
        while not self._series.conclude(_FAILED, why):
            conclusion = self._series.read(_LONG)
            if conclusion is not None and self._may_pass_over(conclusion.kind):
                self._pass_over()
            elif conclusion is not None and conclusion.kind != JUDGED:
                return
            elif conclusion is not None:
                # All were there, and this process has not heard what came of it.
                self._series.go_on()

    def _close(self) -> None:
        # The last one tidies up.
        if self._series.count("closed") == len(self._processes):
            self._series.forget()

    def _quietly(self, tell: Callable[[], object]) -> None:
        if len(self._processes) > 1 and coordination_client() is not None:
            try:
                tell()
            except jax.errors.JaxRuntimeError:
                # Where they meet is gone: whoever waits there has had an error of their own.
                pass

"""A thread that looks whether this process makes progress, and reports if it is stuck.

It never waits for anything, and sends no messages itself: `others.py`.
"""

import contextlib
import faulthandler
import sys
import threading
import time
from typing import Any

from .ending import say
from .others import Others
from .progress import Progress
from .record import Record
from .report import standstill
from .wakeup import Wakeup

# The longest time between two looks, in seconds.
_LOOK = 1.0


class Lookout:
    """The thread, from its start to `stop`."""

    def __init__(self, record: Record, limit: float, end: bool, signum: int | None, number: int):
        self.progress = Progress(record, limit, end)
        self._pace = min(_LOOK, limit / 8)
        self._wakeup = Wakeup(signum)
        self._others = None if self.progress.count == 1 else Others(self.progress, number)
        self._thread = threading.Thread(target=self._look_often, name="mylib-lookout", daemon=True)
        self._thread.start()

    def stop(self, why: str) -> None:
        """`why` is the error that ends the watch, if one does."""
        self._wakeup.close()
        self._thread.join()
        self._wakeup.free()
        if self._others is not None:
            self._others.leave(why)
        faulthandler.cancel_dump_traceback_later()

    def _look_often(self) -> None:
        progress, looked = self.progress, time.monotonic()
        while (asked := self._wakeup.wait(self._pace)) is not None:
            now = time.monotonic()
            # A process that was stopped, or a machine that slept, was not stuck.
            progress.look(min(now - looked, 2 * self._pace))
            looked, progress.is_asked = now, progress.is_asked or asked
            self._arm()
            if self._others is not None:
                self._others.remind(now)
            elif progress.is_asked:
                progress.is_asked = False
                say(progress.own_report("asked for by a signal"))
            elif progress.age >= progress.limit:
                progress.conclude(standstill(progress.age, progress.limit))

    def _arm(self) -> None:
        """If Python's lock is held, this thread can't look: a thread in C prints the stacks."""
        if self.progress.pauses:
            faulthandler.cancel_dump_traceback_later()
            return
        stderr: Any = sys.__stderr__
        # It may be None, or no file.
        with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):
            faulthandler.dump_traceback_later(self.progress.limit, file=stderr)

"""A thread that looks whether this process makes progress, and reports if it is stuck.

It never waits for anything, and sends no messages itself: `others.py`.
"""

import threading
import time

from .others import Others
from .progress import Progress
from .record import Record
from .report import standstill

# The longest time between two looks, in seconds.
_LOOK = 1.0


class Lookout:
    """The thread, from its start to `stop`."""

    def __init__(self, record: Record, limit: float, end: bool, number: int):
        self.progress = Progress(record, limit, end)
        self._pace = min(_LOOK, limit / 8)
        self._ends = threading.Event()
        self._others = None if self.progress.count == 1 else Others(self.progress, number)
        self._thread = threading.Thread(target=self._look_often, name="mylib-lookout", daemon=True)
        self._thread.start()

    def stop(self, why: str) -> None:
        """`why` is the error that ends the watch, if one does."""
        self._ends.set()
        self._thread.join()
        if self._others is not None:
            self._others.leave(why)

    def _look_often(self) -> None:
        progress, looked = self.progress, time.monotonic()
        while not self._ends.wait(self._pace):
            now = time.monotonic()
            # A process that was stopped, or a machine that slept, was not stuck.
            progress.look(min(now - looked, 2 * self._pace))
            looked = now
            if self._others is not None:
                self._others.remind(now)
            elif progress.age >= progress.limit:
                progress.conclude(standstill(progress.age, progress.limit))

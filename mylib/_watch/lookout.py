"""Looks whether this process makes progress, and reports if it is stuck.

A thread looks, and never waits for anything. It has no messages of its own: `others.py`.
"""

import contextlib
import faulthandler
import sys
import threading
import time
from typing import Any

import jax

from .._compat import names
from .ending import leave_python, say
from .news import news_of, record_of
from .others import Others
from .record import Record
from .report import report, standstill
from .stacks import threads
from .verdict import Account
from .wakeup import Wakeup

# The longest time between two looks, in seconds.
_LOOK = 1.0


class Lookout:
    """The thread, from its start to `stop`."""

    def __init__(self, record: Record, limit: float, end: bool, signum: int | None, number: int):
        self.record = record
        self.limit = limit
        self.end = end
        self.me, self.count = jax.process_index(), jax.process_count()
        # How many `paused` blocks the program is in.
        self.pauses = 0
        # Seconds without progress; and a value that differs after progress.
        self.age = 0.0
        self.progress: Any = None
        # Whether a signal has asked for a report.
        self.is_asked = False
        self._state = "running"
        self._watched = threading.get_ident()
        self._pace = min(_LOOK, limit / 8)
        self._positions: dict[int, Any] = {}
        self._is_reported = False
        self._wakeup = Wakeup(signum)
        self._others = None if self.count == 1 else Others(self, number)
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
        looked = time.monotonic()
        while (asked := self._wakeup.wait(self._pace)) is not None:
            now = time.monotonic()
            # A process that was stopped, or a machine that slept, was not stuck.
            self._look(min(now - looked, 2 * self._pace))
            looked, self.is_asked = now, self.is_asked or asked
            self._arm()
            if self._others is not None:
                self._others.remind(now)
            elif self.is_asked:
                self.is_asked = False
                say(self.own_report("asked for by a signal"))
            elif self.age >= self.limit:
                self.conclude(standstill(self.age, self.limit))

    def _look(self, seconds: float) -> None:
        before, self.progress = self.progress, self.record.look()
        self._state = "running"
        if self.pauses:
            self._state = "paused"
        elif self._is_compiling():
            self._state = "compiling"
        if self._state != "running" or self.progress != before:
            self.age, self._is_reported = 0.0, False
        else:
            self.age += seconds

    def _is_compiling(self) -> bool:
        """Tracing runs the user's Python, which may hang: it goes on if the thread has moved."""
        moved = False
        for ident, thread in threads().items():
            if thread.is_in(names.FRAMES_COMPILING):
                return True
            if thread.is_in(names.FRAMES_TRACING):
                position = thread.position()
                moved |= self._positions.get(ident) != position
                self._positions[ident] = position
        return moved

    def _arm(self) -> None:
        """If Python's lock is held, this thread can't look: a thread in C prints the stacks."""
        if self.pauses:
            faulthandler.cancel_dump_traceback_later()
            return
        stderr: Any = sys.__stderr__
        # It may be None, or no file.
        with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):
            faulthandler.dump_traceback_later(self.limit, file=stderr)

    def account(self, full: bool) -> Account:
        """That of this process."""
        stacks = threads()
        news = news_of(self.record, stacks.get(self._watched))
        record = record_of(self.record, stacks, self._watched) if full else {}
        return Account(self.me, self.age, state=self._state, news=news, record=record)

    def own_report(self, title: str) -> str:
        return report([self.account(full=True)], title)

    def conclude(self, title: str) -> None:
        """Reports about this process alone, once, and ends it if it is to be ended."""
        if not self._is_reported:
            self._is_reported = True
            say(self.own_report(title))
            if self.end:
                leave_python()

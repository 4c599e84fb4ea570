"""Whether this process makes progress, and what it knows of itself."""

import threading

import jax

from ..._core.compat import names
from .ending import leave_python, say
from .news import news_of, record_of
from .record import Record
from .report import report
from .stacks import threads
from .verdict import Account


class Progress:
    """That of this process, which is watched from the thread that makes this."""

    def __init__(self, record: Record, limit: float, end: bool):
        self.record = record
        self.limit = limit
        self.end = end
        self.me, self.count = jax.process_index(), jax.process_count()
        # How many `paused` blocks the program is in.
        self.pauses = 0
        # Seconds without progress; and a value that differs after progress.
        self.age = 0.0
        self.last: object = None
        self._state = "running"
        self._watched = threading.get_ident()
        self._positions: dict[int, object] = {}
        self._is_reported = False

    def look(self, seconds: float) -> None:
        """Samples the thread again, this many seconds after the last time."""
        before, self.last = self.last, self.record.look()
        self._state = "running"
        if self.pauses:
            self._state = "paused"
        elif self._is_compiling():
            self._state = "compiling"
        if self._state != "running" or self.last != before:
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

    def account(self, full: bool) -> Account:
        """The account for the others; if `full`, with the record of the calls."""
        stacks = threads()
        news = news_of(self.record, stacks.get(self._watched))
        record = record_of(self.record, stacks, self._watched) if full else {}
        return Account(self.me, self.age, state=self._state, news=news, record=record)

    def conclude(self, title: str) -> None:
        """Reports about this process alone, once, and ends it if it is to be ended."""
        if not self._is_reported:
            self._is_reported = True
            say(report([self.account(full=True)], title))
            if self.end:
                leave_python()

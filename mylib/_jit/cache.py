"""A cache of a function's programs, by the structure and the static leaves of its arguments."""

import threading
from itertools import count
from typing import Generic, TypeVar

from .key import Key

T = TypeVar("T")
# The most programs that are kept for a function.
_MOST = 256
# After this many new programs in a row that differ only in Python numbers, there is a warning.
_IN_A_ROW = 10


class _Entry(Generic[T]):
    __slots__ = ("key", "last_use", "program")

    def __init__(self, key: Key, program: T, last_use: int):
        self.key = key
        self.program = program
        self.last_use = last_use


class Known(Generic[T]):
    """The programs used last, by their keys. Thread-safe."""

    def __init__(self) -> None:
        self._entries: dict[Key, _Entry[T]] = {}
        # Usually the same program is called again, and then its key need not be hashed.
        self._latest: _Entry[T] | None = None
        self._clock = count()
        self._adding = threading.Lock()
        self._row = _Row()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> T | None:
        entry = self._latest
        if entry is None or not key == entry.key:  # noqa: SIM201 (faster)
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._latest = entry
        entry.last_use = next(self._clock)
        return entry.program

    def add(self, key: Key, program: T) -> tuple[T, set[int]]:
        """Keeps a program, and returns the one kept for its key: another thread may have been
        faster. Also returns, once, the leaves whose numbers change at each call.
        """
        with self._adding:
            now = next(self._clock)
            entry = self._latest = self._entries.setdefault(key, _Entry(key, program, now))
            if len(self._entries) > _MOST:
                del self._entries[min(self._entries, key=lambda key: self._entries[key].last_use)]
            return entry.program, self._row.add(key, now)


class _Row:
    """Programs added by successive calls that differ only in numbers."""

    def __init__(self) -> None:
        self._last: Key | None = None
        self._last_added = -1
        self._length = 0
        self._changed: set[int] = set()
        self._is_told = False

    def add(self, key: Key, now: int) -> set[int]:
        changed: set[int] = set()
        if self._last is not None and now == self._last_added + 1:
            changed = key.numbers_changed(self._last)
        if not changed:
            self._length, self._changed = 0, set()
        self._length += 1
        self._changed |= changed
        self._last, self._last_added = key, now
        if self._length < _IN_A_ROW or self._is_told:
            return set()
        self._is_told = True
        return self._changed

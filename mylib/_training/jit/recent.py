"""A dict of limited size."""

import threading
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Values by key. Beyond a number of them the one goes that was not found for the longest."""

    def __init__(self, most: int) -> None:
        self._most = most
        # With the key itself: another that is equal may have changed since.
        self._all: dict[K, tuple[K, V]] = {}
        # Users' keys may call functions of ours while they are compared.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._all)

    def find(self, key: K) -> V | None:
        with self._lock:
            pair = self._all.pop(key, None)
            if pair is None:
                return None
            self._all[pair[0]] = pair
            return pair[1]

    def add(self, key: K, value: V) -> V:
        """Adds a value. Returns that of another thread, which was faster, if there is one."""
        with self._lock:
            _, value = self._all.setdefault(key, (key, value))
            if len(self._all) > self._most:
                del self._all[next(iter(self._all))]
            return value

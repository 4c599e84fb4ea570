"""Lets processes go on together: less than a meeting, as there is nothing to say."""

import functools
import time

from ..._core.compat import index_of_process, set_once
from ..._core.watched import waits
from .alive import lost
from .coordination import Processes, connected, ended, tell_end_at_exit, value_within
from .environment import patience
from .groups import digest

# Seconds between two looks for processes that never come.
_STEP = 1.0
# The service keeps the keys of at least as many gates: to delete them takes a message, too.
_KEPT = 64
_ALL, _NOT_ALL = "all", "not all"


class Gate:
    """Opens when all of `processes` have come. They come to the same gates in the same order."""

    def __init__(self, processes: Processes):
        self.processes: Processes = processes
        self._turn = 0
        self._place = f"mylib/gate/{digest(processes)}"
        tell_end_at_exit()  # Or one that leaves would be taken for lost.

    @waits("meetings", lambda self, *_: ("going on together", self.processes))
    def opens(self, purpose: str, is_ready: bool) -> bool:
        """Whether all have come, and were ready; the same for all of them."""
        if len(self.processes) == 1:
            return is_ready
        folder, self._turn = self._turn // _KEPT, self._turn + 1
        place = f"{self._place}/{folder}/{self._turn}"
        if self._turn % _KEPT == 0 and index_of_process() == self.processes[0]:
            connected().key_value_delete(f"{self._place}/{folder - 1}/")
        if not is_ready:
            set_once(connected(), f"{place}/opens", _NOT_ALL)
            return False
        return self.come(place, purpose) or self._hear(f"{place}/opens")

    def come(self, place: str, purpose: str) -> bool:
        """Whether this process is the last one, and has opened the gate. It stays shut for
        processes that come for different purposes.
        """
        client = connected()
        count = client.key_value_increment(f"{place}/{purpose}", 1)
        return count == len(self.processes) and set_once(client, f"{place}/opens", _ALL)

    def _hear(self, key: str) -> bool:
        deadline = time.monotonic() + patience()
        while (said := value_within(key, _STEP)) is None:
            gone = lost().union(ended()).intersection(self.processes)
            if gone or time.monotonic() > deadline:
                set_once(connected(), key, _NOT_ALL)
        return said == _ALL


# One for all of a program's teams of the same processes, whose gates would have the same keys.
gate_of = functools.cache(Gate)

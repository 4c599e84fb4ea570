"""How the loaders of several processes keep in step.

As in `mylib._exchange`, they meet at JAX's coordination service. But here a thread of each waits
for as long as it takes, since it is the consumer that loses patience; and whoever leaves wakes up
all who wait.
"""

import threading
import time
from collections import Counter
from typing import Any

import jax

from .._exchange import Judge, Processes, digest, named
from .._world import coordination_client

_LEFT = "left by process "
# For so many milliseconds a thread waits without looking whether it still should.
_LONG = 10_000

_opened: Counter[Processes] = Counter()


class Left(RuntimeError):
    """A process does not come to any more meetings."""


def new_place(processes: Processes) -> str:
    """Where some processes meet for a new purpose. All of them have to ask in the same order."""
    _opened[processes] += 1
    return f"mylib/prefetch/{digest(processes)}/{_opened[processes]}"


class Channel:
    """Meetings of some processes at one place, one after the other."""

    def __init__(self, place: str, processes: Processes):
        self._processes = processes
        self._place = place
        self._turn = 0
        self._left = threading.Event()
        self._since: float | None = None

    def meet(self, mine: str, judge: Judge) -> str:
        """Says something to the others, and returns what the last to come makes of it all."""
        if len(self._processes) == 1:
            return judge({self._processes[0]: mine})
        if self._left.is_set():
            self.leave()
        self._since = time.monotonic()
        client, here = self._client(), self._here()
        client.key_value_set(f"{here}/said/{jax.process_index()}", mine)
        if client.key_value_increment(f"{here}/count", 1) == len(self._processes):
            self._conclude(judge(self._said()))
        judgement = self._judgement()
        self._since = None
        if judgement.startswith(_LEFT):
            raise Left(
                f"process {judgement.removeprefix(_LEFT)} has left its loop, and makes no more "
                "batches. Let all processes leave it after the same batch"
            )
        self._turn += 1
        if jax.process_index() == self._processes[0] and self._turn > 1:
            # Whoever has been here has heard all that was judged before.
            client.key_value_delete(f"{self._place}/{self._turn - 2}/")
        return judgement

    def leave(self) -> None:
        """Ends the next meeting, or the one that is under way, for all who are or will be there."""
        self._left.set()
        if len(self._processes) > 1 and coordination_client() is not None:
            self._conclude(f"{_LEFT}{jax.process_index()}")

    def waited(self, since: float) -> float:
        """For how many seconds the others have been waited for, counted from `since`."""
        begun = self._since
        return 0.0 if begun is None else time.monotonic() - max(begun, since)

    def missing(self) -> str:
        """Who has not come yet."""
        said = self._said()
        return named([i for i in self._processes if i not in said] or self._processes)

    def _here(self) -> str:
        return f"{self._place}/{self._turn}"

    def _client(self) -> Any:
        client = coordination_client()
        if client is None:
            raise RuntimeError(
                "the processes can't talk to each other: call jax.distributed.initialize() at the "
                "start of each, or write check=False"
            )
        return client

    def _said(self) -> dict[int, str]:
        said = self._client().key_value_dir_get(f"{self._here()}/said/")
        return {int(key.rsplit("/", 1)[1]): value for key, value in said}

    def _conclude(self, judgement: str) -> None:
        try:
            self._client().key_value_set(f"{self._here()}/judgement", judgement)
        except jax.errors.JaxRuntimeError as error:
            # Somebody was quicker, and that holds.
            if "ALREADY_EXISTS" not in str(error):
                raise

    def _judgement(self) -> str:
        while True:
            try:
                return self._client().blocking_key_value_get(f"{self._here()}/judgement", _LONG)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise

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

from .._compat import CoordinationClient, coordination_client, names
from .._processes import Judge, Processes, digest, named

# What stands in place of a judgement when a process does not come. No judgement begins so.
_LEFT = "left by process "
_FAILED = "failed: "
# In milliseconds. Waiting has to have a limit there; then a thread waits again.
_LONG = 10_000

# How many channels some processes have opened, in several threads.
_opened: Counter[Processes] = Counter()
_opening = threading.Lock()


class Channel:
    """Meetings of some processes, one after the other.

    All of them have to open their channels in the same order. A channel at which others have waited
    in vain, and have left before the first meeting, is passed over.
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
        judgement = self._meet(mine, judge)
        while judgement.startswith(_LEFT) and self._turn == 0 and not self._has_left:
            self._pass_over()
            judgement = self._meet(mine, judge)
        self._since = None
        if judgement.startswith(_LEFT):
            raise RuntimeError(
                f"process {judgement.removeprefix(_LEFT)} has left its loop, and makes no more "
                "batches. Let all processes leave it after the same batch"
            )
        if judgement.startswith(_FAILED):
            raise RuntimeError(json.loads(judgement.removeprefix(_FAILED)))
        self._turn += 1
        if self.me == self._processes[0] and self._turn > 1:
            # Whoever has been here has heard all that was judged before.
            self._client().key_value_delete(f"{self._place}/{self._turn - 2}/")
        return judgement

    def leave(self) -> None:
        """Ends the next meeting, or the one that is under way, for all who are or will be there."""
        with self._ending:
            self._has_left = True
            if not self._ended:
                self._quietly(lambda: self._conclude(f"{_LEFT}{self.me}"))

    def fail(self, why: str) -> None:
        """Leaves, for the thread that meets, and tells the others why, without waiting for them."""
        with self._ending:
            # A name of a file, say, may have bytes that are no text.
            self._quietly(lambda: self._tell(f"{_FAILED}{json.dumps(why)}"))
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
        said = self._said()
        return named([i for i in self._processes if i not in said] or self._processes)

    def _open(self) -> None:
        with _opening:
            _opened[self._processes] += 1
            number = _opened[self._processes]
        self._place, self._turn = f"mylib/prefetch/{digest(self._processes)}/{number}", 0

    def _tell(self, farewell: str) -> None:
        """Says it at the first meeting to which others may still come."""
        while not self._conclude(farewell):
            holds = self._client().blocking_key_value_get(f"{self._here()}/judgement", _LONG)
            if holds.startswith(_LEFT) and self._turn == 0 and not self._has_left:
                self._pass_over()
            elif holds.startswith((_LEFT, _FAILED)):
                return
            else:
                # All were there, and this process has not heard what came of it.
                self._turn += 1

    def _pass_over(self) -> None:
        with self._ending:
            self._close()
            self._open()

    def _close(self) -> None:
        # The last one tidies up.
        client = self._client()
        if client.key_value_increment(f"{self._place}/closed", 1) == len(self._processes):
            client.key_value_delete(f"{self._place}/")

    def _quietly(self, tell: Callable[[], object]) -> None:
        if len(self._processes) > 1 and coordination_client() is not None:
            try:
                tell()
            except jax.errors.JaxRuntimeError:
                # Where they meet is gone: whoever waits there has had an error of their own.
                pass

    def _meet(self, mine: str, judge: Judge) -> str:
        client, here = self._client(), self._here()
        if self._has_left:
            # When that was said, the meeting was another one.
            self._conclude(f"{_LEFT}{self.me}")
        client.key_value_set(f"{here}/said/{self.me}", mine)
        if client.key_value_increment(f"{here}/count", 1) == len(self._processes):
            self._conclude(judge(self._said()))
        while True:
            try:
                return client.blocking_key_value_get(f"{here}/judgement", _LONG)
            except jax.errors.JaxRuntimeError as error:
                if names.TEXT_DEADLINE not in str(error):
                    raise

    def _conclude(self, judgement: str) -> bool:
        """Says what came of the meeting. Whether that holds: somebody may have been quicker."""
        try:
            self._client().key_value_set(f"{self._here()}/judgement", judgement)
        except jax.errors.JaxRuntimeError as error:
            if names.TEXT_ALREADY_EXISTS not in str(error):
                raise
            return False
        return True

    def _said(self) -> dict[int, str]:
        said = self._client().key_value_dir_get(f"{self._here()}/said/")
        return {int(key.rsplit("/", 1)[1]): value for key, value in said}

    def _here(self) -> str:
        return f"{self._place}/{self._turn}"

    def _client(self) -> CoordinationClient:
        client = coordination_client()
        if client is None:
            raise RuntimeError(
                "the processes can't talk to each other: call jax.distributed.initialize() at the "
                "start of each, or write check=False"
            )
        return client

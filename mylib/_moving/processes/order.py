"""The calls that processes make together, in their order, and the arrays that they send in them."""

import threading
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..._core.errors import MylibError
from ..._core.text import apart, counted
from .coordination import OneThread, Processes
from .environment import TIMEOUT, patience
from .groups import digest, named, text_of

IN_ORDER = "All processes must make the same calls in the same order"

# Remember at most this many calls that other processes aren't known to have made.
_REMEMBERED = 1000
# After this many seconds, other processes have read what a process has found.
_TOLD = 1.5

# The account of a process that has made no call.
NOTHING = {
    "count": 0,
    "equal": 0,
    "digests": [],
    "texts": None,
    "differs": None,
    "arrived": 0,
    "ready": 0,
}


class TransferError(MylibError, RuntimeError):
    """A transfer between processes can't be made, one of them has not taken part in it, or they
    have made other calls, or the same in another order.

    !!! Example

        ```python
        def moved(x, mesh):
            try:
                return mylib.mpmd.transfer(x, P("data"), mesh=mesh)
            except mylib.mpmd.TransferError as error:
                print(error)  # which process is missing, and where
                raise
        ```
    """


class Turn(NamedTuple):
    """A call of several processes. The digest is of this and all earlier calls of its lane."""

    lane: "Lane"
    number: int
    digest: str
    text: str


@dataclass
class Pending:
    """The arrays that this process gives or takes in a call."""

    call: Turn
    # What it takes; or what it gives, and nothing once that is ready: the other process tells only
    # once a second that it has got it. The type of `jax.Array`s does not know `is_ready`.
    arrays: tuple[Any, ...]
    since: float = field(default_factory=time.monotonic)
    # When the other process was known to have it ready.
    sent: float | None = None

    def is_ready(self) -> bool:
        return all(x.is_ready() for x in self.arrays)


class Lane:
    """The calls of the same processes, each with a description. All processes must make the same.

    Each process compares a running digest with two others, its neighbours. What one finds is passed
    on, so it costs as much for many processes as for three. Only two processes send arrays.
    """

    def __init__(self, name: str, processes: Processes, me: int):
        self.name = name
        self.processes = processes
        self.me = me
        self.only = OneThread()
        place = processes.index(me)
        self.neighbours = {processes[place - 1], processes[(place + 1) % len(processes)]}
        self.count, self.digest = 0, ""
        self._lock = threading.RLock()
        self._calls: dict[int, Turn] = {}
        # By neighbour: the last call that is known to be equal, here and there.
        self._equal = dict.fromkeys(self.neighbours, 0)
        self._equal_there = dict.fromkeys(self.neighbours, 0)
        # By neighbour: the first call that is another one there, and its description here.
        self._differs: dict[int, tuple[int, str]] = {}
        # By number of the call, until the other process has got it, and until it has come.
        self._gives: dict[int, Pending] = {}
        self._takes: dict[int, Pending] = {}
        # What the other process has told: how many calls it has made, up to which of them all that
        # it takes has arrived, and all that it gives is ready.
        self._told: dict[str, Any] = NOTHING
        # When a connection broke, and how.
        self._broken: tuple[float, str] | None = None

    def call(self, text: str) -> Turn:
        with self._lock:
            self.count, self.digest = self.count + 1, digest([self.digest, text])[:16]
            self._calls[self.count] = call = Turn(self, self.count, self.digest, text)
            self._calls.pop(self.count - _REMEMBERED, None)
            return call

    def give(self, call: Turn, arrays: tuple[Any, ...]) -> None:
        with self._lock:
            self._gives[call.number] = Pending(call, arrays)

    def take(self, call: Turn, arrays: tuple[Any, ...]) -> None:
        with self._lock:
            self._takes[call.number] = Pending(call, arrays)

    def stop(self) -> None:
        """Forgets what is on its way."""
        with self._lock:
            self._gives.clear()
            self._takes.clear()
            self._broken = None

    def look(self) -> str | None:
        """Crosses out what has arrived, and lets go of what can be sent. Returns how a connection
        broke: late, because if another process has ended it, that tells why.
        """
        with self._lock:
            takes = list(self._takes.values())
            for move in self._gives.values():
                move.arrays = () if move.is_ready() else move.arrays
        for move in takes:
            if all(_has_come(x, move.call.number <= self._told["ready"]) for x in move.arrays):
                error = _error_of(move.arrays)
                with self._lock:
                    self._takes.pop(move.call.number, None)
                    if error is not None and self._broken is None:
                        peer = min(self.neighbours)
                        text = f"{move.call.text}: process {peer} broke off: {error}"
                        self._broken = time.monotonic(), text
        if self._broken is None or time.monotonic() - self._broken[0] <= _TOLD:
            return None
        (_, text), self._broken = self._broken, None
        return text

    def is_settled(self) -> bool:
        with self._lock:
            equal_calls = {*self._equal.values(), *self._equal_there.values()}
            return equal_calls == {self.count} and not (self._gives or self._takes or self._broken)

    def done(self, since: float = 0.0) -> int:
        """How many calls this process has made, up to the first that gives what is not ready. Only
        calls after a moment can wait for what came then.
        """
        with self._lock:
            gives = self._gives.items()
            late = [n for n, move in gives if move.since > since and not move.is_ready()]
            return min(late, default=self.count + 1) - 1

    def oldest(self) -> Pending | None:
        """The arrays that this process has waited for longest."""
        with self._lock:
            return min(self._takes.values(), key=lambda move: move.since, default=None)

    def account(self, neighbour: int, leaves: bool) -> dict[str, Any]:
        """What a neighbour has to know of the calls here. If this process `leaves`, with the text
        of each, as it can't be asked what was another call there.
        """
        with self._lock:
            first = self._equal_there[neighbour]
            calls = [(n, call) for n, call in self._calls.items() if n > first]
            return {
                "count": self.count,
                "equal": self._equal[neighbour],
                "digests": [(n, call.digest) for n, call in calls],
                "texts": [(n, call.text) for n, call in calls] if leaves else None,
                "differs": self._differs.get(neighbour),
                "arrived": min(self._takes, default=self.count + 1) - 1,
                "ready": self.done(),
            }

    def compare(self, neighbour: int, theirs: dict[str, Any]) -> str | None:
        """The problem, if any. Calls that differ are reported once both processes know both."""
        with self._lock:
            self._told = theirs
            for number in [n for n in self._gives if n <= theirs["arrived"]]:
                del self._gives[number]
            return self._differing(neighbour, theirs) or self._late(neighbour)

    def _differing(self, neighbour: int, theirs: dict[str, Any]) -> str | None:
        self._equal_there[neighbour] = theirs["equal"]
        common = [(n, sent) for n, sent in theirs["digests"] if n in self._calls]
        differs = next((n for n, sent in common if self._calls[n].digest != sent), None)
        if differs is None:
            self._equal[neighbour] = common[-1][0] if common else self._equal[neighbour]
            equal = min(*self._equal.values(), *self._equal_there.values())
            for n in [n for n in self._calls if n <= equal]:
                del self._calls[n]
            return None
        self._differs[neighbour] = differs, self._calls[differs].text
        told = dict([*(theirs["texts"] or ()), *filter(None, [theirs["differs"]])])
        if differs not in told:
            return None
        texts = {self.me: self._calls[differs].text, neighbour: told[differs]}
        (first, text), (second, instead) = sorted(texts.items())
        return (
            f"call {differs} of {named(self.processes)} is {text} in process {first}, but "
            f"{instead} in process {second}{apart(text, instead)}. {IN_ORDER}"
        )

    def _late(self, peer: int) -> str | None:
        limit, now = patience(), time.monotonic()
        takes = [(move, "waits for", "has not sent it") for move in self._takes.values()]
        gives = [(move, "sends", "has not asked for it") for move in self._gives.values()]
        for move, *_ in takes:
            if move.call.number <= self._told["ready"]:
                move.sent = move.sent or now
        for move, does, lacks in takes + gives:
            is_missing = move.call.number > self._told["count"]
            mine = f"process {self.me} {does} {move.call.text}, but process {peer}"
            if is_missing and self._told["texts"] is not None:
                return (
                    f"{mine} has ended after {counted(self._told['count'], 'call')} of these "
                    f"processes, and this is call {move.call.number}. {IN_ORDER}"
                )
            if is_missing and now - move.since > limit:
                return (
                    f"{mine} {lacks} within {limit:g} s. All processes must make the same "
                    f"transfers. If one is slow, set {TIMEOUT} to more seconds"
                )
            if move.sent is not None and now - move.sent > limit:
                return (
                    f"{mine} has offered it for {limit:g} s, and it has not arrived: the network "
                    "between them is slow or cut off, or a connection from elsewhere holds a port "
                    f"of one of them. If it is slow, set {TIMEOUT} to more seconds; "
                    "MYLIB_TRANSPORT=program needs no such port"
                )
        return None


def lane_name(stream: str, processes: Processes) -> str:
    return f"{stream}/{text_of(processes)}"


def _has_come(x: Any, is_sent: bool) -> bool:
    # If the result of the transfer, which may be this array itself, has been donated, nothing here
    # says whether it has come. It has if the other process could send it.
    return is_sent if x.is_deleted() else x.is_ready()


def _error_of(arrays: tuple[Any, ...]) -> str | None:
    for x in arrays:
        try:
            x.block_until_ready()
        except RuntimeError as error:
            if not x.is_deleted():
                return str(error).splitlines()[0]
    return None

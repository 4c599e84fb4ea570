"""Arrays on their way between this process and others: what is late, and what waits in a circle."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from .._processes import Processes, Watch, patience

# What has been under way for as many seconds may be blocked.
_OLD = 1.0
# After as many seconds a process has told others what it has found.
_TOLD = 1.5

_order = count()


class Delivery(NamedTuple):
    """A call that sends arrays between this process and another one, either way."""

    platform: str
    peer: int
    number: int
    # Of this and all earlier calls between them.
    digest: str
    text: str


@dataclass
class Pending:
    """What this process gives or takes in a call."""

    call: Delivery
    # What it takes; or arrays that are ready when what it gives is, and none once they are: the
    # other process tells only once a second that it has got it. The type of `jax.Array`s does not
    # know `is_ready`.
    arrays: tuple[Any, ...]
    order: int = field(default_factory=lambda: next(_order))
    since: float = field(default_factory=time.monotonic)

    # When the other process was known to have it ready.
    sent: float | None = None

    def age(self) -> float:
        return time.monotonic() - self.since

    def is_late(self, count: int) -> bool:
        """Whether the other process, which has made so many calls, should have made this one."""
        return self.call.number > count and self.age() > patience()


@dataclass
class _Pair:
    """What is under way between this process and another one, by number of the call."""

    stream: str
    processes: Processes
    gives: dict[int, Pending] = field(default_factory=dict)
    takes: dict[int, Pending] = field(default_factory=dict)
    # What the other process has told: how many calls it has made, up to which of them all that it
    # takes has arrived, and all that it gives is ready; from which one on it gives only after it
    # has got something itself, and what.
    count: int = 0
    arrived: int = 0
    ready: int = 0
    blocked: tuple[int, list[list[Any]]] | None = None
    # When a connection broke, and how.
    broken: tuple[float, str] | None = None


class Transfers:
    """`break_off` ends the transfers from some processes, so that waiting for them raises."""

    def __init__(self, watch: Watch, break_off: Callable[[Processes], None]):
        self._watch = watch
        self._break_off = break_off
        self._pairs: dict[tuple[str, int], _Pair] = {}
        self._lock = threading.Lock()

    def count(self, platform: str, peer: int, text: str) -> Delivery:
        """The next call between this process and another one, in either direction."""
        stream, processes = f"arrays on {platform}", tuple(sorted((self._watch.me, peer)))
        with self._lock:
            self._pairs.setdefault((platform, peer), _Pair(stream, processes))
        number, digest = self._watch.count(stream, processes, text)
        return Delivery(platform, peer, number, digest, text)

    def gives(self, call: Delivery, ready: tuple[Any, ...]) -> None:
        with self._lock:
            self._pairs[call.platform, call.peer].gives[call.number] = Pending(call, ready)

    def takes(self, call: Delivery, arrays: tuple[Any, ...]) -> None:
        with self._lock:
            self._pairs[call.platform, call.peer].takes[call.number] = Pending(call, arrays)

    def is_idle(self) -> bool:
        with self._lock:
            return not any(pair.gives or pair.takes or pair.broken for pair in self._pairs.values())

    def look(self) -> None:
        """Crosses out what has arrived, and lets go of what can be sent."""
        with self._lock:
            pairs = list(self._pairs.values())
            waiting = [(pair, n, one) for pair in pairs for n, one in pair.takes.items()]
            for one in (one for pair in pairs for one in pair.gives.values()):
                if _are_ready(one.arrays):
                    one.arrays = ()
        for pair, number, one in waiting:
            if all(_has_come(x, number <= pair.ready) for x in one.arrays):
                error = _error_of(one.arrays)
                with self._lock:
                    pair.takes.pop(number, None)
                if error is not None and pair.broken is None:
                    text = f"{one.call.text}: process {one.call.peer} broke off: {error}"
                    pair.broken = time.monotonic(), text
        for pair in pairs:
            # If another process has ended the connection, it tells why.
            if pair.broken is not None and time.monotonic() - pair.broken[0] > _TOLD:
                self._watch.fail(pair.processes, pair.broken[1])
                pair.broken = None

    def fail(self, processes: Processes) -> None:
        with self._lock:
            for pair in self._pairs.values():
                if {*pair.processes}.issubset(processes):
                    pair.gives.clear()
                    pair.takes.clear()
                    pair.broken = None
        self._break_off(processes)

    def account(self, peer: int) -> dict[str, Any]:
        """What another process has to know, by platform."""
        with self._lock:
            waits = self._oldest()
            return {
                platform: self._account(pair, waits)
                for (platform, index), pair in self._pairs.items()
                if index == peer
            }

    def _account(self, pair: _Pair, waits: Pending | None) -> dict[str, Any]:
        count, _ = self._watch.counted(pair.stream, pair.processes)
        late = [one for one in pair.gives.values() if not _are_ready(one.arrays)]
        blocked = [x.call.number for x in late if waits is not None and x.order > waits.order]
        return {
            "count": count,
            "arrived": min(pair.takes, default=count + 1) - 1,
            "ready": min((x.call.number for x in late), default=count + 1) - 1,
            "blocked": (min(blocked), self._chain(waits)) if blocked and waits else None,
        }

    def _oldest(self) -> Pending | None:
        """What this process has waited for longest, if that is long."""
        waiting = [one for pair in self._pairs.values() for one in pair.takes.values()]
        oldest = min(waiting, key=lambda one: one.order, default=None)
        return None if oldest is None or oldest.age() < _OLD else oldest

    def _chain(self, waits: Pending) -> list[list[Any]]:
        """What must arrive before this process goes on: who takes it, and what it is. First what
        this process takes, then what its giver takes before it gives that, and so on.
        """
        call = waits.call
        told = self._pairs[call.platform, call.peer].blocked
        link = [self._watch.me, f"{call.text}, from process {call.peer}, call {call.number}"]
        return [link, *(told[1] if told is not None and told[0] <= call.number else ())]

    def compare(self, peer: int, theirs: dict[str, Any]) -> None:
        for (platform, index), pair in list(self._pairs.items()):
            told = theirs.get(platform)
            if index == peer and pair.processes not in self._watch.failures:
                with self._lock:
                    for name, value in (told or {}).items():
                        setattr(pair, name, value)
                    for number in [n for n in pair.gives if n <= pair.arrived]:
                        del pair.gives[number]
                self._refuse_late(pair, peer)
                self._refuse_circle()

    def _refuse_late(self, pair: _Pair, peer: int) -> None:
        limit, now = patience(), time.monotonic()
        with self._lock:
            for one in (one for n, one in pair.takes.items() if n <= pair.ready):
                one.sent = one.sent or now
            gives, takes = list(pair.gives.values()), list(pair.takes.values())
        lost = [x for x in takes if x.sent is not None and now - x.sent > limit]
        for late, does, lacks in (
            ([x for x in takes if x.is_late(pair.count)], "waits for", "has not sent it within"),
            ([x for x in gives if x.is_late(pair.count)], "sends", "has not asked for it within"),
            (lost, "waits for", "sent it, but it has not arrived within"),
        ):
            for one in late[:1]:
                self._watch.fail(
                    pair.processes,
                    f"process {self._watch.me} {does} {one.call.text}, but process {peer} {lacks} "
                    f"{limit:g} s. All processes must make the same transfers. If one is slow, set "
                    "MYLIB_EXCHANGE_TIMEOUT to more seconds",
                )

    def _refuse_circle(self) -> None:
        with self._lock:
            waits = self._oldest()
            chain = [] if waits is None else self._chain(waits)
        others = chain[1:]
        if (link := chain[:1]) and link[0] in others:
            circle = others[: others.index(link[0]) + 1]
            first = circle.index(min(circle))
            steps = [f"process {who} for {what}" for who, what in circle[first:] + circle[:first]]
            self._watch.fail(
                tuple(sorted({who for who, _ in circle})),
                f"processes wait for each other: {'; '.join(steps)}. Each gives what the one "
                "before it waits for only after that. All processes must make the same transfers "
                "in the same order",
            )


def _are_ready(arrays: tuple[Any, ...]) -> bool:
    return all(x.is_ready() for x in arrays)


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

"""Sees to it that what is sent is taken, and that what is waited for comes, or fails.

JAX's transfers wait for ever if their other side never comes. A thread keeps a list of those that
are under way. Once a second it tells the other processes which of them are old, and reads theirs:
nearly all transfers end before they get on such a list.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from .._compat import CoordinationClient, coordination_client
from .._processes import patience

# Seconds between two looks at arrays on their way, and between two exchanges of lists.
_LOOK = 0.05
_EXCHANGE = 1.0
# The same if nothing is under way here: another process may have failed.
_IDLE = 5.0
# A transfer gets on the list after as many seconds.
_OLD = 1.0

_PLACE = "mylib/links/accounts"


@dataclass(frozen=True)
class Pending:
    """A transfer that is under way."""

    name: str
    text: str
    arrays: tuple[Any, ...] = ()  # `jax.Array`s, whose type does not know `is_ready`
    since: float = field(default_factory=time.monotonic)

    def age(self) -> float:
        return time.monotonic() - self.since


@dataclass
class _Peer:
    """What is under way between this process and another one."""

    offers: dict[int, Pending] = field(default_factory=dict)
    wants: dict[int, Pending] = field(default_factory=dict)
    # Arrived, but the sender may not know it yet.
    taken: set[int] = field(default_factory=set)
    failure: str | None = None
    published: str = ""

    def idle(self) -> bool:
        return not (self.offers or self.wants or self.taken)

    def account(self) -> dict[str, Any]:
        def old(pending: dict[int, Pending]) -> dict[str, list[str]]:
            return {
                str(key): [one.name, one.text] for key, one in pending.items() if one.age() >= _OLD
            }

        taken = sorted(self.taken)
        return {
            "offers": old(self.offers),
            "wants": old(self.wants),
            "taken": taken,
            "failure": self.failure,
        }


# A process's list of its old transfers, as another one reads it: names and descriptions by number.
_Listed = Mapping[str, list[str]]
_NOTHING: dict[str, Any] = {"offers": {}, "wants": {}, "taken": [], "failure": None}


class Watch:
    """`fail(peer, text)` ends the transfers from a process, so that waiting for them raises."""

    def __init__(self, client: CoordinationClient, me: int, fail: Callable[[int, str], None]):
        self._client = client
        self._me = me
        self._fail = fail
        self._peers: dict[int, _Peer] = {}
        self._lock = threading.Lock()
        self._busy = threading.Event()
        threading.Thread(target=self._run, name="mylib-links", daemon=True).start()

    def offered(self, peer: int, key: int, name: str, text: str) -> None:
        with self._lock:
            self._peer(peer).offers[key] = Pending(name, text)
        self._busy.set()

    def wanted(
        self, peer: int, key: int, name: str, text: str, arrays: tuple[jax.Array, ...]
    ) -> None:
        with self._lock:
            self._peer(peer).wants[key] = Pending(name, text, arrays)
        self._busy.set()

    def failure(self, peer: int) -> str | None:
        return self._peer(peer).failure

    def under_way(self) -> int:
        """The number of transfers of this process that have not ended, as far as it knows."""
        with self._lock:
            return sum(len(one.offers) + len(one.wants) for one in self._peers.values())

    def _peer(self, index: int) -> _Peer:
        return self._peers.setdefault(index, _Peer())

    def _run(self) -> None:
        exchanged = 0.0
        while True:
            if self._busy.wait(_IDLE):
                time.sleep(_LOOK)
                self._see_arrivals()
                if time.monotonic() - exchanged < _EXCHANGE:
                    continue
            exchanged = time.monotonic()
            try:
                self._exchange()
            except jax.errors.JaxRuntimeError:
                # The service does not answer. JAX itself ends processes that have lost it.
                pass
            if coordination_client() is not self._client:
                return  # the processes have parted
            with self._lock:
                if all(one.idle() for one in self._peers.values()):
                    self._busy.clear()

    def _see_arrivals(self) -> None:
        with self._lock:
            waiting = [
                (index, one, key, want)
                for index, one in self._peers.items()
                for key, want in one.wants.items()
            ]
        for index, one, key, want in waiting:
            if all(x.is_deleted() or x.is_ready() for x in want.arrays):
                broken = _error_of(want.arrays)
                with self._lock:
                    one.wants.pop(key, None)
                    if broken is None:
                        one.taken.add(key)
                if broken is not None:
                    self._end(index, f"{_what(want)} from process {index} broke off: {broken}")

    def _exchange(self) -> None:
        found = self._client.key_value_dir_get(f"{_PLACE}/{self._me}/")
        accounts = {int(key.rsplit("/", 1)[1]): json.loads(text) for key, text in found}
        with self._lock:
            peers = list(self._peers.items())
        for index, one in peers:
            theirs = accounts.get(index, _NOTHING)
            with self._lock:
                self._compare(one, theirs)
            if one.failure is None:
                text = theirs["failure"] or self._complaint(index, one, theirs)
                if text:
                    self._end(index, text)
            with self._lock:
                text = json.dumps(one.account())
            if text != one.published:
                self._client.key_value_set(
                    f"{_PLACE}/{index}/{self._me}", text, allow_overwrite=True
                )
                one.published = text

    def _compare(self, one: _Peer, theirs: dict[str, Any]) -> None:
        """Crosses out what has ended on both sides."""
        for key in theirs["taken"]:
            one.offers.pop(key, None)
        if one.published:
            told = set(json.loads(one.published)["taken"])
            one.taken -= {key for key in told if str(key) not in theirs["offers"]}

    def _complaint(self, index: int, one: _Peer, theirs: dict[str, Any]) -> str | None:
        """What is wrong between this process and another one; None if nothing is, so far."""
        with self._lock:
            offers, wants = dict(one.offers), dict(one.wants)
        return (
            self._differs(index, wants, theirs["offers"], mine_are_wants=True)
            or self._differs(index, offers, theirs["wants"], mine_are_wants=False)
            or self._overdue(index, wants, theirs["offers"], mine_are_wants=True)
            or self._overdue(index, offers, theirs["wants"], mine_are_wants=False)
        )

    def _differs(
        self, index: int, mine: dict[int, Pending], theirs: _Listed, *, mine_are_wants: bool
    ) -> str | None:
        """Whether both sides mean the same array, but not the same shape, dtype or placements."""
        unmatched = {name: text for key, (name, text) in theirs.items() if int(key) not in mine}
        for key, pending in mine.items():
            other = unmatched.get(pending.name)
            if other is None or str(key) in theirs:
                continue
            if mine_are_wants:
                giver, sent, taker, asked = index, other, self._me, pending.text
            else:
                giver, sent, taker, asked = self._me, pending.text, index, other
            return (
                f"process {giver} sends {sent}, but process {taker} asks for {asked}: "
                f"{pending.name}. All processes must make the same transfers"
            )
        return None

    def _overdue(
        self, index: int, mine: dict[int, Pending], theirs: _Listed, *, mine_are_wants: bool
    ) -> str | None:
        limit = patience()
        late = [one for key, one in mine.items() if one.age() > limit and str(key) not in theirs]
        if not late:
            return None
        does = "waits for" if mine_are_wants else "sends"
        lacks = "sent it" if mine_are_wants else "asked for it"
        instead = ""
        if theirs:
            name, text = next(iter(theirs.values()))
            they_do = "sends" if mine_are_wants else "waits for"
            instead = f" It {they_do} {text} ({name}) instead."
        return (
            f"process {self._me} {does} {late[0].text} ({late[0].name}), but process {index} has "
            f"not {lacks} within {limit:g} s.{instead} All processes must make the same transfers. "
            "If one is slow, set MYLIB_EXCHANGE_TIMEOUT to more seconds"
        )

    def _end(self, index: int, text: str) -> None:
        with self._lock:
            one = self._peer(index)
            if one.failure is not None:
                return
            one.failure = text
            one.offers.clear()
            one.wants.clear()
            one.taken.clear()
        self._fail(index, text)


def _what(pending: Pending) -> str:
    return f"{pending.text} ({pending.name})"


def _error_of(arrays: tuple[jax.Array, ...]) -> str | None:
    try:
        jax.block_until_ready([x for x in arrays if not x.is_deleted()])
    except jax.errors.JaxRuntimeError as error:
        return str(error).splitlines()[0]
    return None

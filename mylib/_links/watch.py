"""Sees to it that what is sent is taken, and that what is waited for comes, or fails.

JAX's transfers wait for ever if their other side never comes. A thread keeps a list of those that
are under way. Once a second it tells the other processes which of them are old, and reads theirs:
nearly all transfers end before they get on such a list.
"""

import atexit
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from .._compat import CoordinationClient, coordination_client
from .._processes import patience
from .leaf import Message

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

    message: Message
    arrays: tuple[Any, ...] = ()  # `jax.Array`s, whose type does not know `is_ready`
    since: float = field(default_factory=time.monotonic)

    def age(self) -> float:
        return time.monotonic() - self.since


@dataclass
class _Peer:
    """What is under way between this process and another one."""

    offers: dict[int, Pending] = field(default_factory=dict)
    wants: dict[int, Pending] = field(default_factory=dict)
    # What has arrived, but the sender may not know it yet: with the version of the list in which it
    # was told.
    taken: dict[int, int | None] = field(default_factory=dict)
    failure: str | None = None
    version: int = 0
    # The version of the other process's list that was read last.
    read: int = 0
    published: dict[str, Any] = field(default_factory=dict)

    def idle(self) -> bool:
        return not (self.offers or self.wants or self.taken)

    def account(self) -> dict[str, Any]:
        def old(pending: dict[int, Pending]) -> dict[str, Any]:
            return {str(key): one.message for key, one in pending.items() if one.age() >= _OLD}

        return {
            "offers": old(self.offers),
            "wants": old(self.wants),
            "taken": sorted(self.taken),
            "failure": self.failure,
            "read": self.read,
        }


# A process's list of its old transfers, as another one reads it.
_Listed = Mapping[str, Message]
_NOTHING: dict[str, Any] = {
    "offers": {},
    "wants": {},
    "taken": [],
    "failure": None,
    "read": 0,
    "version": 0,
}


class Watch:
    """`fail(peer, text)` ends the transfers from a process, so that waiting for them raises."""

    def __init__(self, client: CoordinationClient, me: int, fail: Callable[[int, str], None]):
        self._client = client
        self._me = me
        self._fail = fail
        self._peers: dict[int, _Peer] = {}
        self._lock = threading.Lock()
        self._busy = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="mylib-links", daemon=True)
        self._thread.start()
        # Before JAX leaves the other processes: they must know what has arrived here.
        atexit.register(self._end_thread)

    def offered(self, peer: int, key: int, message: Message) -> None:
        with self._lock:
            self._peer(peer).offers[key] = Pending(message)
        self._busy.set()

    def wanted(self, peer: int, key: int, message: Message, arrays: tuple[jax.Array, ...]) -> None:
        with self._lock:
            self._peer(peer).wants[key] = Pending(message, arrays)
        self._busy.set()

    def failure(self, peer: int) -> str | None:
        one = self._peers.get(peer)
        return None if one is None else one.failure

    def _peer(self, index: int) -> _Peer:
        return self._peers.setdefault(index, _Peer())

    def _run(self) -> None:
        exchanged = 0.0
        while not self._ended:
            if self._busy.wait(_IDLE):
                time.sleep(_LOOK)
                self._see_arrivals()
                if time.monotonic() - exchanged < _EXCHANGE and not self._ended:
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

    def _end_thread(self) -> None:
        """Lets it make a last exchange."""
        self._ended = True
        self._busy.set()
        self._thread.join(_IDLE)

    def _see_arrivals(self) -> None:
        with self._lock:
            waiting = [
                (index, one, key, want)
                for index, one in self._peers.items()
                for key, want in one.wants.items()
            ]
        for index, one, key, want in waiting:
            if all(map(_has_come, want.arrays)):
                broken = _error_of(want.arrays)
                with self._lock:
                    one.wants.pop(key, None)
                    if broken is None:
                        one.taken[key] = None
                if broken is not None:
                    self._end(index, f"{want.message.text}: process {index} broke off: {broken}")

    def _exchange(self) -> None:
        found = self._client.key_value_dir_get(f"{_PLACE}/{self._me}/")
        accounts = {int(key.rsplit("/", 1)[1]): _read(text) for key, text in found}
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
                account = one.account()
            if account != one.published:
                self._publish(index, one, account)

    def _publish(self, index: int, one: _Peer, account: dict[str, Any]) -> None:
        # To have read something is no news, or two processes would tell each other for ever.
        if {**account, "read": 0} != {**one.published, "read": 0}:
            one.version += 1
        text = json.dumps({**account, "version": one.version})
        self._client.key_value_set(f"{_PLACE}/{index}/{self._me}", text, allow_overwrite=True)
        one.published = account
        with self._lock:
            for key in account["taken"]:
                if one.taken.get(key, 0) is None:
                    one.taken[key] = one.version

    def _compare(self, one: _Peer, theirs: dict[str, Any]) -> None:
        """Crosses out what has ended on both sides."""
        one.read = theirs["version"]
        for key in theirs["taken"]:
            one.offers.pop(key, None)
        known = [k for k, told in one.taken.items() if told is not None and told <= theirs["read"]]
        for key in known:
            del one.taken[key]

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
        """Whether an array is another one here than there. Where it goes may differ: that is
        another transfer of it.
        """
        known = {name: told for message in theirs.values() for name, told in message.facts.items()}
        for one in mine.values():
            for name, told in one.message.facts.items():
                if name in known and known[name] != told:
                    giver, sent, taker, asked = index, known[name], self._me, told
                    if not mine_are_wants:
                        giver, sent, taker, asked = taker, asked, giver, sent
                    return (
                        f"process {giver} sends {sent}, but process {taker} asks for {asked}: "
                        f"{name}. All processes must make the same transfers"
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
            they_do = "sends" if mine_are_wants else "waits for"
            instead = f" It {they_do} {next(iter(theirs.values())).text} instead."
        return (
            f"process {self._me} {does} {late[0].message.text}, but process {index} has "
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


def _read(text: str) -> dict[str, Any]:
    account = json.loads(text)
    for name in ("offers", "wants"):
        account[name] = {key: Message(*message) for key, message in account[name].items()}
    return account


def _has_come(x: Any) -> bool:
    try:
        return x.is_ready()
    except RuntimeError:
        # The result of the transfer, which may be this array itself, has been donated.
        if not x.is_deleted():
            raise
        return True


def _error_of(arrays: tuple[Any, ...]) -> str | None:
    for x in arrays:
        try:
            x.block_until_ready()
        except RuntimeError as error:
            if not x.is_deleted():
                return str(error).splitlines()[0]
    return None

"""Sees to it that processes make the same calls, and that what is sent arrives, or fails.

JAX's transfers wait for ever if their other side never comes, and its programs mix up numbers if
their order differs. A thread tells the other processes once a second what has been called here, and
reads what they have. Nothing is told twice, or of what has ended everywhere.
"""

import atexit
import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

import jax

from .._compat import CoordinationClient, coordination_client
from .groups import members, named, text_of
from .order import IN_ORDER, Lane, TransferError
from .series import Processes, Series, connected

_log = logging.getLogger("mylib")

# Seconds between two looks at arrays on their way, and between two exchanges of accounts.
_LOOK = 0.05
_EXCHANGE = 1.0
# The same if nothing is under way here: another process may have failed.
_IDLE = 5.0

# As long as it takes two processes to tell each other which of their calls differ.
_EXPLAINS = 5.0

# After as many seconds in a meeting others are told that this process waits there.
_LONG = 1.0

_PLACE = "mylib/accounts"

# The meetings of a program's own calls, by the processes that meet.
MEETINGS: dict[Processes, Series] = {}


class OnTheirWay(Protocol):
    """Arrays on their way between this process and others."""

    def look(self) -> None: ...
    def is_idle(self) -> bool: ...
    def account(self, peer: int) -> Any: ...
    def compare(self, peer: int, theirs: Any) -> None: ...
    def fail(self, processes: Processes) -> None: ...


class Watch:
    """The calls of this process, and the thread that compares them."""

    def __init__(self, client: CoordinationClient):
        self.client = client
        self.me = jax.process_index()
        self.transfers: OnTheirWay | None = None
        # What `mylib.watch` tells and reads in this thread.
        self.also: Callable[[], None] | None = None
        # What is wrong, by the processes that it concerns.
        self.failures: dict[Processes, str] = {}
        self._lanes: dict[str, Lane] = {}
        self._lock = threading.Lock()
        self._news = threading.Condition()
        self._told: dict[int, Any] = {}
        self._exchanged = 0.0
        self._busy = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="mylib-watch", daemon=True)
        self._thread.start()
        # Before JAX leaves the other processes: they must know what has arrived here.
        atexit.register(self._end_thread)

    def count(self, stream: str, processes: Processes, text: str) -> tuple[int, str]:
        """Counts a call. Returns its number, and a digest of all so far, equal in all processes."""
        self.check(processes)
        with self._lock:
            name = _name(stream, processes)
            if name not in self._lanes:
                self._lanes[name] = Lane(processes, self.me)
            lane = self._lanes[name]
            lane.add(text)
            self._busy.set()
            return lane.count, lane.digest

    def counted(self, stream: str, processes: Processes) -> tuple[int, str]:
        """The number of the last call, and the digest."""
        lane = self._lanes.get(_name(stream, processes))
        return (0, "") if lane is None else (lane.count, lane.digest)

    def check(self, processes: Processes) -> None:
        """Raises an error if two of these processes are known to be out of step."""
        if text := self._wrong(processes):
            raise TransferError(text)

    def _wrong(self, processes: Processes) -> str | None:
        known = list(self.failures.items())
        return next((t for some, t in known if len({*some}.intersection(processes)) > 1), None)

    def wait(self, conclusion: Future[str], meeting: Series, what: str) -> str:
        """Waits in a meeting, and raises once two of its processes are known to be out of step."""

        def has_ended() -> bool:
            return conclusion.done() or self._wrong(meeting.processes) is not None

        conclusion.add_done_callback(lambda _: self._tell_waiting())
        try:
            with self._news:
                if not self._news.wait_for(has_ended, _LONG):
                    meeting.waits_for = what
                    self._busy.set()
                    self._news.wait_for(has_ended)
        finally:
            meeting.waits_for = ""
        self.check(meeting.processes)
        return conclusion.result()

    def _tell_waiting(self) -> None:
        with self._news:
            self._news.notify_all()

    def fail(self, processes: Processes, text: str) -> None:
        with self._lock:
            if any({*processes}.issubset(known) for known in self.failures):
                return
            self.failures[processes] = text
        _log.error("%s", text)
        self._busy.set()
        if self.transfers is not None:
            self.transfers.fail(processes)
        self._tell_waiting()

    def is_idle(self) -> bool:
        """Whether all that has been called and sent here is known to have ended well."""
        idle = self.transfers is None or self.transfers.is_idle()
        idle = idle and not any(meeting.waits_for for meeting in MEETINGS.values())
        return idle and all(lane.is_settled() for lane in self._lanes.values())

    def _run(self) -> None:
        while not self._ended:
            if self._busy.wait(_IDLE):
                time.sleep(_LOOK)
                if self.transfers is not None:
                    self.transfers.look()
                if time.monotonic() - self._exchanged < _EXCHANGE and not self._ended:
                    continue
            self._exchanged = time.monotonic()
            try:
                self._exchange()
                if self.also is not None:
                    self.also()
            except jax.errors.JaxRuntimeError:
                # The service does not answer. JAX itself ends processes that have lost it.
                pass
            if coordination_client() is not self.client:
                return  # the processes have parted
            with self._lock:
                if self.is_idle():
                    self._busy.clear()

    def wake(self) -> None:
        """Makes it tell and read at once."""
        self._exchanged = 0.0
        self._busy.set()

    def _end_thread(self) -> None:
        """Lets it make a last exchange."""
        self._ended = True
        self._busy.set()
        self._thread.join(_IDLE)

    def _exchange(self) -> None:
        with self._lock:
            peers = {peer for lane in self._lanes.values() for peer in lane.neighbours}
        if not peers:
            return
        found = self.client.key_value_dir_get(f"{_PLACE}/{self.me}/")
        accounts = {int(key.rsplit("/", 1)[1]): json.loads(text) for key, text in found}
        for peer in peers:
            self._compare(peer, accounts.get(peer, _NOTHING))
        for peer in peers:
            text = json.dumps(self._account(peer))
            if text != self._told.get(peer):
                key = f"{_PLACE}/{peer}/{self.me}"
                self.client.key_value_set(key, text, allow_overwrite=True)
                self._told[peer] = text

    def _account(self, peer: int) -> dict[str, Any]:
        with self._lock:
            lanes = {n: lane for n, lane in self._lanes.items() if peer in lane.neighbours}
            return {
                "failures": {text_of(who): t for who, t in self.failures.items() if peer in who},
                "meets": {
                    text_of(who): (meeting.turn, meeting.waits_for)
                    for who, meeting in list(MEETINGS.items())
                    if meeting.waits_for and peer in who
                },
                "lanes": {name: lane.account(peer) for name, lane in lanes.items()},
                "arrays": {} if self.transfers is None else self.transfers.account(peer),
            }

    def _compare(self, peer: int, theirs: dict[str, Any]) -> None:
        wrong = {tuple(members(who)): text for who, text in theirs["failures"].items()}
        with self._lock:
            for name, told in theirs["lanes"].items():
                lane = self._lanes.get(name)
                if lane is None:
                    continue
                if text := lane.compare(peer, told) or _overtaken(
                    lane, peer, told, theirs["meets"]
                ):
                    wrong[lane.processes] = text
        for processes, text in wrong.items():
            self.fail(processes, text)
        if self.transfers is not None:
            self.transfers.compare(peer, theirs["arrays"])


def _overtaken(lane: Lane, peer: int, told: dict[str, Any], meets: dict[str, Any]) -> str | None:
    """What is wrong if another process waits in a meeting to which this one has not come, and has
    not made a call that this one has made.
    """
    call = lane.after(told["count"])
    for group, (turn, what) in meets.items():
        meeting = MEETINGS.get(tuple(members(group)))
        if call and (meeting is None or meeting.turn <= turn):
            return (
                f"process {peer} waits for process {lane.me} to compare ({what}), but that has "
                f"first made call {told['count'] + 1} of {named(lane.processes)}, which process "
                f"{peer} has not: {call}. {IN_ORDER}"
            )
    return None


_NOTHING: dict[str, Any] = {"failures": {}, "meets": {}, "lanes": {}, "arrays": {}}


def _name(stream: str, processes: Processes) -> str:
    return f"{stream} {text_of(processes)}"


_watches: list[Watch] = []
_starting = threading.Lock()


def watch() -> Watch:
    """The watch of the processes that are connected now."""
    client = connected()
    with _starting:
        if not _watches or _watches[0].client is not client:
            _watches[:] = [Watch(client)]
        return _watches[0]


def counted(stream: str, processes: Processes) -> tuple[int, str]:
    """`Watch.counted`, which is nothing before the first call."""
    return _watches[0].counted(stream, processes) if _watches else (0, "")


def wait_in_step(conclusion: Future[str], meeting: Series, what: str) -> str:
    """`Watch.wait`, which is nothing before the first call."""
    return _watches[0].wait(conclusion, meeting, what) if _watches else conclusion.result()


def read_in_order(processes: Processes, text: str) -> str:
    """The decision of a meeting, or the error that the processes are out of step."""
    if text.startswith("="):
        return text[1:]
    # If transfers differ, the watch knows soon which.
    until = time.monotonic() + (_EXPLAINS if text.startswith("?") else 0)
    while time.monotonic() < until:
        watch().check(processes)
        time.sleep(_LOOK)
    watch().fail(processes, text[1:])
    raise TransferError(text[1:])

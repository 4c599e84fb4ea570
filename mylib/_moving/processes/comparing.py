"""Sees to it that processes make the same calls, and that what is sent arrives, or fails.

JAX's transfers wait for ever if their other side never comes, and its programs mix up numbers if
their order differs. A thread tells the other processes once a second what has been called here, and
reads what they have. Nothing is published twice, or after it has ended everywhere.
"""

import atexit
import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

import jax

from ..._core.compat import CoordinationClient, coordination_client, values_by_process
from .alive import about_lost, lost
from .circle import Waiting, circle_before
from .coordination import Processes, connected
from .environment import patience
from .groups import members, text_of
from .order import NOTHING, Lane, TransferError, Turn, lane_name

_log = logging.getLogger("mylib")

# Seconds between two looks at arrays on their way, and between two exchanges of accounts.
_LOOK = 0.05
_EXCHANGE = 1.0
# The same if nothing is under way here: another process may have failed.
_IDLE = 5.0

# Two processes need this long to tell each other which of their calls differ.
_EXPLAINS = 5.0

# After this many seconds of waiting, tell the others what this process waits for.
_LONG = 1.0
# Each waiting process reads what all waiting processes have told: this many texts a second.
_READ = 100

_ACCOUNTS = "mylib/accounts"
_WAITING = "mylib/waiting"

# Marks of decisions: the call has its answer, or the same processes meet once more for it.
ENDS, GOES_ON = "=", "+"

# The stream of programs on devices of several processes.
PROGRAMS = "programs"


class Comparison:
    """The calls of this process, and the thread that compares them."""

    def __init__(self, client: CoordinationClient):
        self.client = client
        self.me = jax.process_index()
        patience()  # an error of the environment is raised here, and not in the thread
        # Ends the connections to some processes, so that waiting for their arrays raises.
        self.break_off: Callable[[Processes], None] = lambda processes: None
        # `mylib.watch` tells and reads its news in this thread.
        self.also: Callable[[], None] | None = None
        # Errors, by the processes that they concern.
        self.failures: dict[Processes, str] = {}
        self.lanes: dict[str, Lane] = {}
        self._lock = threading.Lock()
        self._told: dict[str, Any] = {}
        self._exchanged = self._reads_next = 0.0
        self._busy = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._compare, name="mylib-comparison", daemon=True)
        self._thread.start()
        # Before JAX leaves the other processes: they must know what has arrived here.
        atexit.register(self._end_thread)

    def lane(self, stream: str, processes: Processes) -> Lane:
        with self._lock:
            name = lane_name(stream, processes)
            if name not in self.lanes:
                self.lanes[name] = Lane(name, processes, self.me)
            return self.lanes[name]

    def count(self, lane: Lane, text: str) -> Turn:
        """Counts a call, unless it can't be the same as that of the other processes."""
        self.check(lane.processes)
        with self._lock:
            self._busy.set()
            return lane.call(text)

    def check(self, processes: Processes) -> None:
        """Raises an error if two of these processes are known to be out of step."""
        for concerned, text in list(self.failures.items()):
            # Those that are left go on without the lost ones.
            if lost().intersection(concerned) - {*processes}:
                continue
            if len({*concerned}.intersection(processes)) > 1:
                raise TransferError(text)

    def tell(self) -> None:
        """Makes it tell and read regularly."""
        self._busy.set()

    def fail(self, processes: Processes, text: str) -> None:
        with self._lock:
            if any({*processes}.issubset(concerned) for concerned in self.failures):
                return
            self.failures[processes] = text
            broken = [x for x in self.lanes.values() if {*x.processes}.issubset(processes)]
        _log.error("mylib: %s", text)
        self._busy.set()
        for lane in broken:
            lane.stop()
        self.break_off(processes)

    def is_idle(self) -> bool:
        """Whether all that has been called and sent here is known to have ended well."""
        return all(lane.is_settled() for lane in self.lanes.values())

    def _compare(self) -> None:
        leaves = False
        while not leaves:
            if self._busy.wait(_IDLE):
                time.sleep(_LOOK)
                for lane in self._known_lanes():
                    if text := lane.look():
                        self.fail(lane.processes, text)
                if time.monotonic() - self._exchanged < _EXCHANGE and not self._ended:
                    continue
            # Before the exchange: the last one tells of all calls.
            leaves = self._ended
            self._exchanged = time.monotonic()
            # If it is set from here on, that may be too late for this exchange.
            self._busy.clear()
            # If the service does not answer, JAX itself ends the processes that have lost it.
            with suppress(jax.errors.JaxRuntimeError):
                self._exchange(leaves)
                if (also := self.also) is not None:
                    also()
            if coordination_client() is not self.client:
                return  # the processes have parted
            with self._lock:
                if not self.is_idle():
                    self._busy.set()

    def wake(self) -> None:
        """Makes it tell and read at once."""
        self._exchanged = 0.0
        self._busy.set()

    def _end_thread(self) -> None:
        """Lets it make a last exchange."""
        self._ended = True
        self._busy.set()
        self._thread.join(_IDLE)

    def _known_lanes(self) -> list[Lane]:
        with self._lock:
            return list(self.lanes.values())

    def _exchange(self, leaves: bool) -> None:
        lanes = self._known_lanes()
        peers = {peer for lane in lanes for peer in lane.neighbours}
        for lane in lanes:
            if (gone := sorted(lost().intersection(lane.processes))) and not lane.is_settled():
                text = f"{about_lost(gone, self.me)} can't send or take arrays any more"
                self.fail(lane.processes, text)
        accounts = self._read(f"{_ACCOUNTS}/{self.me}") if peers else {}
        for peer in peers:
            theirs = accounts.get(peer, {"failures": {}, "lanes": {}})
            for who, text in theirs["failures"].items():
                self.fail(tuple(members(who)), text)
            for lane in lanes:
                if peer in lane.neighbours and lane.processes not in self.failures:
                    if text := lane.compare(peer, theirs["lanes"].get(lane.name, NOTHING)):
                        self.fail(lane.processes, text)
        # Before it is told: what waits for a connection that is broken off must know why.
        self._refuse_circle(lanes)
        failures = list(self.failures.items())
        for peer in peers:
            wrong = {text_of(who): text for who, text in failures if peer in who}
            ours = [lane for lane in lanes if peer in lane.neighbours]
            calls = {lane.name: lane.account(peer, leaves) for lane in ours}
            self._tell(f"{_ACCOUNTS}/{peer}/{self.me}", {"failures": wrong, "lanes": calls})

    def _refuse_circle(self, lanes: list[Lane]) -> None:
        if self.failures:
            return  # What was told last stays true, and others may not have read it yet.
        mine = self._waits_for(lanes)
        self._tell(f"{_WAITING}/{self.me}", mine)
        now = time.monotonic()
        if mine is None or now < self._reads_next:
            return
        waiting = {who: Waiting(*x) for who, x in self._read(_WAITING).items() if x}
        self._reads_next = now + len(waiting) / _READ
        waiting[self.me] = mine
        if wrong := circle_before(self.me, waiting):
            self.fail(*wrong)

    def _waits_for(self, lanes: list[Lane]) -> Waiting | None:
        """The array that this process has waited for longest, if that is long."""
        long_ago = time.monotonic() - _LONG
        takes = [move for lane in lanes if (move := lane.oldest()) and move.since < long_ago]
        if not takes:
            return None
        oldest = min(takes, key=lambda move: move.since)
        lane, number, _, text = oldest.call
        done = {lane.name: lane.done(oldest.since) for lane in lanes}
        return Waiting(lane.name, number, f"{text}, call {number}, from process", done)

    def _read(self, place: str) -> dict[int, Any]:
        return {i: json.loads(text) for i, text in values_by_process(self.client, place).items()}

    def _tell(self, key: str, content: Any) -> None:
        if content != self._told.get(key):
            self.client.key_value_set(key, json.dumps(content), allow_overwrite=True)
            self._told[key] = content


_comparisons: list[Comparison] = []
_starting = threading.Lock()


def comparison() -> Comparison:
    """The comparison for the processes that are connected now."""
    client = connected()
    with _starting:
        if not _comparisons or _comparisons[0].client is not client:
            _comparisons[:] = [Comparison(client)]
        return _comparisons[0]


def programs_of(processes: Processes) -> tuple[int, str]:
    """The number of programs on devices of these processes, and a digest of them."""
    lane = _comparisons[0].lanes.get(lane_name(PROGRAMS, processes)) if _comparisons else None
    return (0, "") if lane is None else (lane.count, lane.digest)


def wait_in_step(conclusion: Future[str], processes: Processes) -> str:
    """Waits in a meeting, and raises once two of its processes are known to be out of step. Before
    the first transfer nobody can be.
    """
    since = time.monotonic()
    while not conclusion.done():
        if _comparisons:
            if time.monotonic() - since > _LONG:
                comparison().tell()
            comparison().check(processes)
        wait([conclusion], _LOOK)
    if _comparisons:
        comparison().check(processes)
    return conclusion.result()


def read_in_order(processes: Processes, text: str) -> str:
    """The decision of a meeting, or the error that the processes are out of step."""
    if text.startswith((ENDS, GOES_ON)):
        return text[1:]
    # If transfers differ, the comparison knows soon which.
    until = time.monotonic() + (_EXPLAINS if text.startswith("?") else 0)
    while time.monotonic() < until:
        comparison().check(processes)
        time.sleep(_LOOK)
    comparison().fail(processes, text[1:])
    raise TransferError(text[1:])

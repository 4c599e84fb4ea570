"""Processes that serve test after test, and how it is found out what became of one test.

The processes are pytest sessions of their own (`_worker.py`) and do what they are told over a pipe.
Not over their standard output: JAX's libraries write to that as well.
"""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from ._coverage import VARIABLES
from ._group import Group, Guard
from ._topology import Topology

# To import what the tests import, on a busy machine.
_START = 240.0
_START_EACH = 15.0
# After a test that has passed. Two milliseconds is what it takes, if the machine isn't busy.
_IN_STEP = 20.0
_END = 60.0
# For a process to print its stacks. Only one that is stopped takes so long, or a busy machine.
_LOOK_AT = 5.0
# How often it is looked whether a process that says nothing has ended.
_LOOK = 0.5
# How much of what a process has printed is shown when it has died.
_TAIL = 20_000


class NotStarted(Exception):
    """Why the processes of a topology can't be had."""


@dataclass
class Outcome:
    """What one process said of one test, or what was found out about it."""

    index: int
    reports: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[dict[str, Any]] = field(default_factory=list)
    finished: bool = False
    # When it first failed, or was seen to have died.
    failed_at: float | None = None
    # If it died: the status, as `subprocess` gives it.
    status: int | None = None
    # What kept it from running the test.
    trouble: str | None = None
    # Of pytest.exit() and the like: why, and the status that the session is to have.
    stop: tuple[str, int | None] | None = None
    # Whether it has failed with what is not to be tried again.
    final: bool = False
    # Where it was when it was given up.
    stack: str | None = None
    # What it has printed since its last report.
    output: str = ""
    errors: str = ""


@dataclass
class Result:
    outcomes: list[Outcome]
    timed_out: bool
    # Why the processes can't be used for another test, although this one has passed in all.
    out_of_step: str | None = None
    kept: bool = True

    @property
    def by_time(self) -> list[Outcome]:
        """The first to fail first."""
        late = float("inf")
        return sorted(self.outcomes, key=lambda o: late if o.failed_at is None else o.failed_at)


@dataclass(frozen=True)
class Session:
    """What each process's own pytest is started with."""

    arguments: Sequence[str]
    options: dict[str, Any]
    directory: str
    # Which process opens a debugger when a test fails: its index, -1 for the first that fails.
    debug: int | None
    # Whether it has pytest's cache, which each process then has for itself.
    cached: bool
    # How it measures what is run; None if it doesn't.
    coverage: dict[str, Any] | None = None


class Pool:
    """The processes of one topology."""

    def __init__(self, topology: Topology, session: Session, guard: Guard) -> None:
        self.topology = topology
        self._tests = 0
        self._connections: list[Connection] = []
        self._group = Group(topology, guard)
        # -P: a folder that happens to be the current one is nothing to import from.
        command = [sys.executable, "-P", "-m", "pytest", *session.arguments]
        try:
            with contextlib.ExitStack() as theirs:
                channels: list[int] = []
                for _ in range(topology.processes):
                    mine, its = Pipe()
                    self._connections.append(mine)
                    channels.append(theirs.enter_context(its).fileno())
                self._group.start(
                    lambda index: [*command, *self._places(index, session.cached)],
                    lambda index: {
                        "MYLIB_TESTING_CHANNEL": str(channels[index]),
                        # What can be imported here can be imported there.
                        "PYTHONPATH": os.pathsep.join(dict.fromkeys(p for p in sys.path if p)),
                    },
                    without=VARIABLES if session.coverage else (),
                    cwd=session.directory,
                    keep=lambda index: [channels[index]],
                )
            for index in range(topology.processes):
                self.tell(index, self._beginning(index, session))
            limit = _START + _START_EACH * topology.processes
            trouble = self._all_say("ready", limit)
            if trouble:
                raise NotStarted(f"{topology}: {trouble}\n{self._printed()}".rstrip())
        except BaseException:
            self.kill()
            raise

    def _places(self, index: int, cached: bool) -> list[str]:
        """Folders for a process's pytest alone."""
        folder = self._group.folder
        cache = ["-o", f"cache_dir={folder / f'cache{index}'}"] if cached else []
        return [f"--basetemp={folder / f'tmp{index}'}", *cache]

    def _beginning(self, index: int, session: Session) -> dict[str, Any]:
        return {
            "index": index,
            "processes": self.topology.processes,
            "coordinator": self._group.coordinator,
            "another coordinator": self._group.another_coordinator,
            "folder": str(self._group.folder),
            "options": session.options,
            "coverage": session.coverage,
            "debug": session.debug in (index, -1),
        }

    def run(
        self,
        test: str,
        following: str | None,
        *,
        timeout: float | None,
        grace: float,
        talk: Callable[[int, str | None], str],
    ) -> Result:
        """One test in all processes. `following` is the next that they will be given. `timeout` is
        for the whole, `grace` for the others once one has failed.

        `talk` serves a debugger in a process: it shows what it is given, or asks for a line.
        """
        self._tests += 1
        run = _Run(self, timeout, grace, talk)
        for index in range(self.topology.processes):
            message = {"do": "test", "test": test, "following": following, "number": self._tests}
            if not self.tell(index, message):
                run.died(index)
        run.follow()
        return self._judge(run)

    def _judge(self, run: "_Run") -> Result:
        unfinished = [o for o in run.outcomes if not o.finished and o.status is None]
        timed_out = bool(unfinished) and all(o.failed_at is None for o in run.outcomes)
        self._look_at(unfinished)
        for outcome in run.outcomes:
            if not outcome.finished:
                process = self._group.processes[outcome.index]
                outcome.output = _read(process.output, run.printed[outcome.index][0])
                outcome.errors = _read(process.errors, run.printed[outcome.index][1])
        result = Result(run.outcomes, timed_out)
        phases = {tuple(report["outcome"] for report in o.reports) for o in run.outcomes}
        if len(phases) > 1 or any(not o.finished or o.trouble or o.stop for o in run.outcomes):
            result.kept = False
        else:
            result.out_of_step = self._out_of_step()
            result.kept = result.out_of_step is None
        if not result.kept:
            self.kill()
        return result

    def _out_of_step(self) -> str | None:
        """Whether some process has something pending that the others have not, or is set up in
        another way than the others.
        """
        for index in range(self.topology.processes):
            message = {"do": "step", "number": self._tests, "timeout": _IN_STEP}
            if not self.tell(index, message):
                return f"process {index} has gone"
        return self._all_say("step", _IN_STEP + 1)

    def _look_at(self, outcomes: Sequence[Outcome]) -> None:
        """Where the processes are that have not finished. They print it in a signal handler written
        in C, also while they wait for others or hold Python's lock.
        """
        for outcome in outcomes:
            self._group.processes[outcome.index].signal(signal.SIGUSR1)
        deadline = time.monotonic() + _LOOK_AT
        for outcome in outcomes:
            path = self._group.folder / f"{outcome.index}.stack"
            while not is_whole(text := _read(path, 0)) and time.monotonic() < deadline:
                time.sleep(0.02)
            outcome.stack = text

    def close(self) -> str | None:
        """The end in order: fixtures are torn down, the processes leave each other. Returns what
        went wrong with that, if anything did.
        """
        for index in range(self.topology.processes):
            self.tell(index, {"do": "end"})
        trouble = self._all_say("end", _END)
        self._finish(0.0 if trouble else 3.0)
        return trouble

    def kill(self) -> None:
        self._finish(0.0)

    def _finish(self, timeout: float) -> None:
        self._group.end(timeout)
        for connection in self._connections:
            connection.close()

    def tell(self, index: int, message: dict[str, Any]) -> bool:
        try:
            self._connections[index].send_bytes(json.dumps(message).encode())
        except OSError:
            return False
        return True

    def _all_say(self, event: str, timeout: float) -> str | None:
        """Waits until all processes have said `event`. Returns why they have not, or what one of
        them had to complain of.
        """
        deadline = time.monotonic() + timeout
        silent = set(range(self.topology.processes))
        while silent:
            heard = list(self.hear(silent, deadline))
            if not heard:
                names = ", ".join(map(str, sorted(silent)))
                return f"no answer from process {names} within {timeout:.0f} s"
            for index, message in heard:
                if message is None:
                    return f"process {index} ended with {named_status(self.status_of(index))}"
                if message["say"] == event:
                    silent.discard(index)
                if message.get("trouble"):
                    return f"process {index}: {message['trouble']}"
        return None

    def hear(
        self, indices: set[int], deadline: float
    ) -> Iterator[tuple[int, dict[str, Any] | None]]:
        """What those processes say next; None of one that has gone."""
        connections = {self._connections[index]: index for index in sorted(indices)}
        while True:
            left = deadline - time.monotonic()
            heard = wait(list(connections), min(max(0.0, left), _LOOK))
            for connection in heard:
                assert isinstance(connection, Connection)
                index = connections[connection]
                try:
                    yield index, json.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    yield index, None
            # A child that a process has forked holds its end of the pipe, too.
            processes = self._group.processes
            gone = [] if heard else [i for i in indices if processes[i].status() is not None]
            yield from ((index, None) for index in gone)
            if heard or gone or left <= 0:
                return

    def status_of(self, index: int) -> int | None:
        return self._group.processes[index].status(2.0)

    def _printed(self) -> str:
        parts: list[str] = []
        for index, process in enumerate(self._group.processes):
            text = (_read(process.output, 0) + _read(process.errors, 0)).strip()
            if text:
                parts.append(f"--- printed by process {index} ---\n{text[-4000:]}")
        return "\n".join(parts)


class _Run:
    """One test while it runs."""

    def __init__(
        self,
        pool: Pool,
        timeout: float | None,
        grace: float,
        talk: Callable[[int, str | None], str],
    ) -> None:
        count = pool.topology.processes
        self.outcomes = [Outcome(index) for index in range(count)]
        # How far the files are known in which the output and the errors of each process go.
        self.printed = [(0, 0)] * count
        self._pool, self._grace, self._talk = pool, grace, talk
        self._deadline = float("inf") if timeout is None else time.monotonic() + timeout
        self._running = set(range(count))
        # The one process that may open a debugger, and whether it has it open.
        self._debugger: int | None = None
        self._debugging = False

    def follow(self) -> None:
        """Until all have finished, or it is too late."""
        while self._running:
            heard = list(self._pool.hear(self._running, self._until()))
            if not heard:
                return
            for index, message in heard:
                if message is None:
                    self.died(index)
                else:
                    self._heard(index, message)

    def _until(self) -> float:
        if self._debugging:
            return float("inf")
        failures = [o.failed_at for o in self.outcomes if o.failed_at is not None]
        return min([self._deadline, *(t + self._grace for t in failures)])

    def died(self, index: int) -> None:
        outcome = self.outcomes[index]
        status = self._pool.status_of(index)
        # A process that has closed its pipe and lives is of no use either.
        outcome.status = -signal.SIGKILL if status is None else status
        self._failed(outcome)
        self._running.discard(index)

    def _heard(self, index: int, message: dict[str, Any]) -> None:
        outcome = self.outcomes[index]
        match message["say"]:
            case "started":
                self.printed[index] = message["printed"]
            case "report":
                self.printed[index] = message["printed"]
                outcome.reports.append(message["report"])
                if message["report"]["outcome"] == "failed":
                    self._failed(outcome)
            case "warning":
                outcome.warnings.append(message["warning"])
            case "done":
                outcome.finished = True
                outcome.trouble = message["trouble"]
                outcome.stop = message["stop"] and tuple(message["stop"])
                outcome.final = message["final"]
                if outcome.trouble:
                    self._failed(outcome)
                self._running.discard(index)
            case "debugger?":
                self._debugging = self._debugger is None
                if self._debugging:
                    self._debugger = index
                self._pool.tell(index, {"debug": self._debugging})
            case "show":
                self._talk(index, message["text"])
            case "ask":
                self._pool.tell(index, {"line": self._talk(index, None)})
            case "debugged":
                self._debugging = False
                # The others have been waiting for whoever typed.
                self._deadline = float("inf")
                for other in self.outcomes:
                    other.failed_at = other.failed_at and time.monotonic()

    def _failed(self, outcome: Outcome) -> None:
        if outcome.failed_at is None:
            outcome.failed_at = time.monotonic()


def named_status(status: int | None) -> str:
    if status is None:
        return "nothing: it lives, but has closed its pipe"
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"


def is_whole(stacks: str) -> bool:
    """Whether faulthandler has printed all stacks. It prints line by line, and the main thread's
    last: a hundred frames, or up to that of `python -m`.
    """
    frames = stacks.split("\n\n")[-1].splitlines()[1:]
    ended = len(frames) >= 100 or (bool(frames) and "_run_module_as_main" in frames[-1])
    return ended and stacks.endswith("\n")


def _read(path: Any, start: int) -> str:
    """The end of a file, from `start` on."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(start, size - _TAIL))
        return file.read().decode(errors="replace")

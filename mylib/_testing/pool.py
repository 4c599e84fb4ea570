"""Pools of processes that run test after test, and the outcomes of a test.

The processes are pytest sessions (`_worker.py`) that receive commands over a pipe. Standard output
can't be used: JAX's libraries write to it as well.
"""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from .group import Group, Guard
from .topology import Topology

# Enough to import the tests' modules on a busy machine.
_START = 240.0
_START_EACH = 15.0
# For the check after a passed test. It takes two milliseconds on an idle machine.
_IN_STEP = 20.0
_END = 60.0
# For a process to print its stacks. Only a stopped process or a busy machine takes this long.
_LOOK_AT = 5.0
# The interval of checks whether a silent process has ended.
_LOOK = 0.5
# The most output to show of a process that died.
_TAIL = 20_000


class NotStarted(Exception):
    """The processes of a topology can't be started."""


@dataclass
class Outcome:
    """One process's outcome of one test, reported or found out."""

    index: int
    reports: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[dict[str, Any]] = field(default_factory=list)
    finished: bool = False
    # The time of its first failure, or when its death was noticed.
    failed_at: float | None = None
    # If it died: its status, as in `subprocess`.
    status: int | None = None
    # The reason why it could not run the test.
    trouble: str | None = None
    # After pytest.exit() and the like: the reason, and the session's exit status.
    stop: tuple[str, int | None] | None = None
    # Its stack when it was given up.
    stack: str | None = None
    # Its output since its last report.
    output: str = ""
    errors: str = ""


@dataclass
class Result:
    outcomes: list[Outcome]
    timed_out: bool
    # The reason why the processes can't run another test, although all have passed this one.
    out_of_step: str | None = None
    is_pool_kept: bool = True

    @property
    def by_time(self) -> list[Outcome]:
        """Outcomes in order of failure."""
        late = float("inf")
        return sorted(self.outcomes, key=lambda o: late if o.failed_at is None else o.failed_at)


@dataclass(frozen=True)
class Session:
    """The settings of each process's pytest: its command line, its folder, whether it uses a cache
    (each process has one of its own), and what is sent to the processes.

    That is: `options` of pytest; whether the process that fails first opens a debugger (`debug`);
    and the files that this reads from and writes to (`terminal`).
    """

    arguments: Sequence[str]
    directory: str
    cached: bool
    sent: dict[str, Any]


class Pool:
    """The processes of one topology."""

    def __init__(self, topology: Topology, session: Session, guard: Guard) -> None:
        self.topology = topology
        self._tests = 0
        self._connections: list[Connection] = []
        self._group = Group(topology, guard)
        try:
            for index in range(topology.processes):
                self._start(index, session)
            limit = _START + _START_EACH * topology.processes
            trouble = self._all_say("ready", limit)
            if trouble:
                raise NotStarted(f"{topology}: {trouble}\n{self._printed()}".rstrip())
        except BaseException:
            self.kill()
            raise

    def _start(self, index: int, session: Session) -> None:
        group = self._group
        # Each has its own folders.
        options = [f"--basetemp={group.folder / f'tmp{index}'}"]
        options += ["-o", f"cache_dir={group.folder / f'cache{index}'}"] if session.cached else []
        mine, its = Pipe()
        self._connections.append(mine)
        with its:
            group.start(
                # -P: don't import from the current folder.
                [sys.executable, "-P", "-m", "pytest", *session.arguments, *options],
                {
                    "MYLIB_TESTING_CHANNEL": str(its.fileno()),
                    # The processes can import what this one can.
                    "PYTHONPATH": os.pathsep.join(dict.fromkeys(p for p in sys.path if p)),
                },
                cwd=session.directory,
                keep=[its.fileno(), *session.sent["terminal"]],
            )
        beginning = {
            "index": index,
            "processes": self.topology.processes,
            "coordinator": group.coordinator,
            "another coordinator": group.another_coordinator,
            "folder": str(group.folder),
        }
        self.tell(index, session.sent | beginning)

    def run(
        self,
        test: str,
        following: str | None,
        *,
        timeout: float | None,
        grace: float,
    ) -> Result:
        """Runs one test in all processes. `following` is their next test. `timeout` limits the
        whole test, `grace` the other processes after one has failed.
        """
        self._tests += 1
        run = _RunningTest(self, timeout, grace)
        for index in range(self.topology.processes):
            message = {"do": "test", "test": test, "following": following, "number": self._tests}
            self.tell(index, message)
        run.follow()
        return self._judge(run)

    def _judge(self, run: "_RunningTest") -> Result:
        unfinished = run.unfinished()
        timed_out = bool(unfinished) and all(o.failed_at is None for o in run.outcomes)
        self._look_at(unfinished)
        for outcome in run.outcomes:
            if not outcome.finished:
                process = self._group.processes[outcome.index]
                outcome.output = _read(process.output, run.printed[outcome.index][0])
                outcome.errors = _read(process.errors, run.printed[outcome.index][1])
        phases = {tuple(report["outcome"] for report in o.reports) for o in run.outcomes}
        are_fine = len(phases) == 1 and all(
            o.finished and not (o.trouble or o.stop) for o in run.outcomes
        )
        out_of_step = self._out_of_step() if are_fine else None
        is_kept = are_fine and out_of_step is None
        if not is_kept:
            self.kill()
        return Result(run.outcomes, timed_out, out_of_step, is_kept)

    def _out_of_step(self) -> str | None:
        """The reason, if any, why processes are out of step: one has pending work or settings that
        the others don't have.
        """
        for index in range(self.topology.processes):
            self.tell(index, {"do": "step", "timeout": _IN_STEP})
        return self._all_say("step", _IN_STEP + 1)

    def _look_at(self, outcomes: Sequence[Outcome]) -> None:
        """Records the stacks of unfinished processes. A signal handler in C prints them, even while
        a process waits for others or holds the GIL.
        """
        for outcome in outcomes:
            self._group.processes[outcome.index].popen.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + _LOOK_AT
        for outcome in outcomes:
            path = self._group.folder / f"{outcome.index}.stack"
            while not is_whole(text := _read(path, 0)) and time.monotonic() < deadline:
                time.sleep(0.02)
            outcome.stack = text

    def close(self) -> str | None:
        """Ends in order: tears down fixtures, and disconnects the processes. Returns what went
        wrong, if anything.
        """
        for index in range(self.topology.processes):
            self.tell(index, {"do": "end"})
        trouble = self._all_say("end", _END)
        self.kill(0.0 if trouble else 3.0)
        return trouble

    def kill(self, timeout: float = 0.0) -> None:
        """Kills processes that haven't ended by then."""
        self._group.end(timeout)
        for connection in self._connections:
            connection.close()

    def tell(self, index: int, message: dict[str, Any]) -> None:
        # If the process is gone, `hear` says so.
        with contextlib.suppress(OSError):
            self._connections[index].send_bytes(json.dumps(message).encode())

    def _all_say(self, event: str, timeout: float) -> str | None:
        """Waits until all processes have sent `event`. Returns the reason if they haven't, or the
        trouble that one reported.
        """
        deadline = time.monotonic() + timeout
        silent = set(range(self.topology.processes))
        while silent:
            heard = self.hear(silent, deadline)
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

    def hear(self, indices: set[int], deadline: float) -> list[tuple[int, dict[str, Any] | None]]:
        """The next messages of those processes; None from a process that is gone."""
        connections: dict[Any, int] = {self._connections[index]: index for index in sorted(indices)}
        while True:
            left = deadline - time.monotonic()
            heard = wait(list(connections), min(max(0.0, left), _LOOK))
            if heard:
                return [(connections[one], _received(one)) for one in heard]
            # A forked child holds the process's end of the pipe open, too.
            gone = [i for i in indices if self._group.processes[i].status() is not None]
            if gone or left <= 0:
                return [(index, None) for index in gone]

    def status_of(self, index: int) -> int | None:
        return self._group.processes[index].status(2.0)

    def _printed(self) -> str:
        parts: list[str] = []
        for index, process in enumerate(self._group.processes):
            text = (_read(process.output, 0) + _read(process.errors, 0)).strip()
            if text:
                parts.append(f"--- printed by process {index} ---\n{text[-4000:]}")
        return "\n".join(parts)


class _RunningTest:
    """One test while it runs."""

    def __init__(self, pool: Pool, timeout: float | None, grace: float) -> None:
        count = pool.topology.processes
        self.outcomes = [Outcome(index) for index in range(count)]
        # The positions up to which each process's stdout and stderr files have been read.
        self.printed = [(0, 0)] * count
        self._pool, self._grace = pool, grace
        self._deadline = float("inf") if timeout is None else time.monotonic() + timeout
        # Whether a process has been allowed to open a debugger.
        self._has_debugger = False

    def follow(self) -> None:
        """Waits until all have finished, or until the deadline."""
        while unfinished := self.unfinished():
            failures = [o.failed_at for o in self.outcomes if o.failed_at is not None]
            until = min([self._deadline, *(t + self._grace for t in failures)])
            heard = self._pool.hear({o.index for o in unfinished}, until)
            if not heard:
                return
            for index, message in heard:
                if message is None:
                    self._died(index)
                else:
                    self._heard(index, message)

    def unfinished(self) -> list[Outcome]:
        return [o for o in self.outcomes if not o.finished and o.status is None]

    def _died(self, index: int) -> None:
        outcome = self.outcomes[index]
        status = self._pool.status_of(index)
        # A live process that has closed its pipe is useless, too.
        outcome.status = -signal.SIGKILL if status is None else status
        self._failed(outcome)

    def _heard(self, index: int, message: dict[str, Any]) -> None:
        outcome = self.outcomes[index]
        self.printed[index] = message.get("printed", self.printed[index])
        match message["say"]:
            case "report":
                outcome.reports.append(message["report"])
                if message["report"]["outcome"] == "failed":
                    self._failed(outcome)
            case "warning":
                outcome.warnings.append(message["warning"])
            case "done":
                outcome.finished = True
                outcome.trouble = message["trouble"]
                outcome.stop = message["stop"] and tuple(message["stop"])
                # After `pytest.exit` the session ends, so the others need not go on.
                if outcome.trouble or outcome.stop:
                    self._failed(outcome)
            case "debugger?":
                # Only the first to ask opens one. Sessions with a debugger have no time limits.
                self._pool.tell(index, {"debug": not self._has_debugger})
                self._has_debugger = True

    def _failed(self, outcome: Outcome) -> None:
        if outcome.failed_at is None:
            outcome.failed_at = time.monotonic()


def _received(connection: Any) -> dict[str, Any] | None:
    try:
        return json.loads(connection.recv_bytes())
    except (EOFError, OSError):
        return None


def named_status(status: int | None) -> str:
    if status is None:
        return "nothing: it lives, but has closed its pipe"
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"


def is_whole(stacks: str) -> bool:
    """Whether faulthandler has printed all stacks. It prints line by line, with the main thread
    last: a hundred frames, or down to that of `python -m`.
    """
    frames = stacks.split("\n\n")[-1].splitlines()[1:]
    ended = len(frames) >= 100 or (bool(frames) and "_run_module_as_main" in frames[-1])
    return ended and stacks.endswith("\n")


def _read(path: Path, start: int) -> str:
    """The end of a file, from `start` on."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(start, size - _TAIL))
        return file.read().decode(errors="replace")

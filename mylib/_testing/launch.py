"""`python -m mylib.testing launch`: runs a script in several processes on this machine."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from .group import Group, Guard
from .pool import named_status
from .topology import HOST, Topology, TopologyRequest, Unavailable

# Runs a script, or a module after -m, as Python does, but exits at once after an exception: JAX
# would wait five minutes for the other processes, and they for this one, unless they can go on
# without each other. If the processes never met, the first one says so at the end.
_RUN = """
import os, runpy, sys, traceback
arguments = sys.argv[1:]
try:
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")
    jax, processes = sys.modules.get("jax"), os.environ.get("SLURM_NTASKS", "1")
    first = processes != "1" and os.environ.get("SLURM_PROCID") == "0"
    # Last, because counting processes starts JAX's backends if the script has not.
    if jax and first and not jax.distributed.is_initialized() and jax.process_count() == 1:
        print(
            f"Each of the {processes} processes ran the program alone: call "
            "jax.distributed.initialize() before anything else in JAX",
            file=sys.stderr,
        )
    status = 0
except SystemExit as end:
    if isinstance(end.code, str):
        print(end.code, file=sys.stderr)
    status = end.code if isinstance(end.code, int) else int(end.code is not None)
except BaseException:
    traceback.print_exc()
    status = 1
jax = sys.modules.get("jax")
if status and jax and jax.config.jax_enable_recoverability:
    sys.exit(status)  # the others learn it, and the first process waits for them
if status:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
"""
# The status of `mylib.elastic.RESTART`, which needs JAX to be imported: start all again.
_RESTART = 75
# Seconds that the others may continue after one has failed.
_GRACE = 3.0
# Seconds between two states of a progress bar.
_SECOND = 1.0
# What is read at once, so that memory is limited: as many parts as these, of so many bytes.
_PARTS, _PART = 256, 2**16


def main(arguments: Sequence[str]) -> int:
    # Closed by who started it. The next file that is opened would take its number.
    sys.stdout, sys.stderr = (x or open(os.devnull, "w") for x in (sys.stdout, sys.stderr))  # noqa: SIM115
    parser = _parser()
    options = parser.parse_args(arguments)
    script = options.script[1:] if options.script[:1] == ["--"] else options.script
    command = ["-m", *options.module] if options.module else script
    if not command:
        parser.error("name a script, or a module after -m")
    devices = options.devices_per_process
    if devices is None and options.platform == "cpu":
        devices = 1
    try:
        topology = TopologyRequest(options.processes, devices).topology(options.platform)
    except (ValueError, Unavailable) as error:
        parser.error(str(error))
    status = 0
    for again in reversed(range(options.restart + 1)):
        status = _launch(command, topology, is_elastic=options.restart > 0)
        if not again or not _restarts(status):
            break
        print(f"starting all processes again, {again - 1} more times at most", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mylib.testing launch",
        description="Runs a script in several processes on this machine. In each of them "
        "jax.distributed.initialize() finds the others.",
    )
    parser.add_argument("-n", "--processes", type=int, required=True, metavar="N")
    parser.add_argument("--devices-per-process", type=int, metavar="K", help="on cpu 1 by default")
    parser.add_argument("--platform", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--restart",
        type=int,
        default=0,
        metavar="TIMES",
        help="start all processes again, at most so many times, when process 0 dies of a signal, "
        f"or one ends with the status {_RESTART} (mylib.elastic.RESTART)",
    )
    rest = argparse.REMAINDER
    parser.add_argument("-m", dest="module", nargs=rest, help="a module to run, and its arguments")
    parser.add_argument("script", nargs=rest, help="or a script, and its arguments")
    return parser


def _restarts(status: int) -> bool:
    # A process that has died of a signal ends so, and one that JAX ends with the first one, too.
    return status == _RESTART or status > 128 and status != 128 + signal.SIGINT


def _launch(command: Sequence[str], topology: Topology, is_elastic: bool) -> int:
    guard = Guard()
    group = Group(topology, guard)
    # Like Ctrl-C, so that everything below is cleaned up.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        for index in range(topology.processes):
            run = [sys.executable, "-c", _RUN, *command]
            group.start(run, _joining(group, index), piped=True)
        return _Follower(group, is_elastic).follow()
    except BrokenPipeError:  # nobody reads what it prints, as after `| head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    finally:
        signal.signal(signal.SIGTERM, before)
        group.end()
        guard.close()


def _joining(group: Group, index: int) -> dict[str, str]:
    """The environment for `jax.distributed.initialize()`: a step of a SLURM job on one machine."""
    return {
        "JAX_COORDINATOR_ADDRESS": group.coordinator,
        "JAX_COORDINATOR_BIND_ADDRESS": group.coordinator,
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": HOST,
        "SLURM_NTASKS": str(group.topology.processes),
        "SLURM_PROCID": str(index),
        "SLURM_LOCALID": str(index),
    }


class _Follower:
    """Shows the output of processes until all have ended or must be stopped."""

    def __init__(self, group: Group, is_elastic: bool) -> None:
        self._processes = group.processes
        # Whether the others go on when a process that isn't the first one dies of a signal.
        self._is_elastic = is_elastic
        self._said: set[int] = set()
        self._screens = [
            _Screen(index, pipe, where)
            for index, process in enumerate(group.processes)
            for pipe, where in (
                (process.popen.stdout, sys.stdout),
                (process.popen.stderr, sys.stderr),
            )
        ]
        self._status = 0
        self._deadline = float("inf")

    def follow(self) -> int:
        """The status of the first process that fails."""
        while True:
            try:
                if self._is_over():
                    return self._status
                time.sleep(0.01)
            except KeyboardInterrupt:
                # They lead their own sessions, so the terminal's Ctrl-C doesn't reach them.
                for process in self._processes:
                    process.popen.send_signal(signal.SIGINT)
                self._fail(128 + signal.SIGINT)

    def _is_over(self) -> bool:
        statuses = [process.status() for process in self._processes]
        ended = None not in statuses
        for screen in self._screens:
            screen.show(all_of_it=ended)
        for index, status in enumerate(statuses):
            if status and not self._status and index not in self._said:
                self._said.add(index)
                print(f"process {index} ended with {named_status(status)}", file=sys.stderr)
                if not (self._is_elastic and index and status != _RESTART and not ended):
                    self._fail(status if status > 0 else 128 - status)
        late = not ended and time.monotonic() > self._deadline
        if late:
            running = [str(i) for i, status in enumerate(statuses) if status is None]
            print(f"stopping process {', '.join(running)}", file=sys.stderr)
        return ended or late

    def _fail(self, status: int) -> None:
        self._status = self._status or status
        self._deadline = min(self._deadline, time.monotonic() + _GRACE)


class _Screen:
    """Shows what a process prints, each line with the process's index in front. A progress bar has
    no lines: it ends, or begins, with a `\\r`. Its last state is shown once a second.
    """

    def __init__(self, index: int, pipe: Any, where: Any) -> None:
        os.set_blocking(pipe.fileno(), False)
        self._prefix, self._pipe, self._where = f"[{index}] ", pipe, where
        self._rest, self._shown = b"", 0.0

    def show(self, all_of_it: bool) -> None:
        *lines, rest = (self._rest + self._new()).split(b"\n")
        before, mark, after = rest.rpartition(b"\r")
        if mark:
            state = after or before.rpartition(b"\r")[2]
            rest = mark + after if after else state + mark
            if time.monotonic() - self._shown > _SECOND and state.strip():
                lines.append(state)
                self._shown = time.monotonic()
        self._rest = b"" if all_of_it else rest
        for line in [*lines, rest] if all_of_it and rest else lines:
            text = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
            self._where.write(f"{self._prefix}{text}\n")
        self._where.flush()

    def _new(self) -> bytes:
        parts: list[bytes] = []
        with suppress(BlockingIOError):
            while len(parts) < _PARTS and (part := os.read(self._pipe.fileno(), _PART)):
                parts.append(part)
        return b"".join(parts)

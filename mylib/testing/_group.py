"""Operating-system processes that start together and end together, whatever happens to whom."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ._topology import HOST, Topology, environment

# Told about groups of processes ("+12", "-12") and folders; when its input ends, however that came
# about, it kills what is left of the groups and removes the folders. A group outlives its leader,
# so what a process has started is found as well.
_GUARD = """
import os, shutil, signal, sys
groups, folders = set(), []
for line in sys.stdin:
    what, name = line[0], line[1:-1]
    if what == "+": groups.add(int(name))
    elif what == "-": groups.discard(int(name))
    else: folders.append(name)
for group in groups:
    try: os.killpg(group, signal.SIGKILL)
    except OSError: pass
for folder in folders: shutil.rmtree(folder, ignore_errors=True)
"""


class Guard:
    """A small process that ends what we have started when we can't: SIGKILL leaves us no time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    def watch(self, group: int) -> None:
        self._tell(f"+{group}")

    def forget(self, group: int) -> None:
        self._tell(f"-{group}")

    def remove(self, folder: Path) -> None:
        self._tell(f"/{folder}")

    def _tell(self, line: str) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        # Somebody may have killed the guard; that is no reason for tests to fail.
        with contextlib.suppress(OSError):
            stdin.write(line + "\n")
            stdin.flush()

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait(60)


class Ports:
    """Ports that are ours: bound, but not listened at, so that the kernel gives them to nobody,
    while JAX's coordinator, which shares ports, can bind them too.
    """

    def __init__(self, count: int) -> None:
        self._sockets = [_bound() for _ in range(count)]
        self.numbers: list[int] = [s.getsockname()[1] for s in self._sockets]

    def close(self) -> None:
        for s in self._sockets:
            s.close()


def _bound() -> socket.socket:
    s = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    if hasattr(socket, "SO_REUSEPORT"):
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    s.bind((HOST, 0))
    return s


class Process:
    """One of a group. It leads a session of its own, so that all it starts can be killed with it,
    and no Ctrl-C of a terminal reaches it.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: dict[str, str],
        output: Path,
        errors: Path,
        cwd: str | None = None,
        keep: Sequence[int] = (),
    ) -> None:
        self.output, self.errors = output, errors
        with output.open("ab") as out, errors.open("ab") as err:
            self._popen = subprocess.Popen(
                command,
                env=env,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                pass_fds=keep,
                start_new_session=True,
            )
        self.pid = self._popen.pid

    def status(self, timeout: float = 0.0) -> int | None:
        """The exit status, as `subprocess` gives it, or None while the process lives."""
        try:
            return self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        # Also when the process itself has ended: what it started is in its group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def signal(self, number: int) -> None:
        if self._popen.poll() is None:
            self._popen.send_signal(number)


class Group:
    """Processes 0 to n - 1 on this machine, with ports for their coordinator and a folder."""

    def __init__(self, topology: Topology, guard: Guard) -> None:
        self.topology = topology
        self._guard = guard
        self.folder = Path(tempfile.mkdtemp(prefix="mylib-processes-"))
        guard.remove(self.folder)
        self._ports = Ports(2 + topology.processes)
        coordinator, another, *self._on_tpu = self._ports.numbers
        self.coordinator = f"{HOST}:{coordinator}"
        # For a test's own: at the first one's a process may still meet the first one.
        self.another_coordinator = f"{HOST}:{another}"
        self.processes: list[Process] = []

    def start(
        self,
        command: Callable[[int], Sequence[str]],
        extra: Callable[[int], dict[str, str]],
        *,
        without: Sequence[str] = (),
        cwd: str | None = None,
        keep: Callable[[int], Sequence[int]] = lambda index: (),
    ) -> None:
        for index in range(self.topology.processes):
            env = environment(index, self.topology, self._on_tpu) | extra(index)
            process = Process(
                command(index),
                env={name: value for name, value in env.items() if name not in without},
                output=self.folder / f"{index}.out",
                errors=self.folder / f"{index}.err",
                cwd=cwd,
                keep=keep(index),
            )
            self._guard.watch(process.pid)
            self.processes.append(process)

    def end(self, timeout: float = 0.0) -> None:
        """Kills what hasn't ended by then, with all that the processes have started."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.status(max(0.0, deadline - time.monotonic()))
        # The coordinator last: its end makes noise in the others.
        for process in reversed(self.processes):
            process.kill()
        for process in self.processes:
            process.status(10)
            self._guard.forget(process.pid)
        self._ports.close()
        shutil.rmtree(self.folder, ignore_errors=True)

"""Groups of operating-system processes that start and end together, whatever happens."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .topology import HOST, Topology, environment

# Reads process groups ("+12", "-12") and folders from its input. When the input ends, for any
# reason, it kills the remaining groups and removes the folders. A group outlives its leader, so
# subprocesses are killed, too.
_GUARD = """
import os, shutil, signal, sys
groups, folders = set(), []
for line in sys.stdin:
    what, name = line[0], line[1:-1]
    if what == "+": groups.add(int(name))
    elif what == "-": groups.discard(int(name))
    else: folders.append(line[:-1])
for group in groups:
    try: os.killpg(group, signal.SIGKILL)
    except OSError: pass
for folder in folders: shutil.rmtree(folder, ignore_errors=True)
"""


class Guard:
    """A small process that cleans up for this one, which can't do it itself after SIGKILL."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    def tell(self, line: str) -> None:
        """`+12` to watch a process group, `-12` to forget it, `/tmp/a` to remove a folder."""
        # If the guard was killed, tests must not fail.
        with contextlib.suppress(OSError):
            print(line, file=self._process.stdin, flush=True)

    def close(self) -> None:
        # Closes its input, and waits for its end.
        self._process.communicate(timeout=60)


def _reserved() -> socket.socket:
    """A port that is bound, but not listening, so that the kernel gives it to no other program, and
    JAX's coordinator, which shares ports, can still bind it.
    """
    s = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    s.bind((HOST, 0))
    return s


@dataclass(frozen=True)
class Process:
    """One process of a group, and the files that it prints to. It leads its own session, so that it
    can be killed with all its subprocesses, and a terminal's Ctrl-C doesn't reach it.
    """

    popen: "subprocess.Popen[bytes]"
    output: Path
    errors: Path

    def status(self, timeout: float = 0.0) -> int | None:
        """The exit status as in `subprocess`, or None while the process lives."""
        try:
            return self.popen.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        # Even if the process itself has ended: its subprocesses are in its group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)


class Group:
    """Processes 0 to n - 1 on this machine, with ports for their coordinator and a folder."""

    def __init__(self, topology: Topology, guard: Guard) -> None:
        self.topology = topology
        self._guard = guard
        self.folder = Path(tempfile.mkdtemp(prefix="mylib-processes-"))
        guard.tell(f"{self.folder}")
        self._ports = [_reserved() for _ in range(2)]
        coordinator, another = [port.getsockname()[1] for port in self._ports]
        self.coordinator = f"{HOST}:{coordinator}"
        # For a test's own coordinator: processes may still reach the first one at its address.
        self.another_coordinator = f"{HOST}:{another}"
        self.processes: list[Process] = []

    def start(
        self,
        command: Sequence[str],
        extra: dict[str, str],
        *,
        cwd: str | None = None,
        keep: Sequence[int] = (),
        piped: bool = False,
    ) -> None:
        """Starts the next process, with `extra` variables, and with the files `keep` open. If it is
        `piped`, it prints to pipes instead of files.
        """
        index = len(self.processes)
        files = output, errors = self.folder / f"{index}.out", self.folder / f"{index}.err"
        with contextlib.ExitStack() as opened:
            out, err = (
                subprocess.PIPE if piped else opened.enter_context(file.open("ab"))
                for file in files
            )
            popen = subprocess.Popen(
                command,
                env=environment(index, self.topology) | extra,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                pass_fds=keep,
                start_new_session=True,
            )
        self._guard.tell(f"+{popen.pid}")
        self.processes.append(Process(popen, output, errors))

    def end(self, timeout: float = 0.0) -> None:
        """Kills processes that haven't ended by then, and all subprocesses."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.status(max(0.0, deadline - time.monotonic()))
        # The coordinator last: when it ends, the others print errors.
        for process in reversed(self.processes):
            process.kill()
        for process in self.processes:
            process.status(10)
            for pipe in filter(None, (process.popen.stdout, process.popen.stderr)):
                pipe.close()
            self._guard.tell(f"-{process.popen.pid}")
        for port in self._ports:
            port.close()
        shutil.rmtree(self.folder, ignore_errors=True)

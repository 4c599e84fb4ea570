"""Runs Python in processes of its own."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path


def run_python(
    *arguments: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, until it ends; what it prints is in the result."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,  # less than that of a test
    )


def printed_by(
    *arguments: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> str:
    """What Python prints with these arguments, if it ends without an error."""
    done = run_python(*arguments, env=env, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def left_alone(script: str, env: Mapping[str, str]) -> tuple[str, float]:
    """Runs a script in two processes, which are given a port and their number. The second one is
    killed when it has printed "waiting". What the first one then prints, which must end with status
    7, and after how many seconds it has ended.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script, port, str(i)],
            env={**env, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for i in range(2)
    ]
    one, other = started
    try:
        assert other.stdout is not None and one.stdout is not None
        # Backends print lines of their own.
        assert any("waiting" in line for line in other.stdout)
        other.send_signal(signal.SIGKILL)
        start = time.monotonic()
        text = one.stdout.read()
        seconds = time.monotonic() - start
        assert one.wait(60) == 7, text
        return text, seconds
    finally:
        for process in started:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

"""Runs Python in a process of its own."""

import subprocess
import sys
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

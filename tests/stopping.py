"""Stops the process that calls it, and lets it go on, as a debugger or a full machine does."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SCRIPT = """
import os, signal, sys, time
pid, seconds = int(sys.argv[1]), float(sys.argv[2])
os.kill(pid, signal.SIGSTOP)
time.sleep(seconds)
os.kill(pid, signal.SIGCONT)
"""


@contextmanager
def stopped_for(seconds: float) -> Iterator[None]:
    """It stops a moment after this has begun, and may be stopped anywhere in the body."""
    command = [sys.executable, "-I", "-S", "-c", _SCRIPT, str(os.getpid()), str(seconds)]
    with subprocess.Popen(command):
        yield

"""Stops the process that calls it, and lets it go on, as a debugger or a full machine does."""

import os
import subprocess
import sys

_SCRIPT = """
import os, signal, sys, time
pid, seconds = int(sys.argv[1]), float(sys.argv[2])
os.kill(pid, signal.SIGSTOP)
time.sleep(seconds)
os.kill(pid, signal.SIGCONT)
"""


def stop_for(seconds: float) -> "subprocess.Popen[bytes]":
    """From a moment after this returns."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _SCRIPT, str(os.getpid()), str(seconds)]
    )

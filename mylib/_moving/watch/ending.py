"""The last words of this process, and its end. The main thread may hang, also while it prints."""

import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

_log = logging.getLogger("mylib")

# The status of processes that are ended: none of Python's, of the shell's, or of signals.
STATUS = 87

# Seconds to print something. The main thread may hold the lock that this needs.
_PRINTING = 5.0


def say(text: str) -> None:
    _in_time(lambda: _log.error("%s", text))


def leave_python() -> NoReturn:
    """Ends this process at once: what hangs can't be cleaned up."""
    _in_time(_flush)
    os._exit(STATUS)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def _in_time(act: Callable[[], None]) -> None:
    thread = threading.Thread(target=act, name="mylib-printing", daemon=True)
    thread.start()
    thread.join(_PRINTING)

"""Wakes up a thread: to end it, or by a signal."""

import signal
import socket

# No signal has this number.
_END = b"\0"


class Wakeup:
    """The thread waits here. Python's own handlers run in the main thread, which may hang in C; but
    what C knows of a signal, it writes into a socket at once.
    """

    def __init__(self, signum: int | None):
        self._signum = signum
        self._reads, self._writes = socket.socketpair()
        if signum is not None:
            self._writes.setblocking(False)
            self._handler = signal.signal(signum, lambda *_: None)
            self._former = signal.set_wakeup_fd(self._writes.fileno(), warn_on_full_buffer=False)

    def wait(self, seconds: float) -> bool | None:
        """Whether the signal has come, within this time; None at the end."""
        self._reads.settimeout(seconds)
        try:
            signals = self._reads.recv(64)
        except TimeoutError:
            return False
        if _END in signals:
            return None
        return self._signum is not None and self._signum in signals

    def close(self) -> None:
        if self._signum is not None:
            signal.set_wakeup_fd(self._former, warn_on_full_buffer=False)
            signal.signal(self._signum, self._handler)
        self._writes.send(_END)

    def free(self) -> None:
        """After the thread has ended."""
        self._reads.close()
        self._writes.close()

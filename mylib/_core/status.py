"""What is being done, in one line on the terminal."""

import sys
import threading
from typing import ClassVar

# Seconds until the line appears, and between two states of it.
_AFTER, _EVERY = 2.0, 0.2


class StatusLine:
    """A line on stderr that shows the latest text, and is erased at the end. By default only on a
    terminal, and once two seconds have passed; with `is_on` each text, at once. Inside of another
    one it shows nothing.
    """

    _is_open: ClassVar[bool] = False

    def __init__(self, text: str, is_on: bool | None = None):
        self._text, self._width, self._done = text, 0, threading.Event()
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._after = _AFTER if is_on is None else 0.0
        self._is_on = (is_terminal if is_on is None else is_on) and not StatusLine._is_open
        self._thread = threading.Thread(target=self._show, daemon=True)

    def write(self, text: str) -> None:
        self._text = text
        if self._is_on and not self._after:
            self._print(text)

    def __enter__(self) -> "StatusLine":
        if self._is_on:
            StatusLine._is_open = True
            if self._after:
                self._thread.start()
            else:
                self._print(self._text)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_on:
            self._done.set()
            if self._after:
                self._thread.join()
            StatusLine._is_open = False
            if self._width:
                self._print("")
                print("\r", end="", file=sys.stderr, flush=True)

    def _show(self) -> None:
        pause = self._after
        while not self._done.wait(pause):
            self._print(self._text)
            pause = _EVERY

    def _print(self, text: str) -> None:
        print(f"\r{text:<{self._width}}", end="", file=sys.stderr, flush=True)
        self._width = len(text)

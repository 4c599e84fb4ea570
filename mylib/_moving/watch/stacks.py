"""Where the threads of this process are, as text. The files themselves are not read: their disk may
be what hangs.
"""

import sys
import threading
from itertools import takewhile
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any, NamedTuple

from ..._core.lines import FROZEN, JAX, OURS, innermost, is_of_user, spot

# The most frames of a thread that are shown.
_SHOWN = 12
# Threads whose stacks say nothing: they only send messages.
_HELPERS = ("mylib-",)


class Thread(NamedTuple):
    """Where a thread is."""

    name: str
    frames: list[FrameType]  # the innermost first

    def where(self) -> str:
        """The innermost line of the user's own."""
        frame = innermost(self.frames, lambda frame: frame.f_code.co_filename)
        return _line(frame or self.frames[0])

    def is_in_jax(self) -> bool:
        """Whether the user's innermost line has called JAX, which may wait for devices there."""
        inside = takewhile(lambda frame: not _is_of_user(frame), self.frames)
        return any(frame.f_code.co_filename.startswith(JAX) for frame in inside)

    def starts(self) -> tuple[Any, str] | None:
        """The call of `filter_jit` that has not returned, and its line."""
        call: Any = None
        for frame in self.frames:
            code = frame.f_code
            if code.co_qualname == "Dispatcher.call" and code.co_filename.startswith(OURS):
                call = frame.f_locals["call"]
            elif call is not None and _is_of_user(frame):
                return call, spot(code.co_filename, frame.f_lineno)
        return None

    def is_in(self, functions: frozenset[tuple[str, str]]) -> bool:
        return any(
            (Path(code.co_filename).name, code.co_name) in functions
            and code.co_filename.startswith(JAX)
            for code in (frame.f_code for frame in self.frames)
        )

    def position(self) -> tuple[tuple[int, int], ...]:
        """Another value when the thread has moved."""
        return tuple((id(frame.f_code), frame.f_lasti) for frame in self.frames)

    def lines(self) -> list[str]:
        """The frames of the user's own, and between them only the innermost of a library; the
        outermost first.
        """
        shown = [
            frame
            for frame, inner in zip(self.frames, [None, *self.frames], strict=False)
            if (_is_of_user(frame) or inner is None or _is_of_user(inner))
            and not frame.f_code.co_filename.startswith(FROZEN)
        ]
        # The frames that started Python's program or thread.
        while len(shown) > 1 and not _is_of_user(shown[-1]):
            shown.pop()
        return [_line(frame) for frame in shown[:_SHOWN]][::-1]


def threads() -> dict[int, Thread]:
    """The threads that run Python, but those that only send messages, and this one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        ident: Thread(names.get(ident, ""), [inner for inner, _ in walk_stack(frame)])
        for ident, frame in sys._current_frames().items()  # pyright: ignore[reportPrivateUsage]
        if ident != threading.get_ident() and not names.get(ident, "").startswith(_HELPERS)
    }


def _is_of_user(frame: FrameType) -> bool:
    return is_of_user(frame.f_code.co_filename)


def _line(frame: FrameType) -> str:
    code = frame.f_code
    # A file of a library with its folders: many have the same name.
    name = None if _is_of_user(frame) else "/".join(Path(code.co_filename).parts[-3:])
    return f"{spot(code.co_filename, frame.f_lineno, name)} in {code.co_name}"

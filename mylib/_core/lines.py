"""Which line of code is the user's: the one that errors, warnings and reports name."""

import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import TypeVar

import equinox as eqx
import jax

T = TypeVar("T")


def _folder(path: str | Path) -> str:
    # With the separator: `mylib_train.py` is not in the folder `mylib`.
    return str(path) + os.sep


OURS = _folder(Path(__file__).parents[1])
JAX = _folder(Path(jax.__file__).parent)
_EQUINOX = _folder(Path(eqx.__file__).parent)
# Python's own modules that are no files.
FROZEN = "<frozen"
_PYTHON = tuple(_folder(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
_INSTALLED = tuple(_folder(sysconfig.get_path(name)) for name in ("purelib", "platlib"))
# On any machine: programs that were compiled elsewhere name files of that machine.
_ANYWHERE = (_folder(os.sep + "site-packages"), _folder(os.sep + "dist-packages"))


@lru_cache(maxsize=4096)
def _rank(file: str) -> int:
    """0 for the user's files, 1 for those of packages that are installed, which may be the user's,
    too, and 2 for those of this package, JAX, Equinox and Python.
    """
    if file.startswith((OURS, JAX, _EQUINOX, FROZEN)):
        return 2
    # Before Python's own folder, which may contain that of the packages.
    if file.startswith(_INSTALLED) or any(folder in file for folder in _ANYWHERE):
        return 1
    return 2 if file.startswith(_PYTHON) else 0


def is_of_user(file: str) -> bool:
    return _rank(file) == 0


def innermost(frames: Iterable[T], file_of: Callable[[T], str]) -> T | None:
    """The first frame in a file of the user's, from the innermost on; without one, the first of
    another package, or else the first.
    """
    best, least = None, 3
    for frame in frames:
        rank = _rank(file_of(frame))
        if rank == 0:
            return frame
        if rank < least:
            best, least = frame, rank
    return best


def calling_frame(frame: FrameType | None = None) -> FrameType:
    """The frame of the user's that has called this package, around `frame`."""
    first = at = sys._getframe(1) if frame is None else frame  # pyright: ignore[reportPrivateUsage]
    best, least = first, _rank(first.f_code.co_filename)
    # Not `innermost`: `watch` asks at each call, and a generator of frames would take longer.
    while least and at is not None:
        rank = _rank(at.f_code.co_filename)
        if rank < least:
            best, least = at, rank
        at = at.f_back
    return best


def spot(file: str, line: int | str, name: str | None = None) -> str:
    """A line as messages name it: `train.py:31`, or `cell 4, line 6` of a notebook. `name` is the
    file's, if not the last part of its path.
    """
    # IPython gives each cell a file of its own.
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    name_of = getattr(getattr(shell, "compile", None), "format_code_name", lambda file: None)
    named = name_of(file)
    if named:
        return f"cell {named[1].removeprefix('In[').rstrip(']')}, line {line}"
    return f"{name or Path(file).name}:{line}"


def line_of_caller() -> str:
    """The user's line that called this package: `train.py:31`."""
    frame = calling_frame()
    return spot(frame.f_code.co_filename, frame.f_lineno)


def line_that_raised(error: BaseException) -> str:
    """The user's line that raised an error: `train.py:31`."""
    frames = [*traceback.walk_tb(error.__traceback__)][::-1]
    found = innermost(frames, lambda frame: frame[0].f_code.co_filename)
    return "" if found is None else spot(found[0].f_code.co_filename, found[1])

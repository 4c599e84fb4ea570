"""Functions that are equal share one program: `filter_jit(filter_grad(f))` is a new object every
time, but need not be compiled every time.
"""

import weakref
from collections.abc import Iterator
from types import MethodType
from typing import Any

from .._tree import Split, outlined
from .program import Program
from .recent import Recent

# The most programs that are kept beside one function.
_MOST = 512


def shared(program: Program) -> Program:
    """That of an equal function, if there is one."""
    # Of two equal functions that can change, one may.
    if program.inputs is not None or program.out_shardings is not None or program.fun.state:
        return program
    _, options = outlined((program.donate, dict(program.options)))
    key = program.fun, program.mesh, options
    try:
        programs = _beside(program.fun)
        return programs.find(key) or programs.add(key, program)
    except TypeError:  # the function holds something unhashable
        return program


class _SharedPrograms(Recent[Any, Program]):
    """The programs of a function, which keeps them in its `__dict__`. Programs keep the function
    alive, so if we kept them, it would never go; Python finds that the two only keep each other.
    """

    def __init__(self, owner: Any = None) -> None:
        super().__init__(_MOST)
        self.owner = None if owner is None else weakref.ref(owner)

    def __reduce__(self) -> Any:
        # Copies of the function have programs of their own.
        return _SharedPrograms, ()


_NAME = "__mylib_programs__"
# Those of functions that stay until the process ends.
_of_lasting = _SharedPrograms()


def _beside(fun: Split) -> _SharedPrograms:
    """The programs that are kept beside the first part of a function that may go."""
    owner = next(filter(_may_go, _parts_of(fun)), None)
    if owner is None:
        return _of_lasting
    programs = vars(owner).get(_NAME)
    # `functools.wraps` copies what is in `__dict__`.
    if programs is None or programs.owner is None or programs.owner() is not owner:
        programs = vars(owner)[_NAME] = _SharedPrograms(owner)
    return programs


def _parts_of(fun: Split) -> Iterator[Any]:
    """The functions in a tree, and the objects whose methods are in it."""
    for x in (*fun.static, *fun.data):
        if isinstance(x, Program):
            yield from _parts_of(x.fun)
        elif isinstance(x, MethodType):
            yield from (x.__self__, x.__func__)
        elif callable(x) and type(x).__hash__ is object.__hash__:  # compared by identity
            yield x


def _may_go(part: Any) -> bool:
    """Not classes, and not what a module defines."""
    if isinstance(part, type) or not hasattr(part, "__dict__"):
        return False
    return "<" in getattr(part, "__qualname__", "<")

"""Functions that are equal share one dispatcher: `filter_jit(filter_grad(f))` is a new object every
time, but need not be compiled every time.
"""

import weakref
from collections.abc import Iterator
from types import MethodType
from typing import Any

from ..._core.tree import Outline, outlined
from .dispatcher import Dispatcher
from .recent import Recent

# The most dispatchers that are kept beside one function. A guess: a program has fewer ways to
# transform one, and a loop that makes new ones without end must not fill the memory.
_MOST = 512


def shared(dispatcher: Dispatcher) -> Dispatcher:
    """The dispatcher of an equal function, if there is one."""
    # Two equal functions that can change are kept apart: one of them may change.
    is_placing = dispatcher.inputs is not None or dispatcher.out_shardings is not None
    if is_placing or dispatcher.fun.state:
        return dispatcher
    _, options = outlined((dispatcher.donate, dict(dispatcher.options)))
    key = dispatcher.fun, dispatcher.mesh, options
    try:
        dispatchers = _beside(dispatcher.fun)
        return dispatchers.find(key) or dispatchers.add(key, dispatcher)
    except TypeError:  # the function holds something unhashable
        return dispatcher


class _SharedDispatchers(Recent[Any, Dispatcher]):
    """The dispatchers of a function, which keeps them in its `__dict__`. They keep the function
    alive, so if we kept them, it would never go; Python finds that the two only keep each other.
    """

    def __init__(self, owner: object = None) -> None:
        super().__init__(_MOST)
        self.owner = None if owner is None else weakref.ref(owner)

    def __reduce__(self) -> Any:
        # Copies of the function have dispatchers of their own.
        return _SharedDispatchers, ()


_NAME = "__mylib_programs__"
# The dispatchers of functions that stay until the process ends.
_of_lasting = _SharedDispatchers()


def _beside(fun: Outline) -> _SharedDispatchers:
    """The dispatchers that are kept beside the first part of a function that may go."""
    owner = next(filter(_may_go, _parts_of(fun)), None)
    if owner is None:
        return _of_lasting
    dispatchers = vars(owner).get(_NAME)
    # `functools.wraps` copies what is in `__dict__`.
    if dispatchers is None or dispatchers.owner is None or dispatchers.owner() is not owner:
        dispatchers = vars(owner)[_NAME] = _SharedDispatchers(owner)
    return dispatchers


def _parts_of(fun: Outline) -> Iterator[object]:
    """The functions in a tree, and the objects whose methods are in it."""
    for part in (*fun.static, *fun.data):
        if isinstance(part, Dispatcher):
            yield from _parts_of(part.fun)
        elif isinstance(part, MethodType):
            yield from (part.__self__, part.__func__)
        elif callable(part) and type(part).__hash__ is object.__hash__:  # compared by identity
            yield part


def _may_go(part: object) -> bool:
    """Not classes, and not what a module defines."""
    if isinstance(part, type) or not hasattr(part, "__dict__"):
        return False
    return "<" in getattr(part, "__qualname__", "<")

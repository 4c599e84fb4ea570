"""What `filter_jit` warns of once a program has been compiled: arrays that it captured, donations
that it had no use for, a second compilation for the same shapes. Nothing here changes a result.
"""

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.sharding import Sharding

from .._errors import CapturedArrayWarning, DonationWarning, RecompilationWarning, warn
from .._programs import parts_of
from .._tree import Arrays

Captured = Callable[[], Iterable[tuple[str, Any]]]
# From how many bytes on a captured array is worth a word.
_LARGE = 2**20


class _Thread(threading.local):
    """How many of our programs JAX is tracing in this thread, one inside the other."""

    def __init__(self) -> None:
        self.depth = 0
        # What may have been captured by programs that are parts of the outermost one.
        self.captured: list[Captured] = []


_thread = _Thread()


@contextmanager
def tracing() -> Iterator[None]:
    """Surrounds the tracing of a program."""
    if not _thread.depth:
        _thread.captured = []
    _thread.depth += 1
    try:
        yield
    finally:
        _thread.depth -= 1


class Advice:
    """What there is to warn of about one program. `names` gives the names of its arrays, `captured`
    the arrays that its function may capture, with theirs; `about_donations` is whether to warn of
    those that it had no use for.
    """

    def __init__(
        self,
        name: str,
        names: Callable[[], list[str]],
        captured: Captured,
        about_donations: bool,
    ):
        self._name = name
        self._names = names
        self._captured = captured
        self._about_donations = about_donations
        # Large arrays that a trace has captured, until there has been a warning.
        self._large: list[Any] = []
        self._inner: list[Captured] = []
        # Where the arguments were when this was compiled, and what it returned then.
        self._places: list[_Place] = []
        self._returned: list[weakref.ref[Any]] = []

    def look_at(self, closed: Any) -> None:
        """Takes note of what a program, given as a closed jaxpr, has captured."""
        if _thread.depth:  # it is a part of another program, which will be looked at
            _thread.captured.append(self._captured)
            return
        constants = (x for part in parts_of(closed) for x in getattr(part, "consts", ()))
        self._large = [x for x in constants if getattr(x, "nbytes", 0) >= _LARGE]
        self._inner = _thread.captured

    @property
    def is_due(self) -> bool:
        """Whether there is something to warn of even if nothing was compiled."""
        return bool(self._large)

    def about_captured(self) -> None:
        """Warns of what the last trace captured."""
        large, self._large = self._large, []
        if not large:
            return
        captured = [named for look in (self._captured, *self._inner) for named in look()]
        shown = ", ".join(_show_constant(x, captured) for x in large)
        warn(
            f"{self._name} captures large arrays: {shown}. They become part of the compiled "
            "program, whole on every device, and no report of its memory shows them. Pass them "
            "as arguments.",
            CapturedArrayWarning,
        )

    def about_compiled(self, arrays: Arrays, donated: Arrays, returned: Arrays) -> None:
        """Warns after a call for which the program was compiled. The last of the arrays are those
        that were donated.
        """
        if any(isinstance(x, Tracer) for x in (*arrays, *returned)):
            return
        before, self._places = self._places, [_place(x) for x in arrays]
        own, self._returned = (
            self._returned,
            [weakref.ref(x) for x in returned if isinstance(x, jax.Array)],
        )
        if self._about_donations:
            self._about_kept(donated)
        self._about_moved(arrays, before, {id(known()) for known in own})

    def _about_kept(self, donated: Arrays) -> None:
        first = len(self._places) - len(donated)
        kept = [
            f"{name} {tuple(x.shape)}"
            for name, x in zip(self._names()[first:], donated, strict=True)
            if isinstance(x, jax.Array) and not x.is_deleted()
        ]
        if kept:
            warn(
                f"Some donated buffers were not usable: {self._name} was given {_some(kept)}. It "
                "makes no use of them, or returns nothing of the same shape, dtype and sharding "
                "that could take their memory.",
                DonationWarning,
            )

    def _about_moved(self, arrays: Arrays, before: "list[_Place]", own: set[int]) -> None:
        if [place.shape for place in before] != [place.shape for place in self._places]:
            return
        moved = [
            f"{name}: {_show_place(then)}, then {_show_place(now)}"
            for name, x, then, now in zip(self._names(), arrays, before, self._places, strict=True)
            if id(x) in own and then != now
        ]
        if moved:
            warn(
                f"{self._name} was compiled twice for the same shapes: what it returned is not "
                f"where it was given. {_some(moved)}. Place it before the first call, or give "
                "in_shardings and out_shardings.",
                RecompilationWarning,
            )


class _Place(NamedTuple):
    """Where an array was; nowhere, if it was NumPy's."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding | None
    committed: bool


def _place(x: Any) -> _Place:
    on_device = isinstance(x, jax.Array)
    return _Place(x.shape, x.dtype, x.sharding if on_device else None, on_device and x.committed)


def _show_place(place: _Place) -> str:
    return f"{place.sharding}" + ("" if place.committed else ", not committed")


def _some(texts: list[str]) -> str:
    more = f", and {len(texts) - 8} more" if len(texts) > 8 else ""
    return ", ".join(texts[:8]) + more


def _show_constant(x: Any, captured: Iterable[tuple[str, Any]]) -> str:
    size = f"{x.dtype}{list(x.shape)}, {x.nbytes / 2**20:.4g} MiB"
    name = next((name for name, y in captured if _is_same(x, y)), None)
    return size if name is None else f"{name} ({size})"


def _is_same(constant: Any, x: Any) -> bool:
    # JAX wraps a NumPy array that it finds.
    return constant is x or (isinstance(x, np.ndarray) and np.may_share_memory(constant, x))


def code_of(fun: Any) -> FunctionType | None:
    """The Python function behind a callable, where there is one."""
    fun = inspect.unwrap(fun)
    while isinstance(fun, functools.partial | eqx.Partial):
        fun = fun.func
    if not isinstance(fun, FunctionType | MethodType | type):
        fun = inspect.unwrap(inspect.getattr_static(type(fun), "__call__"))
    fun = getattr(fun, "__func__", fun)
    return fun if isinstance(fun, FunctionType) else None


def captured_by(code: FunctionType | None) -> Iterator[tuple[str, Any]]:
    """The leaves of what a function finds outside of its arguments, by name."""
    for name, value in _variables(code):
        try:
            leaves = jtu.tree_flatten_with_path(value)[0]
        except (TypeError, ValueError):
            continue  # no tree: it can't be what was captured
        for path, x in leaves:
            yield name + jtu.keystr(path), x


def _variables(code: FunctionType | None) -> Iterator[tuple[str, Any]]:
    """What a function finds outside of itself, by name."""
    if code is None:
        return
    for name, cell in zip(code.__code__.co_freevars, code.__closure__ or (), strict=True):
        with suppress(ValueError):  # a cell that nothing has been put into
            yield name, cell.cell_contents
    for name in code.__code__.co_names:
        if name in code.__globals__:
            yield name, code.__globals__[name]

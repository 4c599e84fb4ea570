"""The warnings of `filter_jit` after a compilation: captured arrays, unused donations, a second
compilation for the same shapes, and what `arrivals.py` finds. Nothing here changes a result.
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

from .._errors import CapturedArrayWarning, DonationWarning, RecompilationWarning, folded, warn
from .._programs import all_jaxprs
from .._tree import Arrays
from .arrivals import Arrivals

Captured = Callable[[], Iterable[tuple[str, Any]]]
# Captured arrays of this many bytes or more are reported.
_LARGE = 2**20


class _Thread(threading.local):
    """The number of our programs, nested in each other, that this thread is tracing."""

    def __init__(self) -> None:
        self.depth = 0
        # The possible captures of programs nested in the outermost one.
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
    """The warnings about one program. `names` returns the names of its arrays, `captured` the
    arrays that its function may capture, with their names; `about_donations` is whether to warn
    about unused donations.
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
        self.arrivals: Arrivals = Arrivals(name, names)
        # Large arrays captured by the last trace, until the warning is given.
        self.large: list[Any] = []
        self._inner: list[Captured] = []
        # The arguments' shardings at the last compilation, and the results of that call.
        self._locations: list[_Location] = []
        self._returned: list[weakref.ref[Any]] = []

    def look_at(self, closed: Any) -> None:
        """Finds the large arrays that a closed jaxpr has captured."""
        if _thread.depth:  # the outermost program is looked at instead
            _thread.captured.append(self._captured)
            return
        constants = (x for jaxpr in all_jaxprs(closed) for x in getattr(jaxpr, "consts", ()))
        self.large = [x for x in constants if getattr(x, "nbytes", 0) >= _LARGE]
        self._inner = _thread.captured

    def about_captured(self) -> None:
        """Warns about arrays that the last trace captured."""
        large, self.large = self.large, []
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
        """Warns after a call that compiled the program. Donated arrays come last in `arrays`."""
        self.arrivals.compare(arrays)
        if any(isinstance(x, Tracer) for x in (*arrays, *returned)):
            return
        before, self._locations = self._locations, [_location_of(x) for x in arrays]
        own, self._returned = (
            self._returned,
            [weakref.ref(x) for x in returned if isinstance(x, jax.Array)],
        )
        if self._about_donations:
            self._about_kept(donated)
        self._about_moved(arrays, before, {id(known()) for known in own})

    def _about_kept(self, donated: Arrays) -> None:
        first = len(self._locations) - len(donated)
        kept = [
            f"{name} {tuple(x.shape)}"
            for name, x in zip(self._names()[first:], donated, strict=True)
            if isinstance(x, jax.Array) and not x.is_deleted()
        ]
        if kept:
            warn(
                f"Some donated buffers were not usable: {self._name} was given {some(kept)}. It "
                "does not use them, or returns nothing of the same shape, dtype and sharding that "
                "could take their memory.",
                DonationWarning,
            )

    def _about_moved(self, arrays: Arrays, before: "list[_Location]", own: set[int]) -> None:
        if [location.shape for location in before] != [
            location.shape for location in self._locations
        ]:
            return
        moved: dict[str, list[str]] = {}
        for name, x, then, now in zip(self._names(), arrays, before, self._locations, strict=True):
            if id(x) in own and then != now:
                moved.setdefault(_show_move(then, now), []).append(name)
        if moved:
            texts = [f"{some(list(folded(names)))}: {how}" for how, names in moved.items()]
            warn(
                f"{self._name} was compiled twice for the same shapes. Give it in_shardings and "
                "out_shardings, or place these arguments before the first call, as its results "
                f"came back with other shardings: {some(texts, '; ')}.",
                RecompilationWarning,
            )


class _Location(NamedTuple):
    """An argument's sharding at the last compilation; None for NumPy arrays."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding | None
    committed: bool


def _location_of(x: Any) -> _Location:
    on_device = isinstance(x, jax.Array)
    return _Location(x.shape, x.dtype, x.sharding if on_device else None, on_device and x.committed)


def _show_move(then: _Location, now: _Location) -> str:
    first, second = _show_location(then), _show_location(now)
    return f"{first}, then {second}" + (" on another mesh" if first == second else "")


def _show_location(location: _Location) -> str:
    if location.sharding is None:
        return "a NumPy array"
    from .._show import show_place  # which most programs don't need

    return show_place(location.sharding) + ("" if location.committed else " (not committed)")


def some(texts: list[str], separator: str = ", ") -> str:
    more = f"{separator}and {len(texts) - 8} more" if len(texts) > 8 else ""
    return separator.join(texts[:8]) + more


def _show_constant(x: Any, captured: Iterable[tuple[str, Any]]) -> str:
    size = f"{x.dtype}{list(x.shape)}, {x.nbytes / 2**20:.4g} MiB"
    name = next((name for name, y in captured if _is_same(x, y)), None)
    return size if name is None else f"{name} ({size})"


def _is_same(constant: Any, x: Any) -> bool:
    # JAX wraps captured NumPy arrays.
    return constant is x or (isinstance(x, np.ndarray) and np.may_share_memory(constant, x))


def code_of(fun: Any) -> FunctionType | None:
    """The Python function behind a callable, or None."""
    fun = inspect.unwrap(fun)
    while isinstance(fun, functools.partial | eqx.Partial):
        fun = fun.func
    if not isinstance(fun, FunctionType | MethodType | type):
        fun = inspect.unwrap(inspect.getattr_static(type(fun), "__call__"))
    fun = getattr(fun, "__func__", fun)
    return fun if isinstance(fun, FunctionType) else None


def captured_by(code: FunctionType | None) -> Iterator[tuple[str, Any]]:
    """The leaves that a function may capture, by name."""
    for name, value in _variables(code):
        try:
            leaves = jtu.tree_flatten_with_path(value)[0]
        except (TypeError, ValueError):
            continue  # not a tree: can't have been captured
        for path, x in leaves:
            yield name + jtu.keystr(path), x


def _variables(code: FunctionType | None) -> Iterator[tuple[str, Any]]:
    """The closure variables and globals of a function, by name."""
    if code is None:
        return
    for name, cell in zip(code.__code__.co_freevars, code.__closure__ or (), strict=True):
        with suppress(ValueError):  # an empty cell
            yield name, cell.cell_contents
    for name in code.__code__.co_names:
        if name in code.__globals__:
            yield name, code.__globals__[name]

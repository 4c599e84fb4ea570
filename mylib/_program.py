"""A function with its static leaves fixed: traced, looked at, compiled and called."""

import inspect
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from operator import not_
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.sharding import Sharding

from ._leaves import Kind, kind_of
from ._world import has_error_check, readable_error

Arrays = list[Any]
# From how many bytes on a captured array is worth a word.
_LARGE = 2**20


@jtu.register_static
@dataclass(frozen=True, eq=False)
class Outline:
    """A tree without its arrays: its structure, and its other leaves with their positions."""

    treedef: Any
    static: tuple[tuple[int, Any], ...]

    @property
    def count(self) -> int:
        """How many arrays there were."""
        return self.treedef.num_leaves - len(self.static)

    def fill(self, arrays: Iterable[Any]) -> Any:
        leaves = list(arrays)
        # In order, so that each comes where it was. There are few of them, mostly.
        for position, x in self.static:
            leaves.insert(position, x)
        return jtu.tree_unflatten(self.treedef, leaves)

    @property
    def key(self) -> Any:
        """Equal for trees that are the same but for their arrays."""
        return self.treedef, tuple([(i, *_key_of(x)) for i, x in self.static])


def outlined(tree: Any, abstract: bool = False) -> tuple[Arrays, Outline]:
    """A tree's arrays, and the rest of it. `jax.ShapeDtypeStruct`s are arrays if `abstract`."""
    leaves, treedef = jtu.tree_flatten(tree)
    are_arrays = _which_are_arrays(tuple(map(type, leaves)), abstract)
    if are_arrays is None:
        are_arrays = [_is_array(x, abstract) for x in leaves]
    arrays = list(compress(leaves, are_arrays))
    if len(arrays) == len(leaves):
        return arrays, Outline(treedef, ())
    static = tuple(compress(enumerate(leaves), map(not_, are_arrays)))
    return arrays, Outline(treedef, static)


@lru_cache(maxsize=4096)
def _which_are_arrays(types: tuple[type, ...], abstract: bool) -> tuple[bool, ...] | None:
    """For each type whether it is one of arrays, or None if the types don't tell."""
    if any(issubclass(t, np.ndarray | np.generic) for t in types):
        return None  # there are dtypes that JAX has no arrays for
    return tuple(_is_array_type(t, abstract) for t in types)


def _is_array_type(t: type, abstract: bool) -> bool:
    return issubclass(t, jax.Array | Tracer) or (abstract and issubclass(t, jax.ShapeDtypeStruct))


def _is_array(x: Any, abstract: bool) -> bool:
    if isinstance(x, np.ndarray | np.generic):
        return kind_of(x) is not Kind.STATIC
    return _is_array_type(type(x), abstract)


def _key_of(x: Any) -> tuple[type, Any]:
    # Otherwise 1 and True and 1.0 are the same, and 0.0 and -0.0.
    return type(x), repr(x) if isinstance(x, float | complex) else x


class _Thread(threading.local):
    """What JAX has done for this thread: the traces that it has made of our programs and nobody has
    looked at yet, and how many programs it has compiled.
    """

    def __init__(self) -> None:
        self.compiled = 0
        self.hushed: list[warnings.catch_warnings[Any]] = []

    def hush(self) -> None:
        """Until `settle` is called JAX is not heard of donated buffers: it names no array, and says
        nothing where it is the shardings that differ.
        """
        hushed = warnings.catch_warnings()
        hushed.__enter__()
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        self.hushed.append(hushed)

    @property
    def traced(self) -> int:
        return len(self.hushed)

    def settle(self, traced: int) -> None:
        """Back to so many traces."""
        while len(self.hushed) > traced:
            self.hushed.pop().__exit__(None, None, None)


_thread = _Thread()


def _count(event: str, duration_secs: float, **kwargs: str | int) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _thread.compiled += 1


jax.monitoring.register_event_duration_secs_listener(_count)


class Program:
    """`call`, a function of a list of arrays that returns a tree, compiled for each of the arrays'
    shapes.

    For warnings, `names` gives the arrays' names, and `captured` the arrays that the function may
    capture, with theirs. The arrays from `donated_from` on are donated.
    """

    def __init__(
        self,
        call: Callable[[Arrays], Any],
        name: str,
        names: Callable[[], list[str]],
        captured: Callable[[], Iterable[tuple[str, Any]]],
        donated_from: int | None,
        tell_kept: bool,
    ):
        self._name = name
        self._names = names
        self._captured = captured
        self._donated_from = donated_from
        self._tell_kept = tell_kept
        self._checks_errors = False
        # Equinox looks for it on the stack, to show no more of it than what is inside the program.
        self._id = os.urandom(16)
        # Where the arguments were when this was compiled, and what it returned then.
        self._places: list[Any] = []
        self._returned: list[weakref.ref[Any]] = []

        def run(kept: Arrays, donated: Arrays) -> tuple[Arrays, Outline]:
            result = outlined(call([*kept, *donated]))
            _thread.hush()
            return result

        run.__name__ = run.__qualname__ = name
        self._jitted = jax.jit(run, donate_argnums=1)

    def __call__(self, arrays: Arrays, compiled: jax.stages.Compiled | None = None) -> Any:
        """Calls the function; `compiled` is what to use of it if it was compiled ahead of time."""
        __equinox_jit_id__ = self._id  # noqa: F841
        sides = self._sides(arrays)
        before = _thread.traced, _thread.compiled
        try:
            returned, outline = (compiled or self._jitted)(*sides)
            if _thread.compiled != before[1]:
                self._tell_what_moved(arrays)
            if _thread.traced != before[0]:
                _thread.settle(before[0])
                self._first(sides, returned)
            if self._checks_errors:
                # Errors come when the work is done; then only this place can make them readable.
                jax.block_until_ready(returned)
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            readable = readable_error(error, self._id)
            if readable is None:
                raise
            raise readable from None
        finally:
            _thread.settle(before[0])
        return outline.fill(returned)

    def lower(self, arrays: Arrays) -> jax.stages.Lowered:
        __equinox_jit_id__ = self._id  # noqa: F841
        sides, traced = self._sides(arrays), _thread.traced
        try:
            self._look_at(self._jitted.trace(*sides).jaxpr)
            return self._jitted.lower(*sides)
        finally:
            _thread.settle(traced)

    def _sides(self, arrays: Arrays) -> tuple[Arrays, Arrays]:
        if self._donated_from is None:
            return arrays, []
        return arrays[: self._donated_from], arrays[self._donated_from :]

    def _first(self, sides: tuple[Arrays, Arrays], returned: Arrays) -> None:
        """What is to be done when the function has been traced, and called for the first time."""
        # JAX has the trace still.
        self._look_at(self._jitted.trace(*sides).jaxpr)
        if not any(isinstance(x, Tracer) for x in (*sides[0], *sides[1], *returned)):
            self._places = [_place(x) for side in sides for x in side]
            self._returned = [weakref.ref(x) for x in returned]
            if self._tell_kept:
                self._tell_what_was_kept(sides[1])

    def _look_at(self, closed: Any) -> None:
        self._checks_errors |= has_error_check(closed.jaxpr)
        large = [x for x in closed.consts if getattr(x, "nbytes", 0) >= _LARGE]
        if large:
            captured = list(self._captured())
            shown = ", ".join(_show_constant(x, captured) for x in large)
            self._warn(
                f"captures large arrays: {shown}. They become part of the compiled program, whole "
                "on every device, and no report of its memory shows them. Pass them as arguments."
            )

    def _tell_what_was_kept(self, donated: Arrays) -> None:
        first = len(self._places) - len(donated)
        kept = [
            f"{name} {tuple(x.shape)}"
            for name, x in zip(self._names()[first:], donated, strict=True)
            if isinstance(x, jax.Array) and not x.is_deleted()
        ]
        if kept:
            self._warn(
                f"was given {_some(kept)}. It makes no use of them, or returns nothing of the same "
                "shape, dtype and sharding that could take their memory.",
                "Some donated buffers were not usable: ",
            )

    def _tell_what_moved(self, arrays: Arrays) -> None:
        if not self._returned or any(isinstance(x, Tracer) for x in arrays):
            return
        own = {id(known()) for known in self._returned}
        moved = [
            f"{name}: {_show_place(before)}, then {_show_place(_place(x))}"
            for name, x, before in zip(self._names(), arrays, self._places, strict=False)
            if id(x) in own and before is not None and _has_moved(before, _place(x))
        ]
        if moved:
            self._warn(
                "was compiled twice for the same shapes: what it returned is not where it was "
                f"given. {_some(moved)}. Place it before the first call, or give in_shardings "
                "and out_shardings."
            )
            self._returned = []

    def _warn(self, told: str, what: str = "") -> None:
        warnings.warn(f"{what}{self._name} {told}", stacklevel=_outside())


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


class _Place(NamedTuple):
    sharding: Sharding
    committed: bool
    shape: tuple[int, ...]


def _place(x: Any) -> Any:
    return _Place(x.sharding, x.committed, x.shape) if isinstance(x, jax.Array) else None


def _has_moved(before: _Place, now: _Place) -> bool:
    return before != now and before.shape == now.shape


def _show_place(place: _Place) -> str:
    return f"{place.sharding}" + ("" if place.committed else ", not committed")


def _outside() -> int:
    """How far up the stack from `_warn` the code is that called this package."""
    frame, level = inspect.currentframe(), -1
    package = __name__.partition(".")[0]
    while frame is not None and frame.f_globals["__name__"].startswith(package):
        frame, level = frame.f_back, level + 1
    return level + 1

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
from ._world import current_world, has_error_check, parts_of, readable_error, value_under

Arrays = list[Any]
Static = tuple[tuple[int, Any], ...]
Captured = Callable[[], Iterable[tuple[str, Any]]]
# From how many bytes on a captured array is worth a word.
_LARGE = 2**20


@jtu.register_static
@dataclass(frozen=True, eq=False)
class Outline:
    """A tree without its arrays: its structure, and its other leaves with their positions."""

    treedef: Any
    static: Static

    @property
    def count(self) -> int:
        """How many arrays there were."""
        return self.treedef.num_leaves - len(self.static)

    @property
    def positions(self) -> set[int]:
        """Those of the leaves that are no arrays."""
        return {position for position, _ in self.static}

    def fill(self, arrays: Iterable[Any]) -> Any:
        leaves = list(arrays)
        # In order, so that each comes where it was. There are few of them, mostly.
        for position, x in self.static:
            leaves.insert(position, x)
        return jtu.tree_unflatten(self.treedef, leaves)

    def __reduce__(self) -> Any:
        # As a tree: what is in a treedef can't always be copied.
        return _outline_of, (self.fill([_Gap()] * self.count),)


class _Gap:
    """Stands where an array was."""


def _outline_of(tree: Any) -> Outline:
    leaves, treedef = jtu.tree_flatten(tree)
    static = tuple((i, x) for i, x in enumerate(leaves) if not isinstance(x, _Gap))
    return Outline(treedef, static)


def outlined(tree: Any, abstract: bool = False) -> tuple[Arrays, Outline]:
    """A tree's arrays, and the rest of it. `jax.ShapeDtypeStruct`s are arrays if `abstract`."""
    arrays, treedef, static = parted(tree, abstract)
    return arrays, Outline(treedef, static)


def parted(tree: Any, abstract: bool = False) -> tuple[Arrays, Any, Static]:
    """`outlined`, for what has to be quick."""
    leaves, treedef = jtu.tree_flatten(tree)
    are_arrays = _which_are_arrays(tuple(map(type, leaves)), abstract)
    if are_arrays is None:
        are_arrays = [is_array(x, abstract) for x in leaves]
    arrays = list(compress(leaves, are_arrays))
    if len(arrays) == len(leaves):
        return leaves, treedef, ()
    return arrays, treedef, tuple(compress(enumerate(leaves), map(not_, are_arrays)))


def key_of(treedef: Any, static: Static) -> Any:
    """Equal for trees that are the same but for their arrays."""
    return treedef, tuple([(i, *_key_of(x)) for i, x in static]) if static else ()


@lru_cache(maxsize=4096)
def _which_are_arrays(types: tuple[type, ...], abstract: bool) -> tuple[bool, ...] | None:
    """For each type whether it is one of arrays, or None if the types don't tell."""
    if any(issubclass(t, np.ndarray | np.generic) for t in types):
        return None  # there are dtypes that JAX has no arrays for
    return tuple(_is_array_type(t, abstract) for t in types)


def _is_array_type(t: type, abstract: bool) -> bool:
    return issubclass(t, jax.Array | Tracer) or (abstract and issubclass(t, jax.ShapeDtypeStruct))


def is_array(x: Any, abstract: bool = False) -> bool:
    """Whether a leaf is traced; what isn't, is static."""
    if isinstance(x, np.ndarray | np.generic):
        # What there is no tangent of is nothing to place, but it is an array to JAX.
        return kind_of(x) is not Kind.STATIC or x.dtype == jax.dtypes.float0
    return _is_array_type(type(x), abstract)


def _key_of(x: Any) -> tuple[type, Any]:
    # Otherwise 1 and True and 1.0 are the same, and 0.0 and -0.0.
    return type(x), repr(x) if type(x) in (float, complex) else x


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


class _Thread(threading.local):
    """What JAX does for this thread: how many of our programs it is tracing, how many traces it has
    made of them that nobody has looked at yet, and how many programs it has compiled.
    """

    def __init__(self) -> None:
        self.tracing = 0
        self.traced = 0
        self.compiled = 0
        self.hushed: list[warnings.catch_warnings[Any]] = []
        # What may have been captured by programs that are parts of the one that is being traced.
        self.captured: list[Captured] = []

    def hush(self) -> None:
        """JAX is not heard of donated buffers any more: it names no array, and says nothing where
        it is the shardings that differ.
        """
        hushed = warnings.catch_warnings()
        hushed.__enter__()
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        self.hushed.append(hushed)

    def unhush(self, depth: int) -> None:
        while len(self.hushed) > depth:
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
        captured: Captured,
        donated_from: int | None,
        tell_kept: bool,
    ):
        self._name = name
        self._names = names
        self._captured = captured
        self._donated_from = donated_from
        self._tell_kept = tell_kept
        self._checks_errors = False
        # Large arrays that a trace has captured, until they have been told of.
        self._large: list[Any] = []
        self._inner: list[Captured] = []
        # Equinox looks for it on the stack, to show no more of it than what is inside the program.
        self._id = os.urandom(16)
        # Where the arguments were when this was compiled, and what it returned then.
        self._places: list[_Place] = []
        self._returned: list[weakref.ref[Any]] = []

        def run(kept: Arrays, donated: Arrays) -> tuple[Arrays, Outline]:
            if not _thread.tracing:
                _thread.captured = []
            _thread.tracing += 1
            try:
                result = outlined(call([*kept, *donated]))
            finally:
                _thread.tracing -= 1
            if current_world().staged:  # it is not under `jax.disable_jit`
                _thread.traced += 1
                if donated:
                    _thread.hush()  # what comes next is compiling
            return result

        run.__name__ = run.__qualname__ = name
        self._jitted = jax.jit(run, donate_argnums=1)

    def __call__(
        self, arrays: Arrays, ahead: jax.stages.Compiled | None = None, first: bool = False
    ) -> Any:
        """Calls the function. `ahead` is what to use of it if it was compiled ahead of time, and
        `first` whether that is used for the first time.
        """
        __equinox_jit_id__ = self._id  # noqa: F841
        sides = self._sides(arrays)
        compiled = _thread.compiled
        try:
            returned, outline = self._run(ahead or self._jitted, sides)
            if self._checks_errors:
                # Errors come when the work is done; then only this place can make them readable.
                jax.block_until_ready([value_under(x) for x in returned])
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            readable = readable_error(error, self._id)
            if readable is None:
                raise
            raise readable from None
        if self._large or first or _thread.compiled != compiled:
            self._tell(arrays, returned, first or _thread.compiled != compiled)
        return outline.fill(returned)

    def lower(self, arrays: Arrays) -> jax.stages.Lowered:
        __equinox_jit_id__ = self._id  # noqa: F841
        sides = self._sides(arrays)
        # What it captures is told of now: what comes of this may be called in another process.
        lowered = self._run(self._jitted.lower, sides)
        self._tell([], [], False)
        return lowered

    def _sides(self, arrays: Arrays) -> tuple[Arrays, Arrays]:
        if self._donated_from is None:
            return arrays, []
        return arrays[: self._donated_from], arrays[self._donated_from :]

    def _run(self, call: Callable[..., Any], sides: tuple[Arrays, Arrays]) -> Any:
        traced, hushed = _thread.traced, len(_thread.hushed)
        if sides[1] and not self._places:
            _thread.hush()  # it may have been traced already, by `jax.eval_shape` for one
        try:
            return call(*sides)
        finally:
            if _thread.traced != traced:
                # JAX has the trace still.
                self._look_at(self._jitted.trace(*sides).jaxpr)
                _thread.traced = traced
            _thread.unhush(hushed)

    def _look_at(self, closed: Any) -> None:
        self._checks_errors |= has_error_check(closed)
        if _thread.tracing:  # this is a part of a program, of which all will be told
            _thread.captured.append(self._captured)
            return
        constants = (x for part in parts_of(closed) for x in getattr(part, "consts", ()))
        self._large = [x for x in constants if getattr(x, "nbytes", 0) >= _LARGE]
        self._inner = _thread.captured

    def _tell(self, arrays: Arrays, returned: Arrays, compiled: bool) -> None:
        """Warns of what there is to warn of after a call for which something was compiled."""
        large, self._large = self._large, []
        if large:
            captured = [named for look in (self._captured, *self._inner) for named in look()]
            shown = ", ".join(_show_constant(x, captured) for x in large)
            self._warn(
                f"captures large arrays: {shown}. They become part of the compiled program, whole "
                "on every device, and no report of its memory shows them. Pass them as arguments."
            )
        if compiled and not any(isinstance(x, Tracer) for x in (*arrays, *returned)):
            before, self._places = self._places, [_place(x) for x in arrays]
            own, self._returned = (
                self._returned,
                [weakref.ref(x) for x in returned if isinstance(x, jax.Array)],
            )
            if self._tell_kept:
                self._tell_what_was_kept(self._sides(arrays)[1])
            self._tell_what_moved(arrays, before, {id(known()) for known in own})

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

    def _tell_what_moved(self, arrays: Arrays, before: list[_Place], own: set[int]) -> None:
        if [place.shape for place in before] != [place.shape for place in self._places]:
            return
        moved = [
            f"{name}: {_show_place(then)}, then {_show_place(now)}"
            for name, x, then, now in zip(self._names(), arrays, before, self._places, strict=True)
            if id(x) in own and then != now
        ]
        if moved:
            self._warn(
                "was compiled twice for the same shapes: what it returned is not where it was "
                f"given. {_some(moved)}. Place it before the first call, or give in_shardings "
                "and out_shardings."
            )

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


def _outside() -> int:
    """How far up the stack from `_warn` the code is that called this package."""
    frame, level = inspect.currentframe(), -1
    package = __name__.partition(".")[0]
    while frame is not None and frame.f_globals.get("__name__", "").startswith(package):
        frame, level = frame.f_back, level + 1
    return level + 1

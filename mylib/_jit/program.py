"""A function with fixed static leaves: traced, checked, compiled and called."""

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.tree_util as jtu
from jax.core import Tracer

from .._compat import (
    DELETED_ARRAYS_END_IT,
    INLINING_LOSES_LINES,
    current_trace,
    donation_warning,
    is_eager,
    is_staged,
    jit,
    names,
    new_id,
    readable_error,
    value_under,
    with_actual_memory_kind,
)
from .._placement import current_world
from .._programs import evaluate
from .._tree import Arrays, Outline, outlined
from .advice import Advice, tracing
from .error_checks import Checks, Returned, calling, with_checks_as_values


class _Thread(threading.local):
    """JAX's work in this thread: the number of traces of our programs not yet looked at, and the
    number of programs compiled.
    """

    def __init__(self) -> None:
        self.traced = 0
        self.compiled = 0


_thread = _Thread()


def _count(event: str, duration_secs: float, **kwargs: str | int) -> None:
    if event == names.EVENT_COMPILED:
        _thread.compiled += 1


@functools.cache
def _listen() -> None:
    jax.monitoring.register_event_duration_secs_listener(_count)


class Program:
    """`call`, a function of a list of arrays that returns a tree, compiled for each of the arrays'
    shapes.

    `advice` gives the warnings after a compilation. The arrays from `donated_from` on are donated.
    `options` are other options of `jax.jit`.
    """

    def __init__(
        self,
        call: Callable[[Arrays], Any],
        name: str,
        advice: Advice,
        donated_from: int | None,
        options: Mapping[str, Any],
    ):
        self._advice = advice
        self._donated_from = donated_from
        self._returns_host = False
        # Whether several devices took part in a call.
        self._is_parallel = False
        # Equinox looks for this id on the stack, to show only the frames inside the program.
        self._id = new_id()
        _listen()

        def run(kept: Arrays, donated: Arrays) -> tuple[Arrays, Outline]:
            arrays = [*kept, *donated]
            about = advice.arrivals.tracing(arrays)
            with tracing(), about, donation_warning(silenced=False):
                result = outlined(call(arrays))
            if current_world().staged:  # not under `jax.disable_jit`
                _thread.traced += 1
            return result

        def checked(
            kept: Arrays, donated: Arrays, transformed: bool = False
        ) -> tuple[Arrays, Outline, Any, Checks | None]:
            if not is_staged():  # under `jax.disable_jit` checks raise at once
                return *run(kept, donated), None, None
            traced = whole.trace(kept, donated)
            leaves = jtu.tree_leaves((kept, donated))
            made = with_checks_as_values(traced.jaxpr, leaves, transformed)
            if made is None and not INLINING_LOSES_LINES:
                return *whole(kept, donated), None, None
            made = made or Returned(evaluate(traced.jaxpr, traced.jaxpr.consts, leaves), None, None)
            returned, outline = jtu.tree_unflatten(jtu.tree_structure(traced.out_info), made.values)
            return returned, outline, made.failed, made.checks

        def transformed(
            kept: Arrays, donated: Arrays
        ) -> tuple[Arrays, Outline, Any, Checks | None]:
            return checked(kept, donated, transformed=True)

        for function in (run, checked, transformed):
            function.__name__ = function.__qualname__ = name
        whole = jit(run, inline=True)
        self._jitted = jit(checked, donate_argnums=1, **options)
        self._transformed = jit(transformed, donate_argnums=1, **options)
        # Inside another program, that program handles the checks.
        self._nested = jit(run, donate_argnums=1, **options)

    def __call__(
        self, arrays: Arrays, ahead: jax.stages.Compiled | None = None, first: bool = False
    ) -> Any:
        """Calls the function. `ahead` is the program compiled ahead of time, if any, and `first`
        whether this is its first call.
        """
        __equinox_jit_id__ = self._id  # noqa: F841
        sides = self._sides(arrays)
        compiled = _thread.compiled
        try:
            call = ahead or self._here()
            if DELETED_ARRAYS_END_IT and self._is_parallel and is_eager(current_trace()):
                _refuse_deleted(arrays)
            if call is self._nested:
                returned, outline = self._run(call, sides)
                self._advice.arrivals.hand_on(arrays)
            else:
                returned, outline, failed, checks = self._run(call, sides)
                if checks is not None:
                    if checks.others:
                        jax.block_until_ready([value_under(x) for x in returned])
                    checks.raise_if(failed, self._id)
            if self._returns_host:
                returned = [with_actual_memory_kind(x) for x in returned]
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            readable = readable_error(error, self._id)
            if readable is None:
                raise
            raise readable from None
        if self._advice.large:
            self._advice.about_captured()
        if first or _thread.compiled != compiled:
            self._advice.about_compiled(arrays, sides[1], returned)
            self._is_parallel |= any(map(_is_on_several_devices, (*arrays, *returned)))
        return outline.fill(returned)

    def lower(self, arrays: Arrays) -> jax.stages.Lowered:
        __equinox_jit_id__ = self._id  # noqa: F841
        sides = self._sides(arrays)
        # Warns about captured arrays now: the program may be called in another process.
        lowered = self._run(self._jitted.lower, sides)
        self._advice.about_captured()
        return lowered

    def _here(self) -> Any:
        """The version of the function for the current trace."""
        if is_eager(current_trace()):
            return self._jitted
        return self._nested if is_staged() else self._transformed

    def _sides(self, arrays: Arrays) -> tuple[Arrays, Arrays]:
        if self._donated_from is None:
            return arrays, []
        return arrays[: self._donated_from], arrays[self._donated_from :]

    def _run(self, call: Callable[..., Any], sides: tuple[Arrays, Arrays]) -> Any:
        traced = _thread.traced
        with calling(call is not self._nested and call is not self._transformed):
            try:
                if not sides[1]:
                    return call(*sides)
                with donation_warning(silenced=True):
                    return call(*sides)
            finally:
                if _thread.traced != traced:
                    # JAX still caches the trace.
                    self._look_at(self._here().trace(*sides).jaxpr)
                    _thread.traced = traced

    def _look_at(self, closed: Any) -> None:
        kinds = {getattr(aval, "memory_space", None) for aval in closed.out_avals}
        self._returns_host |= jax.memory.Space.Host in kinds
        self._advice.look_at(closed)


def _refuse_deleted(arrays: Arrays) -> None:
    """Raises what newer versions of JAX raise."""
    if any([x.is_deleted() for x in arrays if hasattr(type(x), "is_deleted")]):
        raise RuntimeError("Array has been deleted.")


def _is_on_several_devices(x: Any) -> bool:
    if isinstance(x, Tracer) or not isinstance(x, jax.Array):
        return False
    return x.sharding.num_devices > 1

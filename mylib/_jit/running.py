"""A program of a variant: traced, with its checks of errors as values, and called by `jax.jit`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .._compat import (
    is_staged,
    jit,
    silence_donation_warning,
    value_under,
    with_actual_memory_kind,
)
from .._placement import Target, axis_types, sharding_of, split_over
from .._programs import is_on_host
from .._tree import Arrays, Made, Outline, Rest, outlined
from .error_checks import CheckFound, Checks, calling, has_check, is_called, with_checks_as_values
from .later import placed
from .steps import Call, Wrapped


@dataclass(eq=False)
class Trace:
    """The trace of a program. Its `arguments` are there while it goes on."""

    arguments: Arrays
    # Where `fully_shard` keeps arguments, by their positions.
    kept: dict[int, NamedSharding] = field(default_factory=dict)
    # The code of functions traced inside of it, whose captured arrays become its own.
    nested: list[Any] = field(default_factory=list)
    # Whether the captured arrays haven't been checked yet.
    is_new: bool = True
    # What `mylib.watch` needs to find out only once.
    memo: list[Any] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Traced(Rest):
    """Everything but arrays in what a trace returns, and what its results need after each call."""

    trace: Trace
    after: Sequence[Callable[[Call], None]]


class Running:
    """The `jax.jit` of one variant."""

    def __init__(self, wrapped: Wrapped, outline: Outline, donated: Sequence[int]):
        self._wrapped, self._outline = wrapped, outline
        # Whether it has error checks; None until it is traced.
        self._has_checks: bool | None = None
        # Warnings of ours name the arrays.
        silence_donation_warning(_is_ours)

        def run(mode: str, *arrays: Any) -> Made:
            # As a part of another program, or without checks (see `use`). `jax.disable_jit` runs
            # this at once, and checks raise at once.
            if mode == "staged" or not is_staged():
                return self._trace(list(arrays))
            return self._with_checks(mode, arrays)

        run.__name__ = run.__qualname__ = wrapped.name
        # In `run` the mode comes first.
        numbers = [i + 1 for i in donated]
        self.jitted: Any = jit(run, static_argnums=0, donate_argnums=numbers, **wrapped.options)

    def call_compiled(self, ahead: jax.stages.Compiled, arrays: Arrays) -> Made:
        """Calls the program as it was compiled ahead of time."""
        with calling("returned"):
            return ahead(*arrays)

    def lowered(self, arrays: Arrays) -> tuple[Any, jax.stages.Lowered]:
        """The program traced, and lowered."""

        def lower(*operands: Any) -> tuple[Any, jax.stages.Lowered]:
            traced = self.jitted.trace(*operands)
            return traced, traced.lower()

        return self.use(lower, "eager", arrays)

    def use(self, use: Callable[..., Any], mode: str, arrays: Arrays) -> Any:
        """Calls `jitted`, or traces or lowers it. Outside of other programs its checks are
        values only if it has some: making each equation twice would take longer than all else.
        """
        if mode == "eager" and not self._has_checks:
            if self._has_checks is None:
                self._has_checks = self._look_for_checks(arrays)
            # Those for arrays of other shapes, and those hidden in primitives, are found by JAX.
            if not self._has_checks:
                try:
                    with calling("unknown"):
                        return use("staged", *arrays)
                except CheckFound:
                    self._has_checks = True
        with calling("returned" if mode == "eager" else "raised"):
            return use(mode, *arrays)

    def _look_for_checks(self, arrays: Arrays) -> bool | None:
        """Whether the program has error checks, by its trace; None with `jax.disable_jit`."""
        if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            return None
        with calling("unknown"):
            return has_check(self.jitted.trace("staged", *arrays).jaxpr)

    def _trace(self, arrays: Arrays) -> Made:
        with tracing(arrays) as trace:
            result, after = placed(self._called(arrays), self._wrapped)
        trace.is_new = is_staged()
        returned, outline = outlined(result)
        if any(map(_is_in_host_memory, returned)):
            after.insert(0, _in_host_memory)
        if trace.kept:
            after.append(_tell_surrounding)
        return Made(returned, Traced(outline, trace, after))

    def _called(self, arrays: Arrays) -> Any:
        """What the function returns."""
        outline, fun = self._outline, self._wrapped.fun
        arguments = outline.fill(arrays[: outline.count])
        args, kwargs = arguments if isinstance(arguments, list) else (arguments, {})
        return fun.fill(arrays[outline.count :])(*args, **kwargs)

    def _with_checks(self, mode: str, arrays: Sequence[Any]) -> Made:
        """The traced function, with its checks of errors as values."""
        with calling("unknown" if mode == "eager" else "raised"):
            traced = self.jitted.trace("staged", *arrays)
        values, failed, checks = with_checks_as_values(traced.jaxpr, arrays, mode == "transformed")
        returned = jtu.tree_unflatten(jtu.tree_structure(traced.out_info), values)
        rest = returned.rest
        if checks is not None:
            rest = replace(rest, after=[partial(_raise, checks), *rest.after])
        return Made(returned.arrays, rest, failed)


def _is_ours() -> bool:
    """Whether what is compiled here is a program of ours, not one that a traced function calls."""
    return is_called() and outermost() is None


# What the results of some traces need after each call.


def _raise(checks: Checks, call: Call) -> None:
    """Raises the errors of checks."""
    checks.raise_if(call.returned.failed, call.returned.arrays, call.wrapped.id)


def _in_host_memory(call: Call) -> None:
    call.returned.arrays = list(map(with_actual_memory_kind, call.returned.arrays))


def _tell_surrounding(call: Call) -> None:
    """The surrounding program expects what this one does of the arguments that it got."""
    if call.mode == "staged":
        kept = call.returned.rest.trace.kept
        expect([call.taken[i] for i in kept], list(kept.values()))


def _is_in_host_memory(x: Any) -> bool:
    return is_on_host(getattr(x, "aval", None))


# The traces that go on here, from the outermost one inwards.
_in_progress: ContextVar[tuple[Trace, ...]] = ContextVar("traces_in_progress", default=())


@contextmanager
def tracing(arguments: Arrays) -> Iterator[Trace]:
    trace = Trace(arguments)
    token = _in_progress.set((*_in_progress.get(), trace))
    try:
        yield trace
    finally:
        _in_progress.reset(token)
        trace.arguments = []


def outermost() -> Trace | None:
    return next(iter(_in_progress.get()), None)


def expect(arrays: Sequence[Any], targets: Sequence[Target | None]) -> None:
    """Notes where weights are kept that are arguments of the program that is being traced."""
    trace = next(reversed(_in_progress.get()), None)
    if trace is None:
        return
    positions = {id(x): i for i, x in enumerate(trace.arguments)}
    for x, target in zip(arrays, targets, strict=True):
        i = positions.get(id(value_under(x)))
        if i is not None and target is not None and trace.arguments[i].shape == x.shape:
            sharding = sharding_of(target)
            if isinstance(sharding, NamedSharding) and _can_arrive(sharding, x.dtype):
                trace.kept[i] = sharding


def _can_arrive(kept: NamedSharding, dtype: jnp.dtype) -> bool:
    """Whether weights that are kept there can arrive elsewhere unnoticed."""
    # On Explicit axes the types say where arrays are.
    axes, types = split_over(kept), axis_types(kept.mesh)
    is_free = PartitionSpec.UNCONSTRAINED in kept.spec.partitions
    is_auto = bool(axes) and all(types[axis] is AxisType.Auto for axis in axes)
    return is_auto and not is_free and jnp.issubdtype(dtype, jnp.inexact)

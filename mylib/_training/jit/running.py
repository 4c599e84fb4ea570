"""A program of a variant: traced, with its checks of errors as values, and called by `jax.jit`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from types import FunctionType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.extend.core import Primitive, primitives
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..._core.compat import (
    cudnn_as_described,
    donation_warning_silenced,
    in_host_memory,
    is_staged,
    jit,
    value_under,
)
from ..._core.jaxprs import all_equations, is_on_host
from ..._core.known_faults import refuse_two_bits
from ..._core.placement import Target, axis_types, sharding_of, split_over
from ..._core.tree import Arrays, Made, Outline, Rest, outlined
from .error_checks import (
    CheckFound,
    Checks,
    Errors,
    calling,
    checks_replaced,
    has_check,
    is_called,
    with_checks_as_values,
)
from .later import placed
from .steps import Call, Wrapped

T = TypeVar("T")


@dataclass(eq=False)
class Trace:
    """The trace of a program. Its `arguments` are there while it goes on."""

    arguments: Arrays
    # Where `fully_shard` keeps arguments, by their positions.
    kept: dict[int, NamedSharding] = field(default_factory=dict)
    # The code of functions traced inside of it, whose captured arrays become its own.
    nested: list[FunctionType | None] = field(default_factory=list)
    # Whether the captured arrays haven't been checked yet.
    is_new: bool = True
    # What `mylib.watch` needs to find out only once.
    memo: list[Any] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Traced(Rest):
    """Everything but arrays in what a trace returns, and what its results need after each call."""

    trace: Trace
    after: Sequence[Callable[[Call], None]]


_OF_JAX = {each for each in vars(primitives).values() if isinstance(each, Primitive)}


class Way(Enum):
    """How a program is called: what becomes of its error checks, and the mode that it is traced in.
    Checks are values only if there are some: making each equation twice would take longer than all
    else.
    """

    PLAIN = ("unknown", "staged")
    WITH_CHECKS = ("returned", "eager")
    STAGED = ("raised", "staged")
    TRANSFORMED = ("raised", "transformed")

    def __init__(self, errors: Errors, mode: str):
        self.errors: Errors = errors
        self.mode = mode


# For calls inside of other programs and transformations. Others depend on the checks.
_OF_MODE = {"staged": Way.STAGED, "transformed": Way.TRANSFORMED}


class _NewTrace(Exception):
    """JAX traces a program again, in a call that was made as if it needn't."""


# Whether what is traced here may need names of other libraries replaced, and they are.
_replaced: ContextVar[bool] = ContextVar("names_replaced", default=False)


@contextmanager
def _names_replaced(donates: bool) -> Iterator[None]:
    """Surrounds what traces and lowers. The page "Changes in other libraries" says what changes."""
    token = _replaced.set(True)
    try:
        with checks_replaced():
            # Warnings of ours name the arrays.
            with donation_warning_silenced(_is_ours) if donates else nullcontext():
                yield
    finally:
        _replaced.reset(token)


class Running:
    """The `jax.jit` of one variant."""

    def __init__(self, wrapped: Wrapped, outline: Outline, donated: Sequence[int]):
        self._wrapped, self._outline = wrapped, outline
        # How it is called outside of other programs; None until it is traced.
        self._way: Way | None = None
        # Whether JAX calls the functions of others only when it traces the program again, as no
        # trace has primitives of others; None until it is traced.
        self._is_settled: bool | None = None
        self._donates = bool(donated)

        def run(mode: str, *arrays: jax.Array) -> Made:
            if not _replaced.get():
                raise _NewTrace
            # As a part of another program, or without checks (`Way`). `jax.disable_jit` runs
            # this at once, and checks raise at once.
            if mode == "staged" or not is_staged():
                return self._trace(list(arrays))
            return self._with_checks(mode, arrays)

        run.__name__ = run.__qualname__ = wrapped.name
        # In `run` the mode comes first.
        numbers = [i + 1 for i in donated]
        self.jitted: Any = jit(run, static_argnums=0, donate_argnums=numbers, **wrapped.options)

    def lowered(self, arrays: Arrays) -> tuple[jax.stages.Traced, jax.stages.Lowered]:
        """The program traced, and lowered."""

        def lower(*operands: object) -> tuple[jax.stages.Traced, jax.stages.Lowered]:
            traced = self.jitted.trace(*operands)
            return traced, traced.lower()

        # Only programs that are lowered ahead may be for a machine that isn't here.
        with _names_replaced(self._donates), cudnn_as_described():
            return self._use(lower, "eager", arrays)

    def use(self, use: Callable[..., T], mode: str, arrays: Arrays) -> T:
        """Calls `jitted`, or traces it."""
        if mode == "eager" and self._is_settled:
            # Nothing is replaced: that would take a part of the time of a call.
            try:
                return self._use(use, mode, arrays)
            except _NewTrace:
                pass
        with _names_replaced(self._donates):
            result = self._use(use, mode, arrays)
            if mode == "eager" and self._way is not None and self._is_settled is not False:
                # To lower one may call a function, whose checks are seen only then.
                equations = all_equations(self._traced_as_is(arrays).jaxpr)
                self._is_settled = all(eqn.primitive in _OF_JAX for eqn in equations)
        return result

    def _use(self, use: Callable[..., T], mode: str, arrays: Arrays) -> T:
        way = _OF_MODE.get(mode) or self._way or self._first_way(arrays)
        try:
            with calling(way.errors):
                return use(way.mode, *arrays)
        except CheckFound:
            # JAX finds checks for arrays of other shapes, and those hidden in primitives.
            if way is not Way.PLAIN:
                raise
            self._way = Way.WITH_CHECKS
        return self._use(use, mode, arrays)

    def _first_way(self, arrays: Arrays) -> Way:
        """Looks for error checks in the program's trace, which `jax.disable_jit` doesn't make."""
        if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            return Way.PLAIN
        traced = self._traced_as_is(arrays)
        way = Way.WITH_CHECKS if has_check(traced.jaxpr) else Way.PLAIN
        if way is Way.PLAIN:
            refuse_two_bits(self._wrapped.name, traced)
        self._way = way
        return way

    def _traced_as_is(self, arrays: Arrays) -> jax.stages.Traced:
        """The program without its checks as values. JAX has it, if it was called."""
        with calling("unknown"):
            return self.jitted.trace("staged", *arrays)

    def _trace(self, arrays: Arrays) -> Made:
        with tracing(arrays) as trace:
            result, after = placed(self._called(arrays), self._wrapped)
        trace.is_new = is_staged()
        returned, outline = outlined(result)
        on_host = [is_on_host(getattr(array, "aval", None)) for array in returned]
        if any(on_host):
            after.insert(0, partial(_in_host_memory, on_host))
        if trace.kept:
            after.append(_tell_surrounding)
        return Made(returned, Traced(outline, trace, after))

    def _called(self, arrays: Arrays) -> object:
        """What the function returns."""
        outline, fun = self._outline, self._wrapped.fun
        arguments = outline.fill(arrays[: outline.count])
        args, kwargs = arguments if isinstance(arguments, list) else (arguments, {})
        return fun.fill(arrays[outline.count :])(*args, **kwargs)

    def _with_checks(self, mode: str, arrays: Sequence[jax.Array]) -> Made:
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


def _in_host_memory(on_host: Sequence[bool], call: Call) -> None:
    arrays = zip(call.returned.arrays, on_host, strict=True)
    call.returned.arrays = [in_host_memory(each) if there else each for each, there in arrays]


def _tell_surrounding(call: Call) -> None:
    """The surrounding program expects what this one does of the arguments that it got."""
    if call.mode == "staged":
        kept = call.returned.rest.trace.kept
        expect([call.taken[i] for i in kept], list(kept.values()))


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


def expect(arrays: Sequence[jax.Array], targets: Sequence[Target | None]) -> None:
    """Notes where weights are kept that are arguments of the program that is being traced."""
    trace = next(reversed(_in_progress.get()), None)
    if trace is None:
        return
    positions = {id(argument): i for i, argument in enumerate(trace.arguments)}
    for array, target in zip(arrays, targets, strict=True):
        i = positions.get(id(value_under(array)))
        if i is not None and target is not None and trace.arguments[i].shape == array.shape:
            sharding = sharding_of(target)
            if isinstance(sharding, NamedSharding) and _can_arrive(sharding, array.dtype):
                trace.kept[i] = sharding


def _can_arrive(kept: NamedSharding, dtype: jnp.dtype) -> bool:
    """Whether weights that are kept there can arrive elsewhere unnoticed."""
    # On Explicit axes the types say where arrays are.
    axes, types = split_over(kept), axis_types(kept.mesh)
    is_free = PartitionSpec.UNCONSTRAINED in kept.spec.partitions
    is_auto = bool(axes) and all(types[axis] is AxisType.Auto for axis in axes)
    return is_auto and not is_free and jnp.issubdtype(dtype, jnp.inexact)

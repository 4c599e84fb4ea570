"""What is found out while programs are traced, each inside the one before it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .._compat import value_under
from .._placement import Target, axis_types, sharding_of, split_over
from .._tree import Arrays


@dataclass(eq=False)
class Trace:
    """The trace of a program. Its `arguments` are there while it goes on."""

    arguments: Arrays
    # Where `fully_shard` keeps arguments, by their positions.
    kept: dict[int, NamedSharding] = field(default_factory=dict)
    # The code of functions traced inside of it, whose captured arrays become its own.
    nested: list[Any] = field(default_factory=list)
    # Whether nobody has looked at the captured arrays.
    is_new: bool = True
    # What `mylib.watch` needs to find out only once.
    memo: list[Any] = field(default_factory=list)


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
    """Whether weights may be kept there, and arrive elsewhere without anybody's noticing."""
    # On Explicit axes the types say where arrays are.
    axes, types = split_over(kept), axis_types(kept.mesh)
    is_free = PartitionSpec.UNCONSTRAINED in kept.spec.partitions
    is_auto = bool(axes) and all(types[axis] is AxisType.Auto for axis in axes)
    return is_auto and not is_free and jnp.issubdtype(dtype, jnp.inexact)

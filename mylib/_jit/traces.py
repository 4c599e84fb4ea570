"""What is found out while programs are traced, each inside the one before it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import NamedSharding

from .._tree import Arrays

Kept = dict[int, NamedSharding]


@dataclass(eq=False)
class Trace:
    """The trace of a program. Its `arguments` are there while it goes on."""

    arguments: Arrays
    # Where `fully_shard` keeps arguments, by their positions.
    kept: Kept = field(default_factory=dict)
    # The code of functions traced inside of it, whose captured arrays become its own.
    nested: list[Any] = field(default_factory=list)
    # Whether nobody has looked at the captured arrays.
    is_new: bool = True
    # What `mylib.watch` needs to find out only once.
    memo: list[Any] = field(default_factory=list)


# The traces that go on here, from the outermost one inwards.
_going: ContextVar[tuple[Trace, ...]] = ContextVar("going", default=())


@contextmanager
def tracing(arguments: Arrays) -> Iterator[Trace]:
    trace = Trace(arguments)
    token = _going.set((*_going.get(), trace))
    try:
        yield trace
    finally:
        _going.reset(token)
        trace.arguments = []


def outermost() -> Trace | None:
    return next(iter(_going.get()), None)


def innermost() -> Trace | None:
    return next(reversed(_going.get()), None)

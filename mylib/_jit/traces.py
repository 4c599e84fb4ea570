"""What is found out while programs are traced, each inside the one before it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
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


class _Going(threading.local):
    """The traces that go on in this thread, from the outermost one inwards."""

    def __init__(self) -> None:
        self.traces: list[Trace] = []


_going = _Going()


@contextmanager
def tracing(arguments: Arrays) -> Iterator[Trace]:
    trace = Trace(arguments)
    _going.traces.append(trace)
    try:
        yield trace
    finally:
        _going.traces.pop()
        trace.arguments = []


def outermost() -> Trace | None:
    return _going.traces[0] if _going.traces else None


def innermost() -> Trace | None:
    return _going.traces[-1] if _going.traces else None

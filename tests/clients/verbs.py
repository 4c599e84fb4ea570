"""Puts our verbs in the place of Equinox's, before a client is imported, and counts their calls."""

import functools
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import common
import equinox as eqx
import jax
from jax.sharding import NamedSharding, PartitionSpec as P

import mylib

# How often each was called: ("filter_jit", "lineax") is what Lineax compiles itself.
CALLS: Counter[tuple[str, str]] = Counter()


def put_in_place() -> None:
    jitted = type(mylib.filter_jit(lambda: None))
    jitted.__call__ = _counted_call(jitted.__call__)
    eqx.filter_jit = mylib.filter_jit
    eqx.filter_shard = _counted(mylib.filter_shard)
    eqx.filter_checkpoint = _counted(mylib.filter_checkpoint)
    common.where = _where
    common.abstract = _abstract
    common.placed = _placed


def _counted_call(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def counted(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        CALLS["filter_jit", self.__module__.partition(".")[0]] += 1
        return call(self, *args, **kwargs)

    return counted


def _counted(verb: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(verb)
    def counted(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals["__name__"]
        CALLS[verb.__name__, caller.partition(".")[0]] += 1
        return verb(*args, **kwargs)

    return counted


def _where(tree: Any, patterns: Any, over: Any) -> Any:
    CALLS["by_path", "common"] += 1
    rules = {f"{pattern}.**": spec for pattern, spec in (patterns | {"": P()}).items()}
    placements = {name.lstrip("."): NamedSharding(over, spec) for name, spec in rules.items()}
    return mylib.rules.by_path(placements, ordered=True)


def _abstract(tree: Any, patterns: Any, over: Any) -> Any:
    CALLS["filter_shard", "common"] += 1
    return mylib.filter_shard(jax.eval_shape(lambda: tree), _where(tree, patterns, over))


def _placed(batches: Any, over: Any) -> Any:
    CALLS["prefetch", "common"] += 1
    return mylib.data.prefetch(batches, mylib.rules.batch(over.axis_names[0]), mesh=over)

"""Compares where a program's weights arrive with where `fully_shard` keeps them."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, Sharding

from .._compat import value_under
from .._errors import PlacementWarning, folded, warn
from .._placement import Target, axis_types, entries_of, same_axes, sharding_of, split_over
from .._text import show_bytes
from .._tree import Arrays
from .arguments import Call
from .naming import names_of

Kept = dict[int, NamedSharding]


class _Expected(threading.local):
    """The programs that this thread is tracing: their arguments, and where these are kept."""

    def __init__(self) -> None:
        self.programs: list[tuple[Arrays, Kept]] = []


_expected = _Expected()


def expect(arrays: Sequence[Any], targets: Sequence[Target | None]) -> None:
    """Notes where weights are kept that are arguments of the program that is being traced."""
    if not _expected.programs:
        return
    arguments, kept = _expected.programs[-1]
    positions = {id(x): i for i, x in enumerate(arguments)}
    for x, target in zip(arrays, targets, strict=True):
        i = positions.get(id(value_under(x)))
        if i is not None and target is not None and arguments[i].shape == x.shape:
            sharding = sharding_of(target)
            if isinstance(sharding, NamedSharding) and _can_arrive(sharding, arguments[i].dtype):
                kept[i] = sharding


def _can_arrive(kept: NamedSharding, dtype: jnp.dtype) -> bool:
    """Whether weights may be kept there, and arrive elsewhere without anybody's noticing."""
    # On Explicit axes the types say where arrays are.
    axes, types = split_over(kept), axis_types(kept.mesh)
    is_free = PartitionSpec.UNCONSTRAINED in entries_of(kept.spec)
    is_auto = bool(axes) and all(types[axis] is AxisType.Auto for axis in axes)
    return is_auto and not is_free and jnp.issubdtype(dtype, jnp.inexact)


@contextmanager
def expecting(arguments: Arrays) -> Iterator[Kept]:
    """Surrounds the tracing of a program of these arguments. What it returns is then filled."""
    kept: Kept = {}
    _expected.programs.append((arguments, kept))
    try:
        yield kept
    finally:
        _expected.programs.pop()


def compare(call: Call, kept: Kept, arguments: Arrays) -> None:
    """Warns about weights that have arrived otherwise than they are kept."""
    known = names_of(call) if kept else []
    others: dict[str, list[str]] = {}
    held = expected = 0
    for i, sharding in kept.items():
        x = value_under(arguments[i])
        # The compiler chooses where uncommitted arrays arrive, and takes `kept`.
        if not isinstance(x, jax.Array) or isinstance(x, Tracer) or not x.committed:
            continue
        wanted = _for_comparing(sharding, x.sharding)
        if wanted is not None and not x.sharding.is_equivalent_to(wanted, x.ndim):
            how = f"{_show(x.sharding)} instead of {_show(wanted)}"
            others.setdefault(how, []).append(known[i])
            held += _size(x.sharding, x)
            expected += _size(wanted, x)
    if others:
        said = "; ".join(f"{', '.join(folded(those))}: {how}" for how, those in others.items())
        cost = f"Each device holds {show_bytes(held)} of them instead of {show_bytes(expected)}"
        warn(
            f"{call.program.name} is given weights that are not where fully_shard keeps them: "
            f"{said}. {cost if held > expected else 'Each call moves them'}. Place them as `kept` "
            "before the first call, or give in_shardings and out_shardings.",
            PlacementWarning,
        )


def _for_comparing(kept: NamedSharding, here: Sharding) -> NamedSharding | None:
    """`kept` over the devices of `here` and in its memory, or None if they are unknown."""
    mesh = kept.mesh
    if isinstance(mesh, AbstractMesh):
        if not isinstance(here, NamedSharding) or not same_axes(here.mesh, mesh):
            return None
        mesh = here.mesh
    return NamedSharding(mesh, kept.spec, memory_kind=here.memory_kind)


def _show(sharding: Sharding) -> str:
    return str(sharding.spec if isinstance(sharding, NamedSharding) else sharding)


def _size(sharding: Sharding, x: jax.Array) -> int:
    size = x.dtype.itemsize
    for n in sharding.shard_shape(x.shape):
        size *= n
    return size

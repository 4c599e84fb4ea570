"""Compares where a program's weights arrive with where `fully_shard` keeps them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, Sharding

from .._compat import value_under
from .._errors import PlacementWarning, folded, warn
from .._placement import Target, axis_types, bytes_on_each, same_axes, sharding_of, split_over
from .._text import show_bytes
from .._tree import Arrays
from .naming import names_of
from .traces import Kept, innermost
from .variants import Call


def expect(arrays: Sequence[Any], targets: Sequence[Target | None]) -> None:
    """Notes where weights are kept that are arguments of the program that is being traced."""
    trace = innermost()
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


def compare(call: Call, kept: Kept, arguments: Arrays) -> None:
    """Warns about weights that have arrived otherwise than they are kept."""
    arrays = names_of(call) if kept else []
    others: dict[str, list[str]] = {}
    held = expected = 0
    for i, sharding in kept.items():
        x = value_under(arguments[i])
        # The compiler chooses where uncommitted arrays arrive, and takes `kept`.
        if not isinstance(x, jax.Array) or isinstance(x, Tracer) or not x.committed:
            continue
        keeps = _for_comparing(sharding, x.sharding)
        if keeps is not None and not x.sharding.is_equivalent_to(keeps, x.ndim):
            how = f"{_show(x.sharding)} instead of {_show(keeps)}"
            others.setdefault(how, []).append(arrays[i])
            held += bytes_on_each(x.sharding, x.shape, x.dtype)
            expected += bytes_on_each(keeps, x.shape, x.dtype)
    if others:
        texts = (f"{', '.join(folded(those))}: {how}" for how, those in others.items())
        cost = f"Each device holds {show_bytes(held)} of them instead of {show_bytes(expected)}"
        warn(
            f"{call.program.name} is given weights that are not where fully_shard keeps them: "
            f"{'; '.join(texts)}. {cost if held > expected else 'Each call moves them'}. Place "
            "them as `kept` before the first call, or give in_shardings and out_shardings.",
            PlacementWarning,
        )


def _for_comparing(kept: NamedSharding, arrived: Sharding) -> NamedSharding | None:
    """`kept` over the devices of `arrived` and in its memory, or None if they are unknown."""
    mesh = kept.mesh
    if isinstance(mesh, AbstractMesh):
        if not isinstance(arrived, NamedSharding) or not same_axes(arrived.mesh, mesh):
            return None
        mesh = arrived.mesh
    return NamedSharding(mesh, kept.spec, memory_kind=arrived.memory_kind)


def _show(sharding: Sharding) -> str:
    return str(sharding.spec if isinstance(sharding, NamedSharding) else sharding)

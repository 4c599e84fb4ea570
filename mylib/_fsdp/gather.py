"""Gathers the weights of a layer, and reduce-scatters their gradients."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .._placement import (
    Target,
    current_world,
    entries_of,
    unusual_memory_kind,
    with_entries,
)
from .._transfer import place_leaves, transfer_and_constrain
from .._tree import split
from .torus import halfway, is_over_all_devices

Targets = tuple[Target | None, ...]


@dataclass(frozen=True)
class Route:
    """Where weights are kept, where they are used, the dtype in which they are sent, the dtype of
    their gradients, and whether rows of them may be looked up, as in an embedding.
    """

    kept: Targets
    used: Targets
    dtype: Any
    reduce_dtype: Any
    lookups: bool = False

    def without(self, removed: Sequence[Sequence[int]]) -> "Route":
        """The route of slices of the weights, which lack these dimensions of each; of the weights
        themselves if `removed` is empty.
        """
        if not removed:
            return self
        kept, used = (tuple(map(_without, ts, removed)) for ts in (self.kept, self.used))
        return replace(self, kept=kept, used=used)

    def part(self, index: Sequence[int]) -> "Route":
        kept, used = (tuple(ts[i] for i in index) for ts in (self.kept, self.used))
        return replace(self, kept=kept, used=used)


def gather(arrays: Sequence[Any], route: Route) -> tuple[list[Any], list[Any]]:
    """The weights where they are used, and their sinks (`gradient_dtype.py`), each None if there is
    no `reduce_dtype`. Arrays without a gradient are moved, but not cast.
    """
    moving = [jnp.issubdtype(x.dtype, jnp.inexact) for x in arrays]
    gathered, sinks = list(arrays), [None] * len(arrays)
    for has_gradient, move in ((True, _gather), (False, _moved)):
        index = [i for i, x in enumerate(moving) if x is has_gradient]
        if index:
            moved: Any = move([arrays[i] for i in index], route.part(index))
            for i, x, sink in zip(index, *moved, strict=True):
                gathered[i], sinks[i] = x, sink
    return gathered, sinks


def keep(arrays: Sequence[Any], targets: Targets) -> list[Any]:
    """The arrays at their targets, where they have one."""
    return place_leaves(split(list(arrays)), targets, current_world(), transfer_and_constrain)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather(arrays: list[Any], route: Route) -> tuple[list[Any], list[Any]]:
    gathered = _forward(arrays, route)
    return gathered, [_sink(x, route.reduce_dtype) for x in gathered]


def _moved(arrays: list[Any], route: Route) -> tuple[list[Any], list[None]]:
    return _forward(arrays, route), [None] * len(arrays)


def _forward(arrays: list[Any], route: Route) -> list[Any]:
    # Cast first. If they were cast after gathering, they would be sent in the wider dtype.
    arrays = [_cast(x, route.dtype) for x in arrays]
    # Two constraints: with only the second the compiler may keep the weights gathered.
    arrays = keep(arrays, on_device(route.kept))
    return keep(_by_way_of(arrays, map(halfway, route.kept, route.used)), route.used)


def _by_way_of(arrays: list[Any], between: Iterable[NamedSharding | None]) -> list[Any]:
    """The arrays at a placement on their way to another one, where there is one."""
    return [
        # The type of an array on Explicit axes can't name the axes of another mesh.
        x if target is None or _is_explicit(x) else jax.lax.with_sharding_constraint(x, target)
        for x, target in zip(arrays, between, strict=True)
    ]


def _columns(
    kept: Target | None, used: Target | None, shape: Sequence[int]
) -> NamedSharding | None:
    """Where the gradient of a table that is kept by rows is summed, if its rows are looked up.

    A device has a gradient for the rows that its examples use. To sum these by rows, each device
    sends as many as the table has. By columns it sends as many as it has examples.

    Needed with JAX 0.12.0; no public issue is known. May go once `test_programs` of
    `tests/fsdp/test_embeddings.py` passes without it.
    """
    # On other meshes the compiler gathers the rows instead, and sends more.
    if not isinstance(kept, NamedSharding) or not is_over_all_devices(kept, used):
        return None
    rows, *others = entries_of(kept.spec) or (None,)
    if rows is None or any(others):
        return None
    even = (dim for dim in range(1, len(shape)) if shape[dim] % kept.mesh.size == 0)
    dim = next(even, None)
    return None if dim is None else NamedSharding(kept.mesh, PartitionSpec(*[None] * dim, rows))


def _is_explicit(x: Any) -> bool:
    meshes = jax.typeof(x).sharding.mesh, current_world().mesh
    return any(AxisType.Explicit in mesh.axis_types for mesh in meshes)


def _sink(x: Any, dtype: Any) -> Any:
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    if dtype is None or not floating or x.dtype.itemsize > jnp.dtype(dtype).itemsize:
        return None
    return x.astype(dtype)


def _forward_of_vjp(arrays: list[Any], route: Route) -> tuple[Any, list[Any]]:
    # Not `_gather` again: a checkpoint's policy would see it as one call, and save its result.
    gathered = _forward(arrays, route)
    sinks = [_sink(x, route.reduce_dtype) for x in gathered]
    return (gathered, sinks), [jnp.zeros((0,), x.dtype) for x in arrays]


def _backward(route: Route, like: list[Any], cotangents: Any) -> tuple[list[Any]]:
    summed = [
        x if of_sink is None else x.astype(of_sink.dtype) + of_sink
        for x, of_sink in zip(*cotangents, strict=True)
    ]
    # A reduce-scatter. The transpose of the second constraint above would ask for the whole sum on
    # each device, which on TPUs stays an all-reduce.
    between = [
        (_columns(kept, used, x.shape) if route.lookups else None) or halfway(kept, used)
        for x, kept, used in zip(summed, route.kept, route.used, strict=True)
    ]
    summed = keep(_by_way_of(summed, between), on_device(route.kept))
    summed = [x.astype(old.dtype) for x, old in zip(summed, like, strict=True)]
    return (keep(summed, route.kept),)


_gather.defvjp(_forward_of_vjp, _backward)


def _cast(x: Any, dtype: Any) -> Any:
    return x.astype(dtype) if dtype is not None and jnp.issubdtype(x.dtype, jnp.floating) else x


def on_device(targets: Targets) -> Targets:
    return tuple(t and _computable(t) for t in targets)


def _computable(target: Target) -> Target:
    """The same target in memory that programs compute in."""
    if isinstance(target, NamedSharding) and unusual_memory_kind(target) is not None:
        return NamedSharding(target.mesh, target.spec)
    return target


def _without(target: Target | None, dims: Sequence[int]) -> Target | None:
    if not isinstance(target, NamedSharding):
        return target
    entries = [x for dim, x in enumerate(entries_of(target.spec)) if dim not in dims]
    return target.update(spec=with_entries(target.spec, entries))

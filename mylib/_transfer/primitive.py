"""Eager placement as one JAX primitive, so that eager `grad`, `jvp` and `vmap` work.

None of JAX's own primitives supports all three eagerly: `device_put` shards the batch dimension
under `vmap`, and `with_sharding_constraint` rejects arrays on other devices.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding

from .._compat import Uncommitted, sharding_under
from .._errors import Fault, PlacementError
from .._placement import (
    Target,
    axes_in,
    axis_names,
    current_world,
    entries_of,
    fill_free,
    memory_space,
    sharding_of,
    spec_over,
)
from .._tree import kind_of
from .eager import move
from .relocation import Options, Relocation, rows_of, set_values, with_values
from .staged import constrain

place_p = Primitive("place")
place_p.multiple_results = True


class RoundTrip(NamedTuple):
    """Where an array goes, and where its cotangent goes back to; None if that stays. `across` is
    whether an array on devices of a single process is the same one in all.
    """

    target: Target | Uncommitted
    source: Any
    alias: bool | None = None
    across: bool = False

    @property
    def back(self) -> "RoundTrip":
        return self._replace(target=self.source, source=self.target)


RoundTrips = tuple[RoundTrip, ...]
"""One for each array."""


def place(arrays: Sequence[Any], trips: Iterable[RoundTrip]) -> list[Any]:
    """Moves arrays under an eager transformation."""
    return place_p.bind(*arrays, trips=tuple(trips))


@place_p.def_impl
def _impl(*arrays: Any, trips: RoundTrips) -> list[jax.Array]:
    # JAX differentiates Python numbers as objects that are not quite arrays.
    placed: list[Any] = [
        x if isinstance(x, np.ndarray | np.generic) or hasattr(x, "sharding") else jnp.asarray(x)
        for x in arrays
    ]
    options = [Options(alias=trip.alias) for trip in trips]
    rows = rows_of(placed, map(kind_of, placed), [trip.target for trip in trips], options)
    for row in rows:
        row.across = trips[row.at].across
    move(rows)
    return with_values(placed, rows)


@place_p.def_abstract_eval
def _abstract(*avals: Any, trips: RoundTrips) -> list[Any]:
    return [_aval_at(aval, trip.target) for aval, trip in zip(avals, trips, strict=True)]


def _aval_at(aval: Any, target: Target | Uncommitted) -> Any:
    if isinstance(target, Uncommitted):
        return aval.update(memory_space=jax.memory.Space.Device, sharding=None)
    sharding = sharding_of(target)
    aval = aval.update(memory_space=memory_space(sharding))
    if not isinstance(sharding, NamedSharding):
        return aval.update(sharding=None)
    filled = fill_free(sharding, None, aval.ndim)
    return aval.update(sharding=NamedSharding(filled.mesh.abstract_mesh, filled.spec))


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, trips: RoundTrips
) -> tuple[list[Any], list[Any]]:
    out = place(primals, trips)
    zeros: list[Any] = [ad.Zero(jax.typeof(y).to_tangent_aval()) for y in out]
    moving = [None if isinstance(t, ad.Zero) else t for t in tangents]
    return out, [z if t is None else t for z, t in zip(zeros, _placed(moving, trips), strict=True)]


def _transpose(cotangents: Sequence[Any], *arrays: Any, trips: RoundTrips) -> list[Any]:
    results = [None if isinstance(ct, ad.Zero) else ct for ct in cotangents]
    return _placed(results, [trip.back for trip in trips])


def _placed(values: Sequence[Any], trips: Sequence[RoundTrip]) -> list[Any]:
    """The values at their targets; None, and what has no target, stays."""
    stays = [x is None or trip.target is None for x, trip in zip(values, trips, strict=True)]
    if all(stays):
        return list(values)
    moving = [(x, trip) for x, trip, s in zip(values, trips, stays, strict=True) if not s]
    moved = iter(place(*zip(*moving, strict=True)))
    return [x if s else next(moved) for x, s in zip(values, stays, strict=True)]


def _batch(
    axis: Any, arrays: Sequence[Any], dims: Sequence[Any], *, trips: RoundTrips
) -> tuple[list[Any], Sequence[Any]]:
    spmd_axes = () if axis.spmd_name is None else axis_names(axis.spmd_name)
    batched = [
        trip._replace(
            target=_with_batch(trip.target, dim, x, spmd_axes),
            source=_with_batch(trip.source, dim, x, ()),
        )
        for trip, dim, x in zip(trips, dims, arrays, strict=True)
    ]
    return place(arrays, batched), dims


def _with_batch(target: Any, dim: int | None, x: Any, spmd_axes: tuple[str, ...]) -> Any:
    if dim is None or not isinstance(target, NamedSharding | Format):
        return target
    if isinstance(target, Format):
        reason = "a layout does not include the dimension that vmap adds"
        fix = "give the layout outside of vmap, or a sharding alone"
        name = "an array under vmap"
        raise PlacementError([Fault(name, tuple(x.shape), repr(target), reason, fix)])
    # The batch dimension keeps its axes, unless other dimensions use them.
    entries = list(entries_of(target.spec, x.ndim - 1))
    taken = axes_in(target.spec)
    entry = spec_over(target.mesh, sharding_under(x), x.ndim)[dim]
    entries.insert(dim, spmd_axes or tuple(n for n in axis_names(entry) if n not in taken))
    return target.update(spec=target.spec.update(partitions=entries))


def _lower(*arrays: Any, trips: RoundTrips) -> list[Any]:
    # Called when the linear part of an eager `linearize` or `vjp` is put under `jit` later.
    targets = [None if isinstance(r.target, Uncommitted) else r.target for r in trips]
    rows = rows_of(arrays, map(kind_of, arrays), targets, even_there=True)
    _refuse_host_memory(rows)
    filled = [fill_free(row.target, None, row.value.ndim) for row in rows]
    set_values(rows, constrain([row.value for row in rows], filled, current_world()))
    return with_values(arrays, rows)


def _refuse_host_memory(rows: Sequence[Relocation]) -> None:
    # JAX derives the memory of a program's results from its own transfers, and would ignore this
    # one.
    name = "an array in a function that was linearized outside of jit"
    reason = "jit can't tell that this function moves it to pinned_host memory"
    fix = "linearize inside of jit, or call the linear function without jit"
    faults = [
        Fault(name, tuple(row.value.shape), str(row.target), reason, fix)
        for row in rows
        if memory_space(sharding_of(row.target)) == jax.memory.Space.Host
    ]
    if faults:
        raise PlacementError(faults)


ad.primitive_jvps[place_p] = _jvp
ad.primitive_transposes[place_p] = _transpose
batching.fancy_primitive_batchers[place_p] = _batch
mlir.register_lowering(place_p, mlir.lower_fun(_lower, multiple_results=True))

"""Eager placement as one JAX primitive, so that eager `grad`, `jvp` and `vmap` work.

None of JAX's own primitives supports all three eagerly: `device_put` shards the batch dimension
under `vmap`, and `with_sharding_constraint` rejects arrays on other devices.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.experimental.layout import Format
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding

from ..._core.compat import Uncommitted, sharding_under
from ..._core.errors import Fault, PlacementError
from ..._core.placement import (
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
from ..._core.tree import kind_of
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
    source: Target | Uncommitted | None
    alias: bool | None = None
    across: bool = False

    @property
    def back(self) -> "RoundTrip":
        return self._replace(target=self.source, source=self.target)


# One for each array.
RoundTrips = tuple[RoundTrip, ...]


def place(arrays: Sequence[object], trips: Iterable[RoundTrip]) -> list[jax.Array]:
    """Moves arrays under an eager transformation."""
    return place_p.bind(*arrays, trips=tuple(trips))


@place_p.def_impl
def _impl(*arrays: Any, trips: RoundTrips) -> list[jax.Array]:
    # JAX differentiates Python numbers as objects that are not quite arrays.
    placed: list[Any] = [
        array
        if isinstance(array, np.ndarray | np.generic) or hasattr(array, "sharding")
        else jnp.asarray(array)
        for array in arrays
    ]
    options = [Options(alias=trip.alias) for trip in trips]
    rows = rows_of(placed, map(kind_of, placed), [trip.target for trip in trips], options)
    for row in rows:
        row.across = trips[row.at].across
    move(rows)
    return with_values(placed, rows)


@place_p.def_abstract_eval
def _abstract(*avals: ShapedArray, trips: RoundTrips) -> list[ShapedArray]:
    return [_aval_at(aval, trip.target) for aval, trip in zip(avals, trips, strict=True)]


def _aval_at(aval: ShapedArray, target: Target | Uncommitted) -> ShapedArray:
    if isinstance(target, Uncommitted):
        return aval.update(memory_space=jax.memory.Space.Device, sharding=None)
    sharding = sharding_of(target)
    aval = aval.update(memory_space=memory_space(sharding))
    if not isinstance(sharding, NamedSharding):
        return aval.update(sharding=None)
    filled = fill_free(sharding, None, aval.ndim)
    return aval.update(sharding=NamedSharding(filled.mesh.abstract_mesh, filled.spec))


def _jvp(
    primals: Sequence[object], tangents: Sequence[object], *, trips: RoundTrips
) -> tuple[list[jax.Array], list[Any]]:
    out = place(primals, trips)
    zeros: list[Any] = [ad.Zero(jax.typeof(y).to_tangent_aval()) for y in out]
    moving = [None if isinstance(t, ad.Zero) else t for t in tangents]
    return out, [z if t is None else t for z, t in zip(zeros, _placed(moving, trips), strict=True)]


def _transpose(cotangents: Sequence[object], *arrays: object, trips: RoundTrips) -> list[Any]:
    results = [None if isinstance(ct, ad.Zero) else ct for ct in cotangents]
    return _placed(results, [trip.back for trip in trips])


def _placed(values: Sequence[object], trips: Sequence[RoundTrip]) -> list[Any]:
    """The values at their targets; None, and what has no target, stays."""
    pairs = list(zip(values, trips, strict=True))
    stays = [value is None or trip.target is None for value, trip in pairs]
    if all(stays):
        return list(values)
    moving = [pair for pair, stay in zip(pairs, stays, strict=True) if not stay]
    moved = iter(place(*zip(*moving, strict=True)))
    return [value if stay else next(moved) for value, stay in zip(values, stays, strict=True)]


def _batch(
    axis: Any, arrays: Sequence[jax.Array], dims: Sequence[int | None], *, trips: RoundTrips
) -> tuple[list[jax.Array], Sequence[int | None]]:
    spmd_axes = () if axis.spmd_name is None else axis_names(axis.spmd_name)
    batched = [
        trip._replace(
            target=_with_batch(trip.target, dim, array, spmd_axes),
            source=_with_batch(trip.source, dim, array, ()),
        )
        for trip, dim, array in zip(trips, dims, arrays, strict=True)
    ]
    return place(arrays, batched), dims


def _with_batch(target: Any, dim: int | None, array: jax.Array, spmd_axes: tuple[str, ...]) -> Any:
    if dim is None or not isinstance(target, NamedSharding | Format):
        return target
    if isinstance(target, Format):
        reason = "a layout does not include the dimension that vmap adds"
        fix = "give the layout outside of vmap, or a sharding alone"
        name = "an array under vmap"
        raise PlacementError([Fault(name, tuple(array.shape), repr(target), reason, fix)])
    # The batch dimension keeps its axes, unless other dimensions use them.
    entries = list(entries_of(target.spec, array.ndim - 1))
    taken = axes_in(target.spec)
    entry = spec_over(target.mesh, sharding_under(array), array.ndim)[dim]
    entries.insert(dim, spmd_axes or tuple(n for n in axis_names(entry) if n not in taken))
    return target.update(spec=target.spec.update(partitions=entries))


def _lower(*arrays: jax.Array, trips: RoundTrips) -> list[jax.Array]:
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

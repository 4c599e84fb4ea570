"""Eager placement as one JAX primitive, so that eager `grad`, `jvp` and `vmap` work.

None of JAX's own primitives supports all three eagerly: `device_put` shards the batch dimension
under `vmap`, and `with_sharding_constraint` rejects arrays on other devices.
"""

from collections.abc import Sequence
from itertools import repeat
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, Sharding

from .._compat import UNCOMMITTED, Uncommitted, sharding_under
from .._errors import Fault, PlacementError
from .._links import crosses
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
from .._tree import Kind, kind_of
from .already_placed import not_there
from .eager import Relocation, move
from .host import uncommitted
from .positions import pick, put_back
from .staged import constrain

place_p = Primitive("place")
place_p.multiple_results = True


class Routes(NamedTuple):
    """Where arrays go, and where their cotangents go back to; None if these stay. `across` is
    whether an array on devices of a single process is the same one in all.
    """

    targets: tuple[Target | Uncommitted, ...]
    sources: tuple[Sharding | Uncommitted | None, ...]
    may_alias: tuple[bool | None, ...]
    across: bool

    @property
    def back(self) -> "Routes":
        return self._replace(targets=self.sources, sources=self.targets)

    def of(self, index: Sequence[int]) -> "Routes":
        targets, sources, may_alias = (tuple(pick(index, column)) for column in self[:3])
        return Routes(targets, sources, may_alias, self.across)


def place(arrays: Sequence[Any], routes: Routes) -> list[Any]:
    """Moves arrays under an eager transformation."""
    return place_p.bind(*arrays, routes=routes)


@place_p.def_impl
def _impl(*arrays: Any, routes: Routes) -> list[jax.Array]:
    # JAX differentiates Python numbers as objects that are not quite arrays.
    arrays = tuple(
        x if isinstance(x, np.ndarray | np.generic) or hasattr(x, "sharding") else jnp.asarray(x)
        for x in arrays
    )
    placed = list(arrays)
    homeless = [i for i, target in enumerate(routes.targets) if target is UNCOMMITTED]
    put_back(placed, homeless, uncommitted(pick(homeless, arrays)))
    kinds = [kind_of(x) for x in arrays]
    placeable = [i for i, target in enumerate(routes.targets) if target is not UNCOMMITTED]
    moving = not_there(arrays, kinds, routes.targets, placeable)
    moves: list[Relocation] = []
    for i in moving:
        x, kind, target = arrays[i], kinds[i], routes.targets[i]
        assert not isinstance(target, Uncommitted)
        travels = kind is Kind.DEVICE and crosses(x, sharding_of(target), always=routes.across)
        moves.append(Relocation(x, kind, target, may_alias=routes.may_alias[i], across=travels))
    put_back(placed, moving, move(moves))
    return placed


@place_p.def_abstract_eval
def _abstract(*avals: Any, routes: Routes) -> list[Any]:
    return [_aval_at(aval, target) for aval, target in zip(avals, routes.targets, strict=True)]


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
    primals: Sequence[Any], tangents: Sequence[Any], *, routes: Routes
) -> tuple[list[Any], list[Any]]:
    out = place(primals, routes)
    moving = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]
    out_tangents: list[Any] = [ad.Zero(jax.typeof(y).to_tangent_aval()) for y in out]
    if moving:
        put_back(out_tangents, moving, place(pick(moving, tangents), routes.of(moving)))
    return out, out_tangents


def _transpose(cotangents: Sequence[Any], *arrays: Any, routes: Routes) -> list[Any]:
    results = [None if isinstance(ct, ad.Zero) else ct for ct in cotangents]
    moving = [i for i, ct in enumerate(results) if ct is not None and routes.sources[i] is not None]
    if moving:
        put_back(results, moving, place(pick(moving, results), routes.of(moving).back))
    return results


def _batch(
    axis: Any, arrays: Sequence[Any], dims: Sequence[Any], *, routes: Routes
) -> tuple[list[Any], Sequence[Any]]:
    spmd_axes = () if axis.spmd_name is None else axis_names(axis.spmd_name)
    targets = map(_with_batch, routes.targets, dims, arrays, repeat(spmd_axes))
    sources = map(_with_batch, routes.sources, dims, arrays, repeat(()))
    return place(arrays, routes._replace(targets=tuple(targets), sources=tuple(sources))), dims


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


def _lower(*arrays: Any, routes: Routes) -> list[Any]:
    # Called when the linear part of an eager `linearize` or `vjp` is put under `jit` later.
    placed = list(arrays)
    index = [i for i, target in enumerate(routes.targets) if target is not UNCOMMITTED]
    operands, requested = pick(index, arrays), pick(index, routes.targets)
    _refuse_host_memory(operands, requested)
    filled = [
        fill_free(target, None, x.ndim) for x, target in zip(operands, requested, strict=True)
    ]
    put_back(placed, index, constrain(operands, filled, current_world()))
    return placed


def _refuse_host_memory(arrays: Sequence[Any], targets: Sequence[Target]) -> None:
    # JAX derives the memory of a program's results from its own transfers, and would ignore this
    # one.
    name = "an array in a function that was linearized outside of jit"
    reason = "jit can't tell that this function moves it to pinned_host memory"
    fix = "linearize inside of jit, or call the linear function without jit"
    faults = [
        Fault(name, tuple(x.shape), str(target), reason, fix)
        for x, target in zip(arrays, targets, strict=True)
        if memory_space(sharding_of(target)) == jax.memory.Space.Host
    ]
    if faults:
        raise PlacementError(faults)


ad.primitive_jvps[place_p] = _jvp
ad.primitive_transposes[place_p] = _transpose
batching.fancy_primitive_batchers[place_p] = _batch
mlir.register_lowering(place_p, mlir.lower_fun(_lower, multiple_results=True))

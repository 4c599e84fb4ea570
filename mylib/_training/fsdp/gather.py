"""Gathers the weights of a layer, and reduce-scatters their gradients."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.core import AbstractValue, ShapedArray
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from ..._core.compat import batched
from ..._core.dims import relate_as_operands
from ..._core.placement import Target, current_world, unusual_memory_kind
from ..._core.tree import Arrays, split
from ..._moving.transfer import place_leaves, transfer_and_constrain
from .quantised import Scales, cast, quantised, restored, scales_of
from .torus import halfway, is_over_all_devices

Targets = tuple[Target | None, ...]
Types = Sequence[ShapedArray]
# Of each argument of a primitive: the batched dimension, if there is one.
Dims = Sequence[int | None]


class BatchAxis(Protocol):
    """What `jax.vmap` tells a primitive's rule of the dimension that it adds."""

    size: int
    explicit_mesh_axis: object


@dataclass(frozen=True)
class Route:
    """Where weights are kept, where they are used, the dtype in which they are computed with, the
    dtype of their gradients, the dtype in which they are sent if it is another one, and whether
    rows of them may be looked up, as in an embedding.
    """

    kept: Targets
    used: Targets
    dtype: DTypeLike | None = None
    reduce_dtype: DTypeLike | None = None
    send_dtype: jnp.dtype | None = None
    lookups: bool = False

    def without(self, removed: Sequence[int]) -> "Route":
        """The route of slices of the weights, which lack as many first dimensions of each; of the
        weights themselves if `removed` is empty.
        """
        if not removed:
            return self
        kept, used = (tuple(map(_without, ts, removed)) for ts in (self.kept, self.used))
        return replace(self, kept=kept, used=used)

    def in_own_dtypes(self) -> "Route":
        return replace(self, dtype=None, reduce_dtype=None, send_dtype=None)

    def part(self, index: Sequence[int]) -> "Route":
        kept, used = (tuple(ts[i] for i in index) for ts in (self.kept, self.used))
        return replace(self, kept=kept, used=used)


def gather_weights(arrays: Sequence[jax.Array], route: Route) -> tuple[Arrays, Arrays]:
    """The weights where they are used, and their sinks (`gradient_dtype.py`), each None if there is
    no `reduce_dtype`.
    """
    return _gather(list(arrays), route)


def keep(arrays: Sequence[jax.Array], targets: Targets) -> Arrays:
    """The arrays at their targets, where they have one."""
    return place_leaves(split(list(arrays)), targets, current_world(), transfer_and_constrain)


def _gathered(arrays: Arrays, route: Route) -> tuple[Arrays, Arrays]:
    if route.send_dtype is None:
        # Cast first. If they were cast after gathering, they would be sent in the wider dtype.
        gathered = _moved([cast(weight, route.dtype) for weight in arrays], route.kept, route.used)
    else:
        gathered = _gathered_in_8_bits(arrays, route, route.send_dtype)
    return gathered, [_sink(weight, route.reduce_dtype) for weight in gathered]


def _moved(arrays: Arrays, kept: Targets, used: Targets) -> Arrays:
    # Two constraints: with only the second the compiler may keep the weights gathered.
    arrays = keep(arrays, on_device(kept))
    return keep(_by_way_of(arrays, map(halfway, kept, used)), used)


def _gathered_in_8_bits(arrays: Arrays, route: Route, dtype: jnp.dtype) -> Arrays:
    """The weights where they are used. Those that can be have been sent in this dtype."""
    found = list(map(scales_of, arrays, route.kept, route.used))
    all_scales = {i: scales for i, scales in enumerate(found) if scales is not None}
    others = [i for i in range(len(arrays)) if i not in all_scales]
    plain = replace(route, send_dtype=None, reduce_dtype=None)
    by_number = dict(
        zip(others, _gathered([arrays[i] for i in others], plain.part(others))[0], strict=True)
    )
    if all_scales:
        sent, route = [arrays[i] for i in all_scales], route.part([*all_scales])
        through = partial(_through_8_bits, dtype, route=route, all_scales=[*all_scales.values()])
        # Derivatives are those of weights that are sent as they are.
        move, _ = _gathering(sent, plain.part([*all_scales]))
        in_8_bits = replace(move, program=jax.make_jaxpr(through)(sent), of_tangents=move)
        by_number |= zip(all_scales, _bind(sent, in_8_bits), strict=True)
    return [by_number[i] for i in range(len(arrays))]


def _through_8_bits(
    dtype: jnp.dtype, arrays: Arrays, route: Route, all_scales: Sequence[Scales]
) -> Arrays:
    kept = keep(arrays, on_device(route.kept))
    sent = [quantised(weight, of, dtype) for weight, of in zip(kept, all_scales, strict=True)]
    weights = _moved([weight for weight, _ in sent], route.kept, route.used)
    kept_at, used_at = zip(*((of.kept, of.used) for of in all_scales), strict=True)
    values = _moved([value for _, value in sent], kept_at, used_at)
    restored_all = [
        restored(weight, value, of, route.dtype or before.dtype)
        for weight, value, of, before in zip(weights, values, all_scales, arrays, strict=True)
    ]
    return keep(restored_all, route.used)


_gather = jax.custom_jvp(_gathered, nondiff_argnums=(1,))


def _by_way_of(arrays: Arrays, between: Iterable[NamedSharding | None]) -> Arrays:
    """The arrays at a placement on their way to another one, where there is one."""
    return [
        # The type of an array on Explicit axes can't name the axes of another mesh.
        each if to is None or _is_explicit(each) else jax.lax.with_sharding_constraint(each, to)
        for each, to in zip(arrays, between, strict=True)
    ]


def _columns(
    kept: Target | None, used: Target | None, shape: Sequence[int]
) -> NamedSharding | None:
    """Where the gradient of a matrix that is kept by rows is summed, if its rows are looked up.

    A device has a gradient for the rows that its examples use. To sum these by rows, each device
    sends as many as the table has. By columns it sends as many as it has examples.

    Needed with JAX 0.12.0; no public issue is known. May go once `test_programs` of
    `tests/fsdp/test_embeddings.py` passes without it.
    """
    # On other meshes the compiler gathers the rows instead, and sends more.
    if not isinstance(kept, NamedSharding) or not is_over_all_devices(kept, used):
        return None
    rows, *others = kept.spec.partitions or (None,)
    if rows is None or any(others) or len(shape) != 2 or shape[1] % kept.mesh.size:
        return None
    return NamedSharding(kept.mesh, PartitionSpec(None, rows))


def _is_explicit(array: jax.Array) -> bool:
    meshes = jax.typeof(array).sharding.mesh, current_world().mesh
    return any(mesh.explicit_axes for mesh in meshes)


def _sink(weight: jax.Array, dtype: DTypeLike | None) -> jax.Array | None:
    floating = jnp.issubdtype(weight.dtype, jnp.floating)
    if dtype is None or not floating or weight.dtype.itemsize > jnp.dtype(dtype).itemsize:
        return None
    return weight.astype(dtype)


@partial(_gather.defjvp, symbolic_zeros=True)
def _rule(
    route: Route, primals: tuple[Arrays], all_tangents: tuple[Arrays]
) -> tuple[tuple[Arrays, Arrays], tuple[Arrays, Arrays]]:
    (arrays,), (tangents,) = primals, all_tangents
    # Not `_gather` again: a checkpoint's policy would see it as one call, and save its result.
    gathered = _gathered(arrays, route)
    # Tangents are not rounded to 8 bits.
    plain = replace(route, send_dtype=None)
    index = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, SymbolicZero)]
    moving = [tangents[i] for i in index]
    move, unflatten = _gathering(moving, plain.part(index))
    moved = jtu.tree_map(lambda each: SymbolicZero(jax.typeof(each).to_tangent_aval()), gathered)
    for all_of, some in zip(moved, unflatten(_bind(moving, move)), strict=True):
        for i, tangent in zip(index, some, strict=True):
            all_of[i] = tangent
    return gathered, moved


def _gathering(
    tangents: Arrays, route: Route
) -> tuple["_Gathering", Callable[[Sequence[jax.Array]], tuple[Arrays, Arrays]]]:
    """How such tangents are gathered, and what gives the result its structure."""
    program, shapes = jax.make_jaxpr(partial(_gathered, route=route), return_shape=True)(tangents)
    unflatten, types = jtu.tree_structure(shapes).unflatten, list(map(jax.typeof, tangents))

    def backward(*cotangents: jax.Array) -> Arrays:
        wide = [
            of_weight if of_sink is None else of_weight.astype(of_sink.dtype) + of_sink
            for of_weight, of_sink in zip(*unflatten(cotangents), strict=True)
        ]
        return summed(route, types, wide)

    return _Gathering(program, backward), unflatten


@dataclass(frozen=True, eq=False)
class _Gathering:
    """How arrays are gathered, as a program without constants, and what sums cotangents, which
    isn't the transpose of that; `of_tangents` is how tangents are, if that is another way. JAX
    would ask for rules if the program were a parameter itself.
    """

    program: ClosedJaxpr
    backward: Callable[..., Arrays]
    of_tangents: "_Gathering | None" = None


# What `_gather` does to tangents, and to weights that are sent in 8 bits. It has a transpose of its
# own, and forward mode, which `jax.custom_vjp` doesn't have. For 8 bits it is no `custom_jvp`,
# whose rule JAX 0.10 forgets where it takes a derivative of a loop's gradient: then gradients would
# be those of rounding. And one call, so that a checkpoint's policy saves nothing of it.
gathered_p = Primitive("gathered")
gathered_p.multiple_results = True


def _bind(arrays: Sequence[jax.Array], move: _Gathering) -> Arrays:
    # Those who walk through programs see only what rounds.
    rounding = None if move.of_tangents is None else move.program
    return gathered_p.bind(*arrays, move=move, rounding=rounding)


@gathered_p.def_abstract_eval
def _abstract(*avals: ShapedArray, move: _Gathering, **_: object) -> Sequence[AbstractValue]:
    return move.program.out_avals


@gathered_p.def_impl
def _run_program(*arrays: jax.Array, move: _Gathering, **_: object) -> Arrays:
    return jaxpr_as_fun(move.program)(*arrays)


def _jvp(
    primals: Arrays, tangents: Arrays, *, move: _Gathering, **_: object
) -> tuple[Arrays, Arrays]:
    moved = _bind(list(map(ad.instantiate_zeros, tangents)), move.of_tangents or move)
    return _bind(primals, move), moved


def _transpose(cotangents: Arrays, *tangents: jax.Array, move: _Gathering, **_: object) -> Arrays:
    return move.backward(*map(ad.instantiate_zeros, cotangents))


def _batch(
    axis: BatchAxis, args: Arrays, dims: Dims, *, move: _Gathering, **_: object
) -> tuple[Arrays, Dims]:
    mapped = [dim is not None for dim in dims]
    move, outputs_mapped = _batched(move, axis, mapped)
    moved = _bind(batched_at_front(axis, args, dims, mapped), move)
    return moved, [0 if is_mapped else None for is_mapped in outputs_mapped]


def _batched(
    move: _Gathering, axis: BatchAxis, mapped: Sequence[bool]
) -> tuple[_Gathering, Sequence[bool]]:
    program, outputs_mapped = batched(move.program, axis, mapped)
    if move.of_tangents is not None:
        of_tangents, _ = _batched(move.of_tangents, axis, mapped)
        return replace(of_tangents, program=program, of_tangents=of_tangents), outputs_mapped
    summed = jax.make_jaxpr(move.backward)(*move.program.out_avals)
    backward = jaxpr_as_fun(batched(summed, axis, outputs_mapped)[0])
    return _Gathering(program, backward), outputs_mapped


def batched_at_front(axis: BatchAxis, args: Arrays, dims: Dims, mapped: Iterable[bool]) -> Arrays:
    """The arguments of a `batched` program."""
    return [
        batching.bdim_at_front(arg, dim, axis.size, axis.explicit_mesh_axis) if is_mapped else arg
        for arg, dim, is_mapped in zip(args, dims, mapped, strict=True)
    ]


ad.primitive_jvps[gathered_p] = _jvp
ad.primitive_transposes[gathered_p] = _transpose
batching.fancy_primitive_batchers[gathered_p] = _batch
# Forward mode moves the tangents of weights as it moves these.
relate_as_operands(gathered_p)
mlir.register_lowering(gathered_p, mlir.lower_fun(_run_program, multiple_results=True))


def summed(route: Route, types: Types, parts: Arrays) -> Arrays:
    """Sums over the devices, of which each keeps its part, in the dtypes of `types`."""
    # A reduce-scatter. The transpose of the second constraint above would ask for the whole sum on
    # each device, which on TPUs stays an all-reduce.
    between = [
        (_columns(kept, used, part.shape) if route.lookups else None) or halfway(kept, used)
        for part, kept, used in zip(parts, route.kept, route.used, strict=True)
    ]
    sums = keep(_by_way_of(parts, between), on_device(route.kept))
    sums = [each.astype(like.dtype) for each, like in zip(sums, types, strict=True)]
    return list(map(of_type, keep(sums, route.kept), types))


def of_type(array: jax.Array, like: ShapedArray) -> jax.Array:
    """An array, split over Explicit axes as `like` is."""
    if like.sharding.mesh.explicit_axes:
        return jax.sharding.reshard(array, like.sharding)
    return array


def is_float(x: Any) -> bool:
    """Whether an array or a type has derivatives."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def on_device(targets: Targets) -> Targets:
    return tuple(t and _computable(t) for t in targets)


def _computable(target: Target) -> Target:
    """The same target in memory that programs compute in."""
    if isinstance(target, NamedSharding) and unusual_memory_kind(target) is not None:
        return NamedSharding(target.mesh, target.spec)
    return target


def _without(target: Target | None, count: int) -> Target | None:
    if not isinstance(target, NamedSharding):
        return target
    return target.update(spec=target.spec.update(partitions=target.spec.partitions[count:]))

"""Layers that gather their weights in advance: `prefetch=` of `fully_shard`.

A layer waits for a *token* before it gathers, which an earlier layer returns as soon as it has its
input. In the backward pass it waits for one that a later layer returns as soon as it has the
cotangent of its results.

JAX has nothing for the latter. `jax.checkpoint` gathers again only when the cotangent of the
results is there, and `jax.custom_vjp` under `jax.vmap` computes the gradient of weights for each
example. So the tangents of a layer are computed by a primitive with a transpose of its own.
Everything else are ordinary equations.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress

import jax
import jax.numpy as jnp
from jax.core import AbstractValue, ShapedArray
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import ad, batching, mlir

from ..._core.compat import batched, is_staged, names, without_dead_code
from ..._core.jaxprs import all_equations, interpret
from ..._core.placement import cast, varying
from ..._core.tree import Arrays
from ..jit import without_checks
from .gather import (
    BatchAxis,
    Dims,
    Targets,
    batched_at_front,
    is_float,
    keep,
    of_type,
    on_device,
)
from .prefetch_order import Turns

Run = Callable[[Arrays, Arrays], Arrays]


def call_ahead(run: Run, weights: Arrays, inputs: Arrays, kept: Targets, turns: Turns) -> Arrays:
    """`run(weights, inputs)`, which gathers the weights."""
    token, is_ahead = turns.take()
    # Inside `shard_map` JAX 0.10 lets all operands of a barrier vary over the same axes.
    arrays = [*weights, *inputs, token]
    *arrays, token = map(cast, arrays, map(varying, jax.eval_shape(_barrier, arrays)))
    weights, inputs = arrays[: len(weights)], arrays[len(weights) :]
    traced = jax.make_jaxpr(run)(weights, inputs)
    # The others include what the layer's method closes over, which may have a gradient.
    others, start = [*traced.consts, *inputs], len(traced.consts)

    def computed(weights: Arrays, others: Arrays) -> Arrays:
        return interpret(traced, [*weights, *others[start:]], constants=others[:start])

    # Both without constants: rules must not refer to values of a trace.
    program = jax.make_jaxpr(computed)(weights, others)
    after = jax.make_jaxpr(lambda weights, token: _after(weights, token, kept))(weights, token)
    layer = _Layer(program, after, turns)
    *results, token = _call(layer, is_ahead)([*weights, *others], token)
    turns.add(token)
    return results


_barrier = jax.lax.optimization_barrier


def _after(weights: Arrays, token: jax.Array, kept: Targets) -> Arrays:
    """The weights and the token, the weights available only after it."""
    weights, token = _barrier((weights, token))
    # XLA removes what nothing uses from a barrier, so one weight, the smallest, uses the token.
    floats = [i for i, weight in enumerate(weights) if is_float(weight)]
    if floats:
        i = min(floats, key=lambda i: weights[i].size)
        (weight,) = keep([weights[i]], on_device(kept[i : i + 1]))
        weights[i] = jnp.where(token == 0, weight, jnp.zeros((), weight.dtype))
    return [*keep(weights, kept), token]


@dataclass(frozen=True, eq=False)
class _Layer:
    """A layer as a function of its weights and other arrays, and `_after` as one of the weights and
    a token. JAX would ask for rules if these jaxprs were parameters of a primitive.
    """

    program: ClosedJaxpr
    after: ClosedJaxpr
    turns: Turns
    # Marks the arguments that have tangents.
    moving: Sequence[bool] = ()

    def __call__(self, operands: Arrays) -> Arrays:
        return interpret(self.program, operands)

    def split(self, operands: Arrays) -> tuple[Arrays, Arrays]:
        """The weights, and the other arrays."""
        count = len(self.after.in_avals) - 1
        return operands[:count], operands[count:]

    def wait(self, weights: Arrays, token: jax.Array) -> tuple[Arrays, jax.Array]:
        def run(weights: Arrays, token: jax.Array) -> Arrays:
            return interpret(self.after, [*weights, token])

        # In an eager `vmap` with an axis name JAX can't reshard, as it calls `jax.set_mesh`.
        *weights, token = (run if is_staged() else jax.jit(run))(weights, token)
        return weights, token

    def by_forward_rules(self, moving: Sequence[bool]) -> "_Layer":
        """The layer as it is differentiated again: with the forward rules of a `jax.custom_vjp` in
        place of what it calls without a gradient.
        """
        if not any(
            eqn.primitive.name == names.CUSTOM_VJP_CALL for eqn in all_equations(self.program)
        ):
            return self

        def run(operands: Arrays) -> Arrays:
            return jax.vjp(
                lambda moved: self(_merged(operands, moved, moving)), [*compress(operands, moving)]
            )[0]

        program = jax.make_jaxpr(run)(self.program.in_avals)
        return replace(self, program=without_dead_code(program))

    def linearised(self, operands: Arrays) -> tuple[Arrays, Callable[[Arrays], tuple[Arrays]]]:
        """`jax.vjp` for the arguments and results that have tangents."""

        def computed(moved: Arrays) -> Arrays:
            return list(filter(is_float, self(_merged(operands, moved, self.moving))))

        return jax.vjp(computed, list(compress(operands, self.moving)))


def _merged(operands: Arrays, moved: Arrays, moving: Sequence[bool]) -> Arrays:
    """The operands, with others in place of those that are moving."""
    others = iter(moved)
    return [next(others) if moves else same for same, moves in zip(operands, moving, strict=True)]


def _call(layer: _Layer, is_ahead: bool) -> Callable[[Arrays, jax.Array], Arrays]:
    """A function of a layer's arguments and a token. It returns a token behind its results."""

    @jax.custom_jvp
    def call(operands: Arrays, token: jax.Array) -> Arrays:
        weights, others = layer.split(operands)
        if not is_ahead:
            others, token = _barrier((others, token))
        weights, token = layer.wait(weights, token)
        others, token = _barrier((others, token))
        return [*layer([*weights, *others]), token]

    def rule(
        primals: tuple[Arrays, jax.Array], all_tangents: tuple[Arrays, jax.Array]
    ) -> tuple[Arrays, Arrays]:
        (operands, _), (tangents, _) = primals, all_tangents
        moving = [not isinstance(tangent, SymbolicZero) for tangent in tangents]
        # In forward mode its checks couldn't be returned.
        program = without_checks(layer.program)
        differentiated = replace(layer, moving=moving, program=program)
        results = _call(layer.by_forward_rules(moving), is_ahead)(*primals)
        moved = iter(
            layer_tangent_p.bind(*operands, *compress(tangents, moving), layer=differentiated)
        )
        types = [jax.typeof(result).to_tangent_aval() for result in results]
        pairs = zip(results, types, strict=True)
        return results, [next(moved) if is_float(x) else SymbolicZero(of) for x, of in pairs]

    call.defjvp(rule, symbolic_zeros=True)
    return call


# The tangents of a layer's results: a function of its arguments and, linearly, of their tangents.
layer_tangent_p = Primitive("prefetched_layer_tangent")
layer_tangent_p.multiple_results = True


@layer_tangent_p.def_abstract_eval
def _abstract(*avals: ShapedArray, layer: _Layer) -> Sequence[AbstractValue]:
    return [aval.to_tangent_aval() for aval in layer.program.out_avals if is_float(aval)]


def _forward_mode(*args: jax.Array, layer: _Layer) -> Arrays:
    # A layer may have a `jax.custom_vjp`, which has no forward mode. The transpose of a transpose
    # has.
    count = len(layer.program.in_avals)
    primals, tangents = list(args[:count]), args[count:]
    results, pull = layer.linearised(primals)
    # On Explicit axes a user's tangents may be split otherwise than the weights.
    types = [jax.typeof(each).to_tangent_aval() for each in compress(primals, layer.moving)]
    (moved,) = jax.linear_transpose(pull, results)((list(map(of_type, tangents, types)),))
    return moved


def _jvp(
    primals: Arrays, tangents: Sequence[jax.Array | ad.Zero], *, layer: _Layer
) -> tuple[Arrays, Arrays]:
    index = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def run(moved: Arrays) -> Arrays:
        replaced = dict(zip(index, moved, strict=True))
        args = (replaced.get(i, primal) for i, primal in enumerate(primals))
        return _forward_mode(*args, layer=layer)

    return jax.jvp(run, ([primals[i] for i in index],), ([tangents[i] for i in index],))


def _transpose(
    cotangents: Arrays, *args: jax.Array | ad.UndefinedPrimal, layer: _Layer
) -> Sequence[jax.Array | None]:
    count = len(layer.program.in_avals)
    (weights, others), tangents = layer.split(list(args[:count])), args[count:]
    cotangents = list(map(ad.instantiate_zeros, cotangents))
    token, is_ahead = layer.turns.take(backward=True)
    if not is_ahead:
        others, cotangents, token = _barrier((others, cotangents, token))
    weights, token = layer.wait(weights, token)
    others, cotangents, token = _barrier((others, cotangents, token))
    layer.turns.add(token, backward=True)
    (sums,) = layer.linearised([*weights, *others])[1](cotangents)
    # Otherwise the gradients of many layers could be whole at the same time.
    sums = _barrier(sums)
    pairs = zip(sums, tangents, strict=True)
    grads = [of_type(x, t.aval) if isinstance(t, ad.UndefinedPrimal) else None for x, t in pairs]
    return [*[None] * count, *grads]


def _batch(axis: BatchAxis, args: Arrays, dims: Dims, *, layer: _Layer) -> tuple[Arrays, Dims]:
    count, weights = len(layer.program.in_avals), len(layer.after.in_avals) - 1
    of_tangents = iter(dims[count:])
    # An argument is batched if its tangent is, and the other way round.
    mapped = [
        (dim, next(of_tangents) if moves else None) != (None, None)
        for dim, moves in zip(dims[:count], layer.moving, strict=True)
    ]
    program, results = batched(layer.program, axis, mapped)
    after, _ = batched(layer.after, axis, [*mapped[:weights], False])
    args = batched_at_front(axis, args, dims, [*mapped, *compress(mapped, layer.moving)])
    moved = layer_tangent_p.bind(*args, layer=replace(layer, program=program, after=after))
    pairs = zip(layer.program.out_avals, results, strict=True)
    return moved, [0 if is_batched else None for aval, is_batched in pairs if is_float(aval)]


layer_tangent_p.def_impl(_forward_mode)
ad.primitive_jvps[layer_tangent_p] = _jvp
ad.primitive_transposes[layer_tangent_p] = _transpose
batching.fancy_primitive_batchers[layer_tangent_p] = _batch
mlir.register_lowering(layer_tangent_p, mlir.lower_fun(_forward_mode, multiple_results=True))

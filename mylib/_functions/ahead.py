"""Layers that gather their weights in advance: `prefetch=` of `fully_shard`.

A layer waits for a *token* before it gathers: a number without meaning, which an earlier layer
returns as soon as it has its input. In the backward pass it waits for the token's cotangent, which
a later layer returns as soon as it has the cotangent of its results.

JAX has nothing for this. `jax.checkpoint` gathers again only when the cotangent of the results is
there, and `jax.custom_vjp` under `jax.vmap` computes the gradient of weights for each example. So
the tangents of a layer are computed by a primitive with a transpose of its own. All else are
ordinary equations.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .._compat import batched
from .._programs import evaluate
from .._tree import Arrays
from .gather import Targets, keep, on_device
from .turns import Turns

Run = Callable[[Arrays, Arrays], Arrays]


def call_ahead(run: Run, weights: Arrays, given: Arrays, kept: Targets, turns: Turns) -> Arrays:
    """`run(weights, given)`, which gathers the weights."""
    traced = jax.make_jaxpr(run)(weights, given)
    # The others include what the layer's method closes over, which may have a gradient.
    others, start = [*traced.consts, *given], len(traced.consts)

    def computed(weights: Arrays, others: Arrays) -> Arrays:
        return evaluate(traced, others[:start], [*weights, *others[start:]])

    taken = turns.take()
    token = jnp.zeros(()) if taken is None else taken
    layer = _Layer(
        # Without constants: rules must not refer to values of a trace.
        jax.make_jaxpr(computed)(weights, others),
        jax.make_jaxpr(lambda weights, token: _after(weights, token, kept))(weights, token),
    )
    *results, token = _call(layer, taken is None)(weights, others, token)
    turns.add(token)
    return results


_barrier: Any = jax.lax.optimization_barrier


def _after(weights: Arrays, token: Any, kept: Targets) -> Arrays:
    """The weights and the token, the weights available only after it."""
    weights, token = _barrier((weights, token))
    # XLA removes what nothing uses from a barrier, so one weight, the smallest, uses the token.
    floats = [i for i, x in enumerate(weights) if _is_float(x)]
    if floats:
        i = min(floats, key=lambda i: weights[i].size)
        (x,) = keep([weights[i]], on_device(kept[i : i + 1]))
        weights[i] = jnp.where(token == 0, x, jnp.zeros((), x.dtype))
    return [*keep(weights, kept), token]


@dataclass(frozen=True, eq=False)
class _Layer:
    """The program of a layer, a function of its weights and other arrays; and `_after`, a function
    of the weights and a token.

    Opaque for JAX, which would otherwise ask for more rules: these programs never run as such.
    """

    program: Any
    after: Any

    def __call__(self, given: Arrays) -> Arrays:
        return evaluate(self.program, self.program.consts, given)

    def wait(self, weights: Arrays, token: Any) -> tuple[Arrays, Any]:
        *weights, token = evaluate(self.after, self.after.consts, [*weights, token])
        return weights, token


def _call(layer: _Layer, is_first: bool) -> Any:
    """A function of weights, other arrays and a token. It returns a token behind its results."""

    @jax.custom_jvp
    def call(weights: Arrays, others: Arrays, token: Any) -> Arrays:
        if is_first:
            others, token = _barrier((others, token))
        weights, token = layer.wait(weights, token)
        others, token = _barrier((others, token))
        return [*layer([*weights, *others]), token]

    @call.defjvp
    def _(primals: Any, tangents: Any) -> tuple[Arrays, Arrays]:
        results = call(*primals)
        (weights, others, _), (of_weights, of_others, of_token) = primals, tangents
        given = [*weights, *others]
        moving = _floats(given, [*of_weights, *of_others])
        moved = iter(tangent_p.bind(*given, *moving, of_token, layer=layer))
        nothing = jax.dtypes.float0
        return results, [next(moved) if _is_float(x) else np.zeros(x.shape, nothing) for x in results]

    return call


# The tangents of a layer, and of a token: linear in its last arguments, the tangents of those of
# the first arguments that have one. It is transposed, not run.
tangent_p = Primitive("prefetched_layer_tangent")
tangent_p.multiple_results = True


@tangent_p.def_abstract_eval
def _abstract(*avals: Any, layer: _Layer) -> Sequence[Any]:
    results = layer.program.out_avals
    return [*(x.to_tangent_aval() for x in results if _is_float(x)), avals[-1]]


def _refuse(*args: Any, **params: Any) -> Any:
    del args, params
    raise TypeError(
        "fully_shard: layers have no forward-mode derivatives (jax.jvp, jax.jacfwd), as their "
        "gradients are summed over devices. Only reverse-mode differentiation is supported: use "
        "jax.grad, jax.vjp or jax.jacrev"
    )


def _transpose(cotangents: Sequence[Any], *args: Any, layer: _Layer) -> Sequence[Any]:
    inputs, count = len(layer.program.in_avals), len(layer.after.in_avals) - 1
    given, tangents = args[:inputs], args[inputs:]
    weights, others = list(given[:count]), list(given[count:])
    *cotangents, token = cotangents
    cotangents = [ad.instantiate_zeros(x) for x in cotangents]
    if isinstance(token, ad.Zero):  # one of the last layers
        others, cotangents, token = _barrier((others, cotangents, ad.instantiate_zeros(token)))
    weights, token = layer.wait(weights, token)
    others, cotangents, token = _barrier((others, cotangents, token))
    given = [*weights, *others]
    floats = [i for i, x in enumerate(given) if _is_float(x)]

    def computed(xs: Arrays) -> Arrays:
        replaced = dict(zip(floats, xs, strict=True))
        results = layer([replaced.get(i, x) for i, x in enumerate(given)])
        return _floats(results, results)

    (sums,) = jax.vjp(computed, _floats(given, given))[1](cotangents)
    # Otherwise the gradients of many layers could be whole at the same time.
    sums = _barrier(sums)
    found = [
        x if ad.is_undefined_primal(tangent) else None
        for x, tangent in zip([*sums, token], tangents, strict=True)
    ]
    return [*[None] * inputs, *found]


def _batch(
    axis: Any, args: Sequence[Any], dims: Sequence[Any], *, layer: _Layer
) -> tuple[Any, Any]:
    inputs, count = len(layer.program.in_avals), len(layer.after.in_avals) - 1
    *of_tangents, of_token = dims[inputs:]
    moving = iter(of_tangents)
    # A tangent is batched if its primal is.
    together = [
        (dim, next(moving) if _is_float(x) else None)
        for x, dim in zip(layer.program.in_avals, dims[:inputs], strict=True)
    ]
    mapped = [pair != (None, None) for pair in together]
    program, made = batched(layer.program, axis, mapped)
    after, _ = batched(layer.after, axis, [*mapped[:count], False])
    kinds = [*mapped, *_floats(layer.program.in_avals, mapped)]
    args = [
        batching.bdim_at_front(x, dim, axis.size, axis.explicit_mesh_axis) if is_mapped else x
        for x, dim, is_mapped in zip(args[:-1], dims[:-1], kinds, strict=True)
    ] + [args[-1]]
    results = tangent_p.bind(*args, layer=_Layer(program, after))
    out = [0 if is_mapped else None for is_mapped in _floats(layer.program.out_avals, made)]
    return results, [*out, of_token]


def _floats(like: Sequence[Any], xs: Sequence[Any]) -> list[Any]:
    """Those of `xs` for arrays that have tangents."""
    return [x for array, x in zip(like, xs, strict=True) if _is_float(array)]


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


tangent_p.def_impl(_refuse)
ad.primitive_jvps[tangent_p] = _refuse
ad.primitive_transposes[tangent_p] = _transpose
batching.fancy_primitive_batchers[tangent_p] = _batch
mlir.register_lowering(tangent_p, _refuse)

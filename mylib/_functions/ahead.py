"""Layers that gather their weights in advance: `prefetch=` of `fully_shard`.

A layer waits for a *token* before it gathers: a number without meaning, which an earlier layer
returns as soon as it has its input. In the backward pass it waits for the token's cotangent, which
a later layer returns as soon as it has the cotangent of its results.

JAX has nothing for this. `jax.checkpoint` gathers again only when the cotangent of the results is
there, and `jax.custom_vjp` under `jax.vmap` computes the gradient of weights for each example. So a
layer is an equation with a transpose of its own.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .._compat import current_trace, names, opened
from .._errors import PrefetchWarning, warn
from .._programs import evaluate
from .._tree import Arrays
from .gather import Targets, keep, on_device

Run = Callable[[Arrays, Arrays], Arrays]


class Turns:
    """The tokens of the layers that were called last."""

    def __init__(self, prefetch: int, layers: int):
        self._prefetch, self._layers = prefetch, layers
        self._clear()
        self._warned = False

    def take(self) -> jax.Array | None:
        """The token that the next layer waits for; None for the first layers."""
        if self._tokens and self._trace is not current_trace():
            self._clear()
            self._warn()
        return self._tokens.pop(0) if len(self._tokens) == self._prefetch else None

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            warn(
                "fully_shard: prefetch= has no effect across transformations. Transform the loop "
                "over the layers (jax.vmap, jax.checkpoint, jax.jit), not each layer's call",
                PrefetchWarning,
            )

    def add(self, token: jax.Array) -> None:
        self._trace = current_trace()
        self._tokens.append(token)
        self._calls += 1
        # Tokens must not outlive their trace: the model is a key of JAX's caches.
        if self._calls == self._layers:
            self._clear()

    def _clear(self) -> None:
        self._calls = 0
        self._trace: Any = None
        self._tokens: list[jax.Array] = []


def call_ahead(run: Run, weights: Arrays, given: Arrays, kept: Targets, turns: Turns) -> Arrays:
    """`run(weights, given)`, which gathers the weights."""
    traced = jax.make_jaxpr(run)(weights, given)
    # The others include what the layer's method closes over, which may have a gradient.
    others, start = [*traced.consts, *given], len(traced.consts)

    def computed(weights: Arrays, others: Arrays) -> Arrays:
        return evaluate(traced, others[:start], [*weights, *others[start:]])

    taken = turns.take()
    token = jnp.zeros(()) if taken is None else taken

    def in_advance(weights: Arrays, others: Arrays, token: Any) -> Arrays:
        if taken is None:
            others, token = _barrier((others, token))
        weights, token = _after(weights, token, kept)
        others, token = _barrier((others, token))
        return [*computed(weights, others), token]

    forward = jax.make_jaxpr(in_advance)(weights, others, token)
    program = jax.make_jaxpr(computed)(weights, others)
    *results, token = layer_p.bind(
        *weights, *others, token, forward=forward, program=program, kept=kept
    )
    turns.add(token)
    return results


_barrier: Any = jax.lax.optimization_barrier


def _after(weights: Arrays, token: Any, kept: Targets) -> tuple[Arrays, Any]:
    """The weights, available only after the token."""
    weights, token = _barrier((weights, token))
    # XLA removes what nothing uses from a barrier, so one weight, the smallest, uses the token.
    floats = [i for i, x in enumerate(weights) if _is_float(x)]
    if floats:
        i = min(floats, key=lambda i: weights[i].size)
        (x,) = keep([weights[i]], on_device(kept[i : i + 1]))
        weights[i] = jnp.where(token == 0, x, jnp.zeros((), x.dtype))
    return keep(weights, kept), token


# A layer. `program` takes weights, which `kept` is for, and other arrays; `forward` a token, too,
# and returns one behind the results. `forward` is what runs, `program` what is differentiated.
layer_p = Primitive("prefetched_layer")
layer_p.multiple_results = True
# Its tangents. Linear in its last arguments, the tangents of the others. It is transposed, not run.
tangent_p = Primitive("prefetched_layer_tangent")
tangent_p.multiple_results = True


def _run(*args: Any, forward: Any, **_: Any) -> Arrays:
    return evaluate(forward, forward.consts, args)


def _abstract(*args: Any, forward: Any, **_: Any) -> tuple[Sequence[Any], Any]:
    del args
    return forward.out_avals, forward.effects


def _abstract_tangents(*args: Any, forward: Any, **_: Any) -> Sequence[Any]:
    del args
    return [aval for aval in forward.out_avals if _is_float(aval)]


def _refuse(*args: Any, **_: Any) -> Arrays:
    raise TypeError("fully_shard: only reverse-mode differentiation is supported")


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    results = layer_p.bind(*primals, **params)
    floats = [t for x, t in zip(primals, tangents, strict=True) if _is_float(x)]
    moved = iter(tangent_p.bind(*primals, *map(ad.instantiate_zeros, floats), **params))
    return results, [
        next(moved) if _is_float(x) else ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results
    ]


def _transpose(
    cotangents: Sequence[Any], *args: Any, program: Any, kept: Targets, **_: Any
) -> Sequence[Any]:
    inputs, count = len(program.in_avals), len(kept)
    (*given, _), tangents = args[: inputs + 1], args[inputs + 1 :]
    *cotangents, token = cotangents
    cotangents, others = [ad.instantiate_zeros(x) for x in cotangents], given[count:]
    if isinstance(token, ad.Zero):  # one of the last layers
        others, cotangents, token = _barrier((others, cotangents, ad.instantiate_zeros(token)))
    weights, token = _after(given[:count], token, kept)
    others, cotangents, token = _barrier((others, cotangents, token))
    given = [*weights, *others]
    floats = [i for i, x in enumerate(given) if _is_float(x)]

    def computed(xs: Arrays) -> Arrays:
        replaced = dict(zip(floats, xs, strict=True))
        args = [replaced.get(i, x) for i, x in enumerate(given)]
        return [x for x in evaluate(program, program.consts, args) if _is_float(x)]

    (sums,) = jax.vjp(computed, [given[i] for i in floats])[1](cotangents)
    # Otherwise the gradients of many layers could be whole at the same time.
    sums = _barrier(sums)
    found = [
        x if ad.is_undefined_primal(tangent) else None
        for x, tangent in zip([*sums, token], tangents, strict=True)
    ]
    return [*[None] * (inputs + 1), *found]


def _batch(
    axis: Any,
    args: Sequence[Any],
    dims: Sequence[Any],
    *,
    forward: Any,
    program: Any,
    kept: Targets,
) -> tuple[Any, Any]:
    depend = _depend(program, [dim is not None for dim in dims[:-1]], axis.name)
    out = [0 if depends else None for depends in depend]
    batched = _batched(axis, forward, args, dims, [*out, None])
    program = _batched(axis, program, args[:-1], dims[:-1], out)
    return layer_p.bind(*args, forward=batched, program=program, kept=kept), [*out, None]


def _batched(
    axis: Any, program: Any, args: Sequence[Any], dims: Sequence[Any], out: Sequence[Any]
) -> Any:
    index = [i for i, dim in enumerate(dims) if dim is not None]

    def run(*args: Any) -> Arrays:
        def one(mapped: Sequence[Any]) -> Arrays:
            replaced = dict(zip(index, mapped, strict=True))
            given = [replaced.get(i, x) for i, x in enumerate(args)]
            return evaluate(program, program.consts, given)

        # Only what is mapped: on Explicit axes weights must not be arguments of this `vmap`.
        mapped = [args[i] for i in index]
        in_axes = ([dims[i] for i in index],)
        options = {"axis_name": axis.name, "spmd_axis_name": axis.spmd_name}
        return jax.vmap(one, in_axes, list(out), axis_size=axis.size, **options)(mapped)

    return jax.make_jaxpr(run)(*args)


def _depend(program: Any, batched: Sequence[bool], axis: Any) -> list[bool]:
    """Which results depend on batched arguments."""
    jaxpr = opened(program)
    found = {x for x, is_batched in zip(jaxpr.invars, batched, strict=True) if is_batched}
    for eqn in jaxpr.eqns:
        reduced = eqn.primitive.name in names.REDUCTIONS and axis in eqn.params[names.PARAM_AXES]
        if not reduced and any(not hasattr(x, "val") and x in found for x in eqn.invars):
            found.update(eqn.outvars)
    return [not hasattr(x, "val") and x in found for x in jaxpr.outvars]


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


layer_p.def_impl(_run)
layer_p.def_effectful_abstract_eval(_abstract)
tangent_p.def_impl(_refuse)
tangent_p.def_abstract_eval(_abstract_tangents)
ad.primitive_jvps[layer_p] = _jvp
ad.primitive_transposes[tangent_p] = _transpose
batching.fancy_primitive_batchers[layer_p] = _batch
mlir.register_lowering(layer_p, mlir.lower_fun(_run, multiple_results=True))
mlir.register_lowering(tangent_p, mlir.lower_fun(_refuse, multiple_results=True))

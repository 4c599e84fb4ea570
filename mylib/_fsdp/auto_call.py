"""A call on Auto axes, inside a program on Explicit ones.

JAX's `auto_axes` is enough for values and first gradients. But what a loop saves for its backward
pass leaves it as it is there: on Auto axes. A `vmap` around the gradient of the loop moves the
examples of each to the front, on the axes of the loop, which are Explicit, and JAX refuses. (JAX
0.10.2 and 0.12.0; `moveaxis` of its batching rules. No public issue is known.) So here the call
moves them itself, before they leave it. And it stays one call under all transformations, so that
this is true of their parts, too.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from .._compat import batched, jvp_of, names, register_call
from .gather import batched_at_front

Values = Sequence[Any]


def call_on_auto_axes(run: Callable[..., Any], types: Sequence[Any], *args: Any) -> list[Any]:
    """`run(*args)` with Auto axes in place of Explicit ones. `types` are those of its results."""
    specs = [aval.sharding.spec for aval in types]
    leaves, treedef = jax.tree.flatten(args)

    def flat(*leaves: Any) -> Any:
        return run(*jax.tree.unflatten(treedef, leaves))

    _register()
    program = jax.make_jaxpr(jax.sharding.auto_axes(flat, out_sharding=specs))(*leaves)
    return call_p.bind(*leaves, call_jaxpr=program)


# Named as JAX's call of the same kind, so that all that walk through programs know it.
call_p = Primitive(names.CLOSED_CALL)
call_p.multiple_results = True


@cache
def _register() -> None:
    register_call(call_p)


@call_p.def_effectful_abstract_eval
def _abstract(*avals: Any, call_jaxpr: Any) -> tuple[Values, Any]:
    return call_jaxpr.out_avals, call_jaxpr.effects


@call_p.def_impl
def _run(*args: Any, call_jaxpr: Any) -> Values:
    # Compiled, since JAX can't compute eagerly on another type of axes.
    return jax.jit(jaxpr_as_fun(call_jaxpr))(*args)


def _jvp(primals: Values, tangents: Values, *, call_jaxpr: Any) -> tuple[Values, Values]:
    moving = [not isinstance(x, ad.Zero) for x in tangents]
    program, have_tangents = jvp_of(call_jaxpr, moving)
    given = [x for x in tangents if not isinstance(x, ad.Zero)]
    results = call_p.bind(*primals, *given, call_jaxpr=program)
    values = results[: len(have_tangents)]
    moved = iter(results[len(have_tangents) :])
    types = [jax.typeof(x).to_tangent_aval() for x in values]
    pairs = zip(types, have_tangents, strict=True)
    return values, [next(moved) if has else ad.Zero(t) for t, has in pairs]


def _transpose(cotangents: Values, *args: Any, call_jaxpr: Any) -> Values:
    linear = [ad.is_undefined_primal(x) for x in args]
    known = [x for x, is_linear in zip(args, linear, strict=True) if not is_linear]
    types = [x.aval for x in args if ad.is_undefined_primal(x)]
    index = [i for i, x in enumerate(cotangents) if not isinstance(x, ad.Zero)]

    def backward(known: Values, cotangents: Values) -> Any:
        def forward(*moving: Any) -> Any:
            operands, others = iter(moving), iter(known)
            merged = [next(operands) if is_linear else next(others) for is_linear in linear]
            results = jaxpr_as_fun(call_jaxpr)(*merged)
            return [results[i] for i in index]

        return jax.linear_transpose(forward, *types)(cotangents)

    given = [cotangents[i] for i in index]
    program = jax.make_jaxpr(backward)(known, given)
    found = iter(call_p.bind(*known, *given, call_jaxpr=program))
    return [next(found) if is_linear else None for is_linear in linear]


def _batch(axis: Any, args: Values, dims: Values, *, call_jaxpr: Any) -> tuple[Any, Any]:
    mapped = [dim is not None for dim in dims]

    def run(*args: Any) -> Values:
        return list(map(_in_front, jaxpr_as_fun(call_jaxpr)(*args)))

    program, are_mapped = batched(jax.make_jaxpr(run)(*call_jaxpr.in_avals), axis, mapped)
    results = call_p.bind(*batched_at_front(axis, args, dims, mapped), call_jaxpr=program)
    return results, [0 if is_mapped else None for is_mapped in are_mapped]


ad.primitive_jvps[call_p] = _jvp
ad.primitive_transposes[call_p] = _transpose
batching.fancy_primitive_batchers[call_p] = _batch
mlir.register_lowering(call_p, mlir.lower_fun(_run, multiple_results=True))


def _in_front(x: Any) -> Any:
    with jax.sharding.use_abstract_mesh(jax.typeof(x).sharding.mesh):
        return _in_front_p.bind(x)


def _moved_in_front(axis: Any, xs: Values, dims: Values) -> tuple[Any, int | None]:
    mapped = [dim is not None for dim in dims]
    (x,) = batched_at_front(axis, xs, dims, mapped)
    return x, 0 if any(mapped) else None


# Nothing, but that under `vmap` the examples come first.
_in_front_p = Primitive("in_front")
_in_front_p.def_impl(lambda x: x)
_in_front_p.def_abstract_eval(lambda x: x)
batching.fancy_primitive_batchers[_in_front_p] = _moved_in_front
mlir.register_lowering(_in_front_p, lambda ctx, x: [x])

"""Gradients of a layer's weights in a wider dtype than the layer computes in, before they are
summed over devices.

The product that computes a gradient returns each device's part of a sum, in the dtype of its
operands, and XLA sums the parts in that dtype. Casting the sum would be too late. Because JAX
requires a cotangent to have the dtype of its primal, each weight has a *sink*: a copy in the wider
dtype that isn't used in the forward pass, and gets the gradients of products. The layer's own
values, and all other gradients, are JAX's.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from .._compat import names
from .._programs import bind_as, checkpointed, interpret, jaxprs_in, scan_of, scanned

Values = list[Any]


def call_with_sinks(
    fun: Callable[[Values, Values], Values], weights: Values, sinks: Values, inputs: Values
) -> Values:
    """`fun(weights, inputs)`. If a weight has a sink (not None), the sink gets the gradient of its
    products.
    """
    program = jax.make_jaxpr(fun)(weights, inputs)
    views = [_view(x, sink) for x, sink in zip(weights, sinks, strict=True)]
    return _values(interpret(program, [*views, *inputs], _call))


class View(eqx.Module):
    """A weight, or a part of one, and the same part of its sink."""

    value: Any
    sink: Any


def _is_view(x: Any) -> bool:
    return isinstance(x, View)


def _view(value: Any, sink: Any) -> Any:
    return View(value, sink) if sink is not None and _holds(sink.dtype, value.dtype) else value


def _holds(wide: Any, dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= wide.itemsize


def _values(args: Sequence[Any]) -> Values:
    return [x.value if _is_view(x) else x for x in args]


def _call(eqn: Any, args: Sequence[Any]) -> Sequence[Any]:
    """Calls an equation of the layer, some of whose arguments are views."""
    name = eqn.primitive.name
    if not any(map(_is_view, args)):
        return bind_as(eqn, args)
    if name in (names.JIT, names.CLOSED_CALL):
        return _inside(eqn)(args)
    if name == names.REMAT:
        return checkpointed(eqn, lambda *args: _inside(eqn)(args), args)
    if name == names.SCAN:
        return _scan(eqn, args)
    if name in names.PRODUCTS:
        return [_product(eqn, args)]
    values = _values(args)
    results = bind_as(eqn, values)
    if name in (names.CONVERT, names.CHECKPOINT_NAME):
        return [_view(results[0], args[0].sink)]
    if name in names.VIEWS and _is_view(args[0]):
        return list(map(_view, results, bind_as(eqn, [args[0].sink, *values[1:]])))
    return results


def _inside(eqn: Any) -> Callable[[Sequence[Any]], list[Any]]:
    (inner,) = jaxprs_in(eqn)
    return lambda args: interpret(inner, args, _call)


def _scan(eqn: Any, args: Sequence[Any]) -> Values:
    loop, run = scan_of(eqn, args), _inside(eqn)

    def turn(state: None, given: Values) -> tuple[None, Values, tuple[()]]:
        return state, _values(run(given)), ()

    _, results, _ = scanned(eqn, loop._replace(carry=_values(loop.carry)), turn, None)
    return results


def _product(eqn: Any, args: Sequence[Any]) -> Any:
    """A product that has the tangents of sinks, not of their weights."""

    # Not a primitive: the policy of a checkpoint must see the product.
    @jax.custom_jvp
    def call(args: Sequence[Any]) -> Any:
        return bind_as(eqn, _values(args))[0]

    @partial(call.defjvp, symbolic_zeros=True)
    def jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
        (args,), (moved,) = primals, tangents
        values = _values(args)
        result = bind_as(eqn, values)[0]
        sums = [
            _tangent(eqn, i, values, _is_view(args[i]), x)
            for i, x in enumerate(x.sink if _is_view(x) else x for x in moved)
            if not isinstance(x, SymbolicZero)
        ]
        return result, sum(sums[1:], sums[0]) if sums else jnp.zeros_like(result)

    return call(list(args))


def _tangent(eqn: Any, i: int, values: Values, wide: bool, moved: Any) -> Any:
    """The product, with a tangent in place of its operand number `i`."""

    def product(x: Any, *others: Any) -> Any:
        return bind_as(eqn, [*others[:i], x, *others[i:]])[0]

    others = [*values[:i], *values[i + 1 :]]
    if not wide:
        return product(moved, *others)
    return product_p.bind(moved, *others, program=jax.make_jaxpr(product)(values[i], *others))


# `program` with a first operand that is wider than the one that it takes. Its transpose multiplies
# the same narrow operands, and its result is wide.
product_p = Primitive("wide_product")


@product_p.def_abstract_eval
def _abstract(*avals: Any, program: Any) -> Any:
    return program.out_avals[0]


@product_p.def_impl
def _narrow(sink: Any, *others: Any, program: Any) -> Any:
    return _multiplied(program, sink.astype(program.in_avals[0].dtype), *others)


def _multiplied(program: Any, weight: Any, *others: Any) -> Any:
    return jaxpr_as_fun(program)(weight, *others)[0]


def _jvp(primals: Any, tangents: Any, *, program: Any) -> tuple[Any, Any]:
    (sink, *others), (of_sink, *of_others) = primals, map(ad.instantiate_zeros, tangents)
    result, moved = jax.jvp(partial(_narrow, sink, program=program), others, of_others)
    return result, moved + product_p.bind(of_sink, *others, program=program)


def _transpose(cotangent: Any, sink: Any, *others: Any, program: Any) -> Values:
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(sink.aval), *[None] * len(others)]

    def transposed(cotangent: Any, *others: Any) -> Any:
        def product(weight: Any) -> Any:
            return _multiplied(program, weight, *others)

        return jax.linear_transpose(product, program.in_avals[0])(cotangent)

    backward = jax.make_jaxpr(transposed)(cotangent, *others)
    wide = sink.aval.dtype
    (gradient,) = interpret(backward, [cotangent, *others], partial(_with_wide, wide))
    return [gradient.astype(wide), *[None] * len(others)]


def _batch(args: Sequence[Any], dims: Sequence[Any], *, program: Any) -> tuple[Any, int]:
    product = partial(_multiplied, program)
    weight = jax.eval_shape(lambda sink: sink.astype(program.in_avals[0].dtype), args[0])
    batched = jax.make_jaxpr(jax.vmap(product, in_axes=tuple(dims)))(weight, *args[1:])
    return product_p.bind(*args, program=batched), 0


ad.primitive_jvps[product_p] = _jvp
ad.primitive_transposes[product_p] = _transpose
batching.primitive_batchers[product_p] = _batch
mlir.register_lowering(product_p, mlir.lower_fun(_narrow, multiple_results=False))


def _with_wide(wide: Any, eqn: Any, args: Sequence[Any]) -> Sequence[Any]:
    """Calls an equation of a gradient. Products have wide results, which stay wide."""
    name = eqn.primitive.name
    if name == names.CONVERT and args[0].dtype == wide:
        return args
    if name not in names.PRODUCTS:
        return bind_as(eqn, args)

    def narrow(*args: Any) -> Any:
        return bind_as(eqn, args, **{names.PARAM_PREFERRED: wide})[0]

    def widened(*args: Any) -> Any:
        return narrow(*[x.astype(wide) if _holds(wide, x.dtype) else x for x in args])

    # XLA has no products with a wider result for CPUs. And JAX can't differentiate all of them.
    @jax.custom_jvp
    def call(*args: Any) -> Any:
        return jax.lax.platform_dependent(*args, cpu=widened, default=narrow)

    @call.defjvp
    def jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
        return call(*primals), jax.jvp(widened, primals, tangents)[1]

    dtypes = {x.dtype for x in args if _holds(wide, x.dtype)}
    return [call(*args) if len(dtypes) == 1 and wide not in dtypes else widened(*args)]

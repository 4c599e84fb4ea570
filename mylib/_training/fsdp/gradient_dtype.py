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

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import AbstractValue, ShapedArray
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from ..._core.compat import names
from ..._core.jaxprs import bind_as, checkpointed, interpret, jaxprs_in, scan_of, scanned
from ..._core.tree import Arrays
from .gather import Dims

Operands = Sequence["jax.Array | View"]


def call_with_sinks(
    fun: Callable[[Arrays, Arrays], Arrays],
    weights: Arrays,
    sinks: Sequence[jax.Array | None],
    inputs: Arrays,
) -> Arrays:
    """`fun(weights, inputs)`. If a weight has a sink (not None), the sink gets the gradient of its
    products.
    """
    program = jax.make_jaxpr(fun)(weights, inputs)
    views = map(_view, weights, sinks)
    return _values(interpret(program, [*views, *inputs], _call))


class View(eqx.Module):
    """A weight, or a part of one, and the same part of its sink."""

    value: jax.Array
    sink: jax.Array


def _view(value: jax.Array, sink: jax.Array | None) -> jax.Array | View:
    return View(value, sink) if sink is not None and _holds(sink.dtype, value.dtype) else value


def _holds(wide: jnp.dtype, dtype: jnp.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= wide.itemsize


def _values(args: Operands) -> Arrays:
    return [arg.value if isinstance(arg, View) else arg for arg in args]


def _call(eqn: JaxprEqn, args: Operands) -> Operands:
    """Calls an equation of the layer, some of whose arguments are views."""
    name = eqn.primitive.name
    if not any(isinstance(arg, View) for arg in args):
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
    view = args[0]
    if not isinstance(view, View):
        return results
    if name in (names.CONVERT, names.CHECKPOINT_NAME):
        return [_view(results[0], view.sink)]
    if name in names.VIEWS:
        return list(map(_view, results, bind_as(eqn, [view.sink, *values[1:]])))
    return results


def _inside(eqn: JaxprEqn) -> Callable[[Operands], Operands]:
    (inner,) = jaxprs_in(eqn)
    return lambda args: interpret(inner, args, _call)


def _scan(eqn: JaxprEqn, args: Operands) -> Arrays:
    loop, run = scan_of(eqn, args), _inside(eqn)

    def turn(state: None, given: Operands) -> tuple[None, Arrays, tuple[()]]:
        return state, _values(run(given)), ()

    _, results, _ = scanned(eqn, loop._replace(carry=_values(loop.carry)), turn, None)
    return results


def _product(eqn: JaxprEqn, args: Operands) -> jax.Array:
    """A product that has the tangents of sinks, not of their weights."""

    # Not a primitive: the policy of a checkpoint must see the product.
    @jax.custom_jvp
    def call(args: Operands) -> jax.Array:
        return bind_as(eqn, _values(args))[0]

    @partial(call.defjvp, symbolic_zeros=True)
    def jvp(primals: tuple[Operands], tangents: tuple[Operands]) -> tuple[jax.Array, jax.Array]:
        (args,), (moved,) = primals, tangents
        values = _values(args)
        result = bind_as(eqn, values)[0]
        of_operands = [each.sink if isinstance(each, View) else each for each in moved]
        sums = [
            _tangent(eqn, i, values, isinstance(args[i], View), tangent)
            for i, tangent in enumerate(of_operands)
            if not isinstance(tangent, SymbolicZero)
        ]
        return result, sum(sums[1:], sums[0]) if sums else jnp.zeros_like(result)

    return call(list(args))


def _tangent(eqn: JaxprEqn, i: int, values: Arrays, wide: bool, moved: jax.Array) -> jax.Array:
    """The product, with a tangent in place of its operand number `i`."""

    def product(operand: jax.Array, *others: jax.Array) -> jax.Array:
        return bind_as(eqn, [*others[:i], operand, *others[i:]])[0]

    others = [*values[:i], *values[i + 1 :]]
    if not wide:
        return product(moved, *others)
    return product_p.bind(moved, *others, program=jax.make_jaxpr(product)(values[i], *others))


# `program` with a first operand that is wider than the one that it takes. Its transpose multiplies
# the same narrow operands, and its result is wide.
product_p = Primitive("wide_product")


@product_p.def_abstract_eval
def _abstract(*avals: ShapedArray, program: ClosedJaxpr) -> AbstractValue:
    return program.out_avals[0]


@product_p.def_impl
def _narrow(sink: jax.Array, *others: jax.Array, program: ClosedJaxpr) -> jax.Array:
    return _multiplied(program, sink.astype(_of_weight(program).dtype), *others)


def _of_weight(program: ClosedJaxpr) -> ShapedArray:
    (aval, *_) = program.in_avals
    assert isinstance(aval, ShapedArray)
    return aval


def _multiplied(program: ClosedJaxpr, weight: jax.Array, *others: jax.Array) -> jax.Array:
    return jaxpr_as_fun(program)(weight, *others)[0]


def _jvp(primals: Arrays, tangents: Arrays, *, program: ClosedJaxpr) -> tuple[jax.Array, jax.Array]:
    (sink, *others), (of_sink, *of_others) = primals, map(ad.instantiate_zeros, tangents)
    result, moved = jax.jvp(partial(_narrow, sink, program=program), others, of_others)
    return result, moved + product_p.bind(of_sink, *others, program=program)


def _transpose(
    cotangent: jax.Array | ad.Zero,
    sink: ad.UndefinedPrimal,
    *others: jax.Array,
    program: ClosedJaxpr,
) -> Arrays:
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(sink.aval), *[None] * len(others)]

    def transposed(cotangent: jax.Array, *others: jax.Array) -> tuple[jax.Array]:
        def product(weight: jax.Array) -> jax.Array:
            return _multiplied(program, weight, *others)

        return jax.linear_transpose(product, _of_weight(program))(cotangent)

    backward = jax.make_jaxpr(transposed)(cotangent, *others)
    wide = sink.aval.dtype
    (gradient,) = interpret(backward, [cotangent, *others], partial(_with_wide, wide))
    return [gradient.astype(wide), *[None] * len(others)]


def _batch(args: Arrays, dims: Dims, *, program: ClosedJaxpr) -> tuple[jax.Array, int]:
    product = partial(_multiplied, program)
    weight = jax.eval_shape(lambda sink: sink.astype(_of_weight(program).dtype), args[0])
    batched = jax.make_jaxpr(jax.vmap(product, in_axes=tuple(dims)))(weight, *args[1:])
    return product_p.bind(*args, program=batched), 0


ad.primitive_jvps[product_p] = _jvp
ad.primitive_transposes[product_p] = _transpose
batching.primitive_batchers[product_p] = _batch
mlir.register_lowering(product_p, mlir.lower_fun(_narrow, multiple_results=False))


def _with_wide(wide: jnp.dtype, eqn: JaxprEqn, args: Arrays) -> Arrays:
    """Calls an equation of a gradient. Products have wide results, which stay wide."""
    name = eqn.primitive.name
    if name == names.CONVERT and args[0].dtype == wide:
        return args
    if name not in names.PRODUCTS:
        return bind_as(eqn, args)

    def narrow(*args: jax.Array) -> jax.Array:
        return bind_as(eqn, args, **{names.PARAM_PREFERRED: wide})[0]

    def widened(*args: jax.Array) -> jax.Array:
        return narrow(*[arg.astype(wide) if _holds(wide, arg.dtype) else arg for arg in args])

    # XLA has no products with a wider result for CPUs. And JAX can't differentiate all of them.
    @jax.custom_jvp
    def call(*args: jax.Array) -> jax.Array:
        return jax.lax.platform_dependent(*args, cpu=widened, default=narrow)

    @call.defjvp
    def jvp(primals: Arrays, tangents: Arrays) -> tuple[jax.Array, jax.Array]:
        return call(*primals), jax.jvp(widened, primals, tangents)[1]

    dtypes = {arg.dtype for arg in args if _holds(wide, arg.dtype)}
    return [call(*args) if len(dtypes) == 1 and wide not in dtypes else widened(*args)]

"""Gradients of a layer's weights in a wider dtype than the layer computes in, before they are
summed over devices.

The product that computes a gradient returns each device's part of a sum, in the dtype of its
operands, and XLA sums the parts in that dtype. Casting the sum would be too late. So a layer is
traced, and run with all operations on weights changed: they compute gradients in the wider dtype.
Because JAX requires a cotangent to have the dtype of its primal, each weight has a *sink*: a copy
in the wider dtype that isn't used in the forward pass, and gets the gradient.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from .._compat import names, opened, scan_sizes
from .._programs import bind_as, in_place_of, jaxprs_in

Values = list[Any]
# In place of a sink, for values that depend on nothing with a gradient.
_CONSTANT = object()


def call_with_sinks(
    fun: Callable[[Values, Values], Values], weights: Values, sinks: Values, given: Values
) -> Values:
    """`fun(weights, given)`. If a weight has a sink (not None), the sink gets its gradient."""
    program = jax.make_jaxpr(fun)(weights, given)
    return _run(program, [*weights, *given], [*sinks, *[None] * len(given)])[0]


def _run(program: Any, args: Sequence[Any], sinks: Sequence[Any]) -> tuple[Values, Values]:
    """The results of a program, and the sinks of results that depend on weights only."""
    jaxpr, constants = opened(program), getattr(program, "consts", ())
    values: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
    values.update(zip(jaxpr.constvars, constants, strict=True))
    sink_of = dict(zip(jaxpr.invars, sinks, strict=True))
    for x, value in zip(jaxpr.constvars, constants, strict=True):
        sink_of[x] = None if isinstance(value, Tracer) else _CONSTANT

    def read(x: Any) -> tuple[Any, Any]:
        return (x.val, _CONSTANT) if hasattr(x, "val") else (values[x], sink_of[x])

    for eqn in jaxpr.eqns:
        pairs = [read(x) for x in eqn.invars]
        args, sinks = [x for x, _ in pairs], [sink for _, sink in pairs]
        with in_place_of(eqn):
            if _has_sink(sinks):
                made, made_sinks = _call(eqn, args, sinks)
            else:
                made = bind_as(eqn, args)
                made_sinks = [None if None in sinks else _CONSTANT] * len(made)
        values.update(zip(eqn.outvars, made, strict=True))
        sink_of.update(zip(eqn.outvars, made_sinks, strict=True))
    pairs = [read(x) for x in jaxpr.outvars]
    return [x for x, _ in pairs], [sink for _, sink in pairs]


def _call(eqn: Any, args: Values, sinks: Values) -> tuple[Values, Values]:
    name = eqn.primitive.name
    if name in (names.JIT, names.CLOSED_CALL):
        (inner,) = jaxprs_in(eqn)
        return _run(inner, args, sinks)
    alone = all(sink is not None for x, sink in zip(args, sinks, strict=True) if _is_float(x))
    sinks = [None if sink is _CONSTANT else sink for sink in sinks]
    data = [None] * len(eqn.outvars)
    if name == names.REMAT:
        return _checkpoint(eqn, args, sinks), data
    if name == names.SCAN:
        return _scan(eqn, args, sinks), data
    if alone:
        return _of_weights_alone(eqn, args, sinks)
    if jaxprs_in(eqn):
        raise TypeError(
            f"fully_shard: reduce_dtype= is not supported for layers that pass weights and other "
            f"values to a {name}: what it computes is unknown. Leave out reduce_dtype=, or the "
            "class of this layer"
        )
    return _mixed(eqn, args, sinks), data


def _checkpoint(eqn: Any, args: Values, sinks: Values) -> Values:
    inner = eqn.params[names.PARAM_JAXPR]
    options = {key: eqn.params[key] for key in (names.PARAM_POLICY, names.PARAM_PREVENT_CSE)}
    run = jax.checkpoint(lambda args, sinks: _run(inner, args, sinks)[0], **options)
    return run(args, sinks)


def _scan(eqn: Any, args: Values, sinks: Values) -> Values:
    constants, carried = scan_sizes(eqn)
    params, first = eqn.params, constants + carried

    def turn(carry: Any, xs: Any) -> Any:
        parts, part_sinks = xs
        made, _ = _run(
            params[names.PARAM_JAXPR],
            [*args[:constants], *carry, *parts],
            [*sinks[:constants], *[None] * carried, *part_sinks],
        )
        return made[:carried], made[carried:]

    # The sink of a carried value would have to be carried, too.
    if any(sink is not None for sink in sinks[constants:first]):
        raise TypeError(
            "fully_shard: reduce_dtype= is not supported for layers in which a weight is the "
            "initial carry of a scan. Leave out reduce_dtype=, or the class of this layer"
        )
    carry, ys = jax.lax.scan(
        turn,
        args[constants:first],
        (args[first:], sinks[first:]),
        length=params[names.PARAM_LENGTH],
        reverse=params[names.PARAM_REVERSE],
        unroll=params[names.PARAM_UNROLL],
    )
    return [*carry, *ys]


def _of_weights_alone(eqn: Any, args: Values, sinks: Values) -> tuple[Values, Values]:
    """An operation on weights only. Its result counts as a weight; the same operation on the sinks
    gives the result's sink.
    """
    made = bind_as(eqn, args)
    wide = next(sink.dtype for sink in sinks if sink is not None)
    if eqn.primitive.name == names.CONVERT:
        return made, sinks if _is_float(made[0]) else [_CONSTANT]
    # An inner program only takes the dtypes that it was traced for.
    given = [
        x if sink is None else sink.astype(x.dtype) if jaxprs_in(eqn) else sink
        for x, sink in zip(args, sinks, strict=True)
    ]
    if not jaxprs_in(eqn):
        given = [x.astype(wide) if _is_float(x) else x for x in given]
    changed = {names.PARAM_PREFERRED: wide} if eqn.primitive.name in names.PRODUCTS else {}
    made_sinks = bind_as(eqn, given, **changed)
    return made, [x.astype(wide) if _is_float(x) else _CONSTANT for x in made_sinks]


def _mixed(eqn: Any, args: Values, sinks: Values) -> Values:
    """An operation on weights and other values."""
    index = [i for i, sink in enumerate(sinks) if sink is not None]
    others = [x for i, x in enumerate(args) if i not in index]

    def bind(weights: Values, others: Values) -> Values:
        remaining, given = iter(others), iter(weights)
        return bind_as(
            eqn, [next(given) if i in index else next(remaining) for i in range(len(args))]
        )

    @jax.custom_jvp
    def call(weights: Values, others: Values, sinks: Values) -> Values:
        del sinks
        return bind(weights, others)

    @call.defjvp
    def jvp(primals: Any, tangents: Any) -> tuple[Values, Values]:
        (weights, others, _), (_, of_others, of_sinks) = primals, tangents
        made, moved = jax.jvp(lambda xs: bind(weights, xs), (others,), (of_others,))
        widely = _product if eqn.primitive.name in names.PRODUCTS else _elementwise
        more = widely(bind, weights, others, of_sinks)
        return made, [x + y if _is_float(x) else x for x, y in zip(moved, more, strict=True)]

    return call([args[i] for i in index], others, [sinks[i] for i in index])


Bind = Callable[[Values, Values], Values]


def _elementwise(bind: Bind, weights: Values, others: Values, sinks: Values) -> Values:
    # XLA does this in one fusion, so only the result is written in the wide dtype.
    wide = sinks[0].dtype
    wide_weights, widened = (
        [x.astype(wide) if _is_float(x) else x for x in xs] for xs in (weights, others)
    )
    _, moved = jax.jvp(lambda xs: bind(xs, widened), (wide_weights,), (sinks,))
    types = jax.eval_shape(bind, weights, others)
    return [x.astype(t.dtype) if _is_float(x) else x for x, t in zip(moved, types, strict=True)]


def _product(bind: Bind, weights: Values, others: Values, sinks: Values) -> Values:
    """The product of a sink and the rest."""
    program = jax.make_jaxpr(bind)(weights, others)
    return [product_p.bind(*sinks, *others, program=program)]


# Linear in its first operand, which is wider than the one that `program` takes. Its transpose is a
# product of narrow operands with a wide result.
product_p = Primitive("wide_product")


@product_p.def_abstract_eval
def _abstract(*avals: Any, program: Any) -> Any:
    del avals
    return program.out_avals[0]


def _lower(sink: Any, *others: Any, program: Any) -> Any:
    weight = sink.astype(program.in_avals[0].dtype)
    return jaxpr_as_fun(program)(weight, *others)[0]


def _transpose(cotangent: Any, sink: Any, *others: Any, program: Any) -> Values:
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(sink.aval), *[None] * len(others)]

    def transposed(cotangent: Any, *others: Any) -> Any:
        def product(weight: Any) -> Any:
            return jaxpr_as_fun(program)(weight, *others)[0]

        return jax.linear_transpose(product, program.in_avals[0])(cotangent)[0]

    backward = jax.make_jaxpr(transposed)(cotangent, *others)
    return [_widened(backward, [cotangent, *others], sink.aval.dtype), *[None] * len(others)]


def _widened(program: Any, args: Values, wide: Any) -> Any:
    """The result of a program, with wide results of its products."""
    jaxpr = opened(program)
    values: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
    values.update(zip(jaxpr.constvars, program.consts, strict=True))
    for eqn in jaxpr.eqns:
        args = [x.val if hasattr(x, "val") else values[x] for x in eqn.invars]
        if eqn.primitive.name == names.CONVERT and args[0].dtype == wide:
            made = args
        else:
            product = eqn.primitive.name in names.PRODUCTS
            made = bind_as(eqn, args, **({names.PARAM_PREFERRED: wide} if product else {}))
        values.update(zip(eqn.outvars, made, strict=True))
    (result,) = jaxpr.outvars
    return values[result].astype(wide)


def _batch(args: Sequence[Any], dims: Sequence[Any], *, program: Any) -> tuple[Any, int]:
    def product(weight: Any, *others: Any) -> Any:
        return jaxpr_as_fun(program)(weight, *others)

    weight = jax.ShapeDtypeStruct(args[0].shape, program.in_avals[0].dtype)
    batched = jax.make_jaxpr(jax.vmap(product, in_axes=tuple(dims)))(weight, *args[1:])
    return product_p.bind(*args, program=batched), 0


ad.primitive_transposes[product_p] = _transpose
batching.primitive_batchers[product_p] = _batch
mlir.register_lowering(product_p, mlir.lower_fun(_lower, multiple_results=False))


def _has_sink(sinks: Values) -> bool:
    return any(sink is not None and sink is not _CONSTANT for sink in sinks)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)

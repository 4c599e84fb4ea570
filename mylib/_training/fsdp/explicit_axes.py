"""Layers on Explicit axes.

A layer is traced with the types that its author sees: `jax.typeof(x).sharding`, `out_sharding=` and
`reshard` work as without `fully_shard`. But these types would also replicate the gradient of each
weight, and TPUs would all-reduce it. So the traced program is run on Auto axes, where the compiler
can reduce-scatter: what the author asked for (`out_sharding=`, `reshard`) becomes a constraint, all
else is left to the compiler.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray, Tracer
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import JaxprEqn
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..._core.compat import (
    Program,
    array_like,
    closed_or_open,
    names,
    opened,
    rule_of_custom_jvp,
    rules_of_custom_vjp,
)
from ..._core.jaxprs import at_shardings, bind_as, checkpointed, interpret, jaxprs_in
from ..._core.tree import Arrays
from ..._moving.transfer import constrain_auto_p
from .gather import Route, gather_weights
from .prefetch import Run, layer_tangent_p

Values = Sequence[jax.Array]
Types = Sequence[ShapedArray]
# Tangents or cotangents.
Moving = Sequence[jax.Array | SymbolicZero]


def as_written(
    run: Run, weights: Arrays, inputs: Arrays, route: Route
) -> tuple[Run, Arrays, Types]:
    """Traces `run(gathered weights, inputs)` with the types that its author sees. Returns it for
    Auto axes; the inputs, preceded by the arrays that it closes over; and the types of its results.
    """
    gathered = jax.make_jaxpr(lambda arrays: gather_weights(arrays, route)[0])(weights).out_avals
    program = jax.make_jaxpr(run)([_struct(aval) for aval in gathered], inputs)
    count = len(program.consts)

    def untyped(weights: Arrays, inputs: Arrays) -> Arrays:
        return _run_on_auto_axes(program, [*weights, *inputs[count:]], inputs[:count])

    return untyped, [*program.consts, *inputs], program.out_avals


def on_auto_axes(run: Run, types: Types) -> Run:
    """`run` with Auto axes in place of Explicit ones. `types` are those of its results."""
    specs = [aval.sharding.spec for aval in types]
    # Compiled, since JAX can't differentiate eager operations on another type of axes.
    return jax.jit(jax.sharding.auto_axes(run, out_sharding=specs))


def _struct(aval: Any, typed: bool = True) -> jax.ShapeDtypeStruct:
    """An abstract array with the type of a value in a program, or without its sharding."""
    weak = getattr(aval, "weak_type", False)
    sharding = aval.sharding if typed else None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=weak)


def _run_on_auto_axes(program: Program, args: Values, constants: Values | None = None) -> Arrays:
    """Runs a program that was traced on Explicit axes where these axes are Auto."""
    mesh = jax.sharding.get_abstract_mesh()

    def call(eqn: JaxprEqn, args: Values) -> Arrays:
        # Not the mesh that the equation was traced on.
        with jax.sharding.use_abstract_mesh(mesh):
            # Literals of a program may be arrays, too.
            return _call(eqn, list(map(_untyped_constant, args)))

    return interpret(program, args, call, constants)


def _call(eqn: JaxprEqn, args: Values) -> Arrays:
    name, params = eqn.primitive.name, eqn.params
    if name in _CALLS:
        return _CALLS[name](eqn, args)
    if name == names.RESHARD:
        return [_constrained(args[0], params[names.PARAM_DST_SHARDING])]
    if name in names.KERNELS:
        return bind_as(eqn, args)
    results = bind_as(eqn, args, **{key: _untyped(param) for key, param in params.items()})
    if name == names.DEVICE_PUT:
        return at_shardings(results, params[names.PARAM_DEVICES], _constrained)
    for key in (names.PARAM_SHARDING, names.PARAM_OUT_SHARDING):
        results = at_shardings(results, [params.get(key)] * len(results), _constrained)
    return results


def _constrained(array: jax.Array, sharding: object) -> jax.Array:
    """As its author asked for. A partial sum is a sum: the compiler decides where to add."""
    if not isinstance(sharding, NamedSharding):
        return array
    if sharding.spec.unreduced or not sharding.mesh.explicit_axes:
        return array
    return _at(array, sharding)


def _at(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    entries: Sequence[object] = sharding.spec.partitions
    if sharding.mesh.auto_axes:
        # A request for axes of one type leaves those of the other type as they are.
        entries = [PartitionSpec.UNCONSTRAINED if entry is None else entry for entry in entries]
    mesh, spec = jax.sharding.get_abstract_mesh(), PartitionSpec(*entries)
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec))


def _untyped(param: Any) -> Any:
    """A parameter of an equation, without Explicit axes."""
    if isinstance(param, NamedSharding):
        # The sharding that an operation asks for becomes a constraint on its result.
        return None if param.mesh.explicit_axes else param
    if isinstance(param, ShapedArray):
        return param.update(sharding=jax.typeof(_struct(param, typed=False)).sharding)
    if hasattr(param, "eqns") or hasattr(param, "jaxpr"):
        return _untyped_program(param)
    if isinstance(param, list) or type(param) is tuple:
        return type(param)(_untyped(x) for x in param)
    if isinstance(param, tuple):  # with names
        return type(param)(*map(_untyped, param))
    return param


def _untyped_program(program: Program) -> Program:
    like = [_struct(var.aval, typed=False) for var in opened(program).invars]
    traced = jax.make_jaxpr(lambda *args: _run_on_auto_axes(program, args))(*like)
    return closed_or_open(traced, program)


def _untyped_constant(value: jax.Array) -> jax.Array:
    """A captured array, as one over a mesh of Auto axes: the same data."""
    sharding = getattr(value, "sharding", None)
    if isinstance(value, Tracer) or not isinstance(sharding, NamedSharding):
        return value
    if not sharding.mesh.explicit_axes:
        return value
    mesh = sharding.mesh.update(axis_types=(AxisType.Auto,) * len(sharding.mesh.axis_names))
    on_auto = NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    return array_like(value, on_auto)


def _inlined(eqn: JaxprEqn, args: Values) -> Arrays:
    (inner,) = jaxprs_in(eqn)
    return _run_on_auto_axes(inner, args)


def _jit(eqn: JaxprEqn, args: Values) -> Arrays:
    params = eqn.params
    args = at_shardings(args, params[names.PARAM_IN_SHARDINGS], _constrained)

    def run(*args: jax.Array) -> Arrays:
        return _run_on_auto_axes(params[names.PARAM_JAXPR], args)

    run.__name__ = params[names.PARAM_NAME]
    results = jax.jit(run, inline=params[names.PARAM_INLINE])(*args)
    return at_shardings(results, params[names.PARAM_OUT_SHARDINGS], _constrained)


def _constraint(eqn: JaxprEqn, args: Values) -> Arrays:
    sharding = eqn.params[names.PARAM_SHARDING]
    return [_at(args[0], sharding)] if isinstance(sharding, NamedSharding) else bind_as(eqn, args)


def _custom_jvp(eqn: JaxprEqn, args: Values) -> Arrays:
    types = _types(eqn.invars)
    run = jax.custom_jvp(lambda *args: _inlined(eqn, args))

    def jvp(primals: Values, tangents: Moving) -> tuple[Arrays, Arrays]:
        like = [*types, *(of.to_tangent_aval() for of in types)]
        outputs, _ = _traced_again(rule_of_custom_jvp(eqn), eqn, like, [*primals, *tangents])
        half = len(outputs) // 2
        return outputs[:half], outputs[half:]

    run.defjvp(jvp, symbolic_zeros=eqn.params[names.PARAM_SYMBOLIC_ZEROS])
    return run(*args)


def _custom_vjp(eqn: JaxprEqn, args: Values) -> Arrays:
    types, results = _types(eqn.invars), _types(eqn.outvars)
    forward, backward = rules_of_custom_vjp(eqn)
    symbolic = eqn.params[names.PARAM_SYMBOLIC_ZEROS]
    run = jax.custom_vjp(lambda *args: _inlined(eqn, args))
    saved: list[ShapedArray] = []

    def fwd(*args: Any) -> tuple[Arrays, Arrays]:
        perturbed = [arg.perturbed if symbolic else True for arg in args]
        values = [arg.value for arg in args] if symbolic else args
        outputs, avals = _traced_again(partial(forward, perturbed), eqn, types, values)
        saved[:] = avals[len(results) :]
        return outputs[: len(results)], outputs[len(results) :]

    def bwd(residuals: Values, cotangents: Moving) -> tuple[jax.Array | None, ...]:
        like = [*saved, *(of.to_tangent_aval() for of in results)]
        return tuple(_traced_again(backward, eqn, like, [*residuals, *cotangents])[0])

    run.defvjp(fwd, bwd, symbolic_zeros=symbolic)
    return run(*args)


def _types(variables: Sequence[Any]) -> list[ShapedArray]:
    return [var.aval for var in variables]


def _traced_again(
    fun: Callable[..., Arrays], eqn: JaxprEqn, types: Types, args: Moving
) -> tuple[Arrays, Types]:
    """The results of a rule that is traced with the types that its author sees, as is the layer;
    and their types. A result may be None. Tangents and cotangents may be symbolic zeros.
    """
    mesh = jax.sharding.get_abstract_mesh()
    moving = {i: arg for i, arg in enumerate(args) if not isinstance(arg, SymbolicZero)}
    zeros = {i: SymbolicZero(types[i]) for i in range(len(args)) if i not in moving}
    # Residuals may be Python numbers.
    index = [i for i, arg in moving.items() if jax.typeof(arg).dtype != jax.dtypes.float0]
    are_values: list[bool] = []

    def traced(*values: jax.Array) -> Arrays:
        replaced = moving | zeros | dict(zip(index, values, strict=True))
        outputs = fun(*[replaced[i] for i in range(len(args))])
        are_values[:] = [output is not None for output in outputs]
        return [_instantiated(output) for output in outputs if output is not None]

    with eqn.ctx.manager:
        program = jax.make_jaxpr(traced)(*[_struct(types[i]) for i in index])
    with jax.sharding.use_abstract_mesh(mesh):
        outputs = iter(_run_on_auto_axes(program, [moving[i] for i in index]))
    return [next(outputs) if is_value else None for is_value in are_values], program.out_avals


def _instantiated(output: jax.Array | SymbolicZero) -> jax.Array:
    if not isinstance(output, SymbolicZero):
        return output
    like = output.aval
    assert isinstance(like, ShapedArray)
    return jnp.zeros(like.shape, like.dtype)


def _prefetched(eqn: JaxprEqn, args: Values) -> Arrays:
    """A prefetched layer that is called by another layer."""
    (layer,) = eqn.params.values()
    program, after = map(_untyped_program, (layer.program, layer.after))
    return layer_tangent_p.bind(*args, layer=replace(layer, program=program, after=after))


def _typed(eqn: JaxprEqn, args: Values) -> Arrays:
    """Calls an operation that knows the types of its results, on Explicit axes as it was traced."""
    mesh, shardings = jax.sharding.get_abstract_mesh(), [of.sharding for of in _types(eqn.invars)]
    with eqn.ctx.manager:
        typed_args = [
            # A constant of the program may have come here as an argument of a nested one.
            jax.sharding.reshard(arg, PartitionSpec() if to.mesh.empty else to)
            if not jax.typeof(arg).sharding.mesh.empty
            else arg
            for arg, to in zip(args, shardings, strict=True)
        ]
        results = bind_as(eqn, typed_args)
    with jax.sharding.use_abstract_mesh(mesh):
        return [jax.sharding.reshard(result, PartitionSpec()) for result in results]


def _shard_map(eqn: JaxprEqn, args: Values) -> Arrays:
    params = eqn.params
    run = jax.shard_map(
        lambda *args: _run_on_auto_axes(params[names.PARAM_JAXPR], args),
        in_specs=tuple(params[names.PARAM_IN_SPECS]),
        out_specs=list(params[names.PARAM_OUT_SPECS]),
        axis_names=set(params[names.PARAM_MANUAL_AXES]),
        check_vma=params[names.PARAM_CHECK_VMA],
    )
    return run(*args)


_CALLS: dict[str, Callable[[JaxprEqn, Values], Arrays]] = {
    names.CLOSED_CALL: _inlined,
    names.CONSTRAINT: _constraint,
    constrain_auto_p.name: _constraint,
    names.CUSTOM_JVP_CALL: _custom_jvp,
    names.CUSTOM_VJP_CALL: _custom_vjp,
    names.HI_CALL: _typed,
    names.JIT: _jit,
    names.REMAT: lambda eqn, args: checkpointed(eqn, lambda *args: _inlined(eqn, args), args),
    names.SHARD_MAP: _shard_map,
    layer_tangent_p.name: _prefetched,
}

"""Error checks as values: a failed `equinox.error_if` becomes one of the program's results, and is
raised on the host when the program is done.

Equinox raises in a callback inside a branch. With several devices only one makes the callback; the
others wait for it in a collective until JAX aborts the process.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import AbstractValue, ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from ..._core import contexts
from ..._core.compat import (
    Program,
    Replacement,
    closed_or_open,
    devices_of_lowering,
    error_check_replaced,
    error_with,
    function_of_equinox,
    hide_from_breakpoints,
    jit,
    names,
    opened,
    unspecified,
    value_under,
    without_dead_code,
)
from ..._core.jaxprs import (
    bind_as,
    in_place_of,
    interpret,
    jaxprs_in,
    line_of,
    scan_of,
    scanned,
    with_equations,
    with_jaxprs,
)
from ..._core.placement import axes_of_type, cast, is_handle, manual_axes, union
from ..._core.tree import Arrays

Values = Sequence[jax.Array]
# The lines that called Equinox, and ids of functions among them.
Stack = Sequence[bytes | str]

# What becomes of error checks in the program that is being traced, lowered or run here. They are
# - "unknown": the first one that is met in lowering raises `CheckFound`;
# - "returned": those that can be are values by now;
# - "raised" by a callback of Equinox;
# - None, if no program made by `filter_jit` is called here.
# JAX doesn't use one trace for several of these, so that a function compiled by itself and also
# called in such a program is traced for each.
Errors = Literal["unknown", "returned", "raised"]


def calling(errors: Errors) -> AbstractContextManager[None]:
    """Surrounds a call of a program, with what becomes of its error checks."""
    # Each call needs this, and JAX's own object takes a fraction of the time of a generator.
    return contexts.calling(errors)


def is_called() -> bool:
    """Whether a program made by `filter_jit` is called here."""
    return contexts.calling.value is not None


def is_called_eagerly() -> bool:
    """Whether its results are no values of a surrounding program or transformation."""
    return contexts.calling.value in ("unknown", "returned")


class CheckFound(Exception):
    """A program has an error check that isn't a value yet."""


check_p = Primitive("error_check")
check_p.multiple_results = True


@dataclass(eq=False)
class Check:
    """One call of `equinox.error_if` or `branched_error_if`: its messages and its stack."""

    messages: Sequence[str]
    stack: Stack

    @property
    def line(self) -> str:
        return next((piece for piece in self.stack if isinstance(piece, str)), "")


def checks_replaced() -> Replacement:
    """A context in which `equinox.error_if` is a `Check`, in programs made by `filter_jit`."""
    return error_check_replaced(_or_check)


def _or_check(original: Callable[..., object]) -> Callable[..., object]:
    return lambda *args, **kwargs: (_error if is_called() else original)(*args, **kwargs)


def _error(
    x: PyTree[Any],
    pred: jax.Array,
    index: jax.Array,
    *,
    msgs: Sequence[str],
    on_error: str,
    stack: Stack,
) -> PyTree[Any]:
    """In place of Equinox's function of the same name."""
    leaves, treedef = jtu.tree_flatten(x)
    if on_error != "raise":
        # With a breakpoint Equinox shows the innermost frame that isn't JAX's, its own or here.
        hide_from_breakpoints(__file__)
        original = checks_replaced().original
        return original(x, pred, index, msgs=msgs, on_error=on_error, stack=stack)
    check = Check(msgs, stack)
    out = check_p.bind(jnp.asarray(pred), jnp.asarray(index), *leaves, check=check)
    return jtu.tree_unflatten(treedef, out)


@check_p.def_impl
def _raise_as_equinox(
    pred: jax.Array, index: jax.Array, *arrays: jax.Array, check: Check
) -> Arrays:
    options: Any = {"msgs": check.messages, "on_error": "raise", "stack": check.stack}
    return checks_replaced().original(list(arrays), pred, index, **options)


@check_p.def_abstract_eval
def _abstract(
    pred: ShapedArray, index: ShapedArray, *avals: ShapedArray, check: Check
) -> list[ShapedArray]:
    return list(avals)


def _pass_on(args: Values, attached: Sequence[Any], *, check: Check) -> tuple[Arrays, list[Any]]:
    """The arrays keep their tangents, or their batch dimensions. Equinox has already reduced the
    first two over a batch.
    """
    return check_p.bind(*args, check=check), list(attached[2:])


def _lower(ctx: mlir.LoweringRuleContext, *args: object, check: Check) -> Any:
    """Lowers a check that isn't a value to Equinox's callback."""
    if contexts.calling.value == "unknown":
        raise CheckFound
    if union(map(axes_of_type, ctx.avals_in)):
        raise ValueError(
            "equinox.error_if is called with arrays that differ between the devices of a "
            "shard_map. That needs mylib.filter_jit around the program, instead of jax.jit or "
            f"equinox.filter_jit\n{check.line}"
        )
    if contexts.calling.value == "returned" and devices_of_lowering(ctx) > 1:
        # All that can be values are so by now.
        raise ValueError(
            "equinox.error_if is called in a call that mylib can't analyse, whose errors can't be "
            f"returned. A program on several devices would wait forever\n{check.line}"
        )
    return mlir.lower_fun(_raise_as_equinox, multiple_results=True)(ctx, *args, check=check)


ad.primitive_jvps[check_p] = _pass_on
batching.primitive_batchers[check_p] = _pass_on
mlir.register_lowering(check_p, _lower)


def without_checks(program: Program) -> Program:
    """A jaxpr that doesn't check again what has been checked."""

    def passed(eqn: JaxprEqn) -> JaxprEqn:
        if eqn.primitive is check_p:
            arrays = eqn.invars[2:]
            return eqn.replace(primitive=jax.lax.optimization_barrier_p, invars=arrays, params={})
        return eqn.replace(params=with_jaxprs(eqn, without_checks))

    return with_equations(program, passed)


@dataclass(eq=False)
class Checks:
    """The checks of a program, and their messages in one list."""

    messages: list[tuple[str, Check]] = field(default_factory=list)
    # The position of each check's first message.
    first: dict[Check, int] = field(default_factory=dict)
    # Whether there are other checks, raised by Equinox's callback.
    has_callbacks: bool = False

    def number_of(self, check: Check) -> int:
        """The number of a check's first message."""
        if check not in self.first:
            self.first[check] = len(self.messages)
            self.messages += [(message, check) for message in check.messages]
        return self.first[check]

    def raise_if(self, failed: jax.Array, arrays: Values, jit_id: bytes) -> None:
        """Raises Equinox's error if `failed`, which a program has returned with these arrays, is a
        message's number.
        """
        if self.has_callbacks:
            jax.block_until_ready(list(map(value_under, arrays)))
        if is_handle(failed):
            return  # the program runs in other processes, which raise
        # An eager `vmap` may have batched it.
        number = int(np.max(np.asarray(value_under(failed))))
        if number >= 0:
            message, check = self.messages[number]
            raise error_with(message, check.stack, jit_id)


def has_check(program: Program) -> bool:
    """Whether a jaxpr has a check that isn't hidden in a primitive."""
    return _Rewriting(is_transformed=True).has_check(program)


def with_checks_as_values(
    program: ClosedJaxpr, arrays: Values, transformed: bool
) -> tuple[Arrays, jax.Array | None, Checks | None]:
    """Calls a jaxpr. Returns its results, the number of a message (or -1), and the checks; None for
    both if there is no check in it.

    Primitives of Equinox (such as `lineax.linear_solve`) are inlined, unless the program is
    `transformed` from outside, for which the primitive has rules of its own.
    """
    rewriting = _Rewriting(transformed)
    if not rewriting.has_check(program):
        # Not a call that is inlined: until JAX 0.11 its operations get the line of the call, and
        # from 0.12 on it stays a call until it is lowered.
        return interpret(program, arrays), None, None
    # Equinox drops checks whose result isn't used.
    return *rewriting.run(without_dead_code(program), arrays), rewriting.checks


class _Rewriting:
    """Calls jaxprs so that each returns one more value: the number of the first message to raise,
    or -1.
    """

    def __init__(self, is_transformed: bool) -> None:
        self.checks = Checks()
        self._is_transformed = is_transformed
        # By jaxpr or equation, which JAX compares by identity. What is called twice is rewritten,
        # and so compiled, once.
        self.has_check = functools.cache(self._has_check)
        self._is_concerned = functools.cache(self._calls_check)
        self._rewritten = functools.cache(self._rewrite)

    def _has_check(self, program: Program) -> bool:
        return any(map(self._is_concerned, opened(program).eqns))

    def _calls_check(self, eqn: JaxprEqn) -> bool:
        return eqn.primitive is check_p or any(map(self.has_check, self._jaxprs_in(eqn)))

    def _jaxprs_in(self, eqn: JaxprEqn) -> Sequence[Program]:
        function = self._function_of(eqn)
        if function is None:
            return jaxprs_in(eqn)
        with in_place_of(eqn):
            return [_traced(function, _types(eqn))]

    def _function_of(self, eqn: JaxprEqn) -> Callable[..., Arrays] | None:
        return None if self._is_transformed else function_of_equinox(eqn)

    def run(self, program: Program, args: Values) -> tuple[Arrays, jax.Array]:
        numbers = [_none()]

        def call(eqn: JaxprEqn, args: Values) -> Arrays:
            if not self._is_concerned(eqn):
                return bind_as(eqn, args)
            *results, failed = self._call(eqn, list(args))
            numbers.append(failed)
            return results

        values = interpret(program, args, call)
        # Not in the place of an equation, which may be on other axes than the program.
        return values, functools.reduce(_first, map(_on_mesh_in_force, numbers))

    def _call(self, eqn: JaxprEqn, args: Values) -> Values:
        function = self._function_of(eqn)
        if function is not None:
            # Traced again, because its values have other types inside `shard_map`.
            return self._function(_traced(function, list(map(jax.typeof, args))))(*args)
        if eqn.primitive.name in _CALLS:
            return _CALLS[eqn.primitive.name](self, eqn, args)
        return self._unreturned(eqn, args)

    def _unreturned(self, eqn: JaxprEqn, args: Values) -> Arrays:
        """A call that can't return the errors of its checks: on one device Equinox raises them."""
        # JAX calls rules of its own later, when nothing can make values of their checks.
        if self._is_transformed and jax.device_count() > 1:
            raise ValueError(
                f"equinox.error_if is called in a function with rules of its own, a "
                f"{eqn.primitive.name} at {line_of(eqn)}, and a function of filter_jit around it "
                "is transformed. Over several devices its errors can't be returned. Put filter_jit "
                "around the transformation: mylib.filter_jit(jax.grad(f)) in place of "
                "jax.grad(mylib.filter_jit(f))"
            )
        self.checks.has_callbacks = True
        return [*bind_as(eqn, args), _none()]

    def _function(self, program: Program) -> Callable[..., Arrays]:
        def run(*args: jax.Array) -> Arrays:
            values, failed = self.run(program, args)
            return [*values, failed]

        return run

    def _rewrite(self, program: Program) -> Program:
        rewritten = _traced(self._function(program), _types(opened(program)))
        return closed_or_open(rewritten, program)

    def check(self, eqn: JaxprEqn, args: Values) -> Arrays:
        pred, index, *arrays = args
        (check,) = eqn.params.values()
        last = np.int32(len(check.messages) - 1)
        chosen = jax.lax.clamp(np.int32(0), jnp.asarray(index, jnp.int32), last)
        number = cast(self.checks.number_of(check) + chosen, manual_axes())
        return [*arrays, jax.lax.select(cast(pred, manual_axes()), number, _none())]

    def rewritten(self, eqn: JaxprEqn, args: Values) -> Arrays:
        return bind_as(eqn, args, **with_jaxprs(eqn, self._rewritten))

    def jit(self, eqn: JaxprEqn, args: Values) -> Arrays:
        params = with_jaxprs(eqn, self._rewritten)
        params[names.PARAM_OUT_SHARDINGS] += (unspecified(),)
        params[names.PARAM_OUT_LAYOUTS] += (None,)
        return bind_as(eqn, args, **params)

    def inlined(self, eqn: JaxprEqn, args: Values) -> Arrays:
        (inner,) = jaxprs_in(eqn)
        return self._function(inner)(*args)

    def scan(self, eqn: JaxprEqn, args: Values) -> Arrays:
        loop = scan_of(eqn, args)

        def turn(failed: jax.Array, given: Arrays) -> tuple[jax.Array, Arrays, tuple[()]]:
            values, new = self.run(loop.body, given)
            return _first(failed, new), values, ()

        failed, results, _ = scanned(eqn, loop, turn, _none())
        return [*results, failed]

    def while_(self, eqn: JaxprEqn, args: Values) -> Arrays:
        params = eqn.params
        cond, body = params[names.PARAM_COND_JAXPR], params[names.PARAM_BODY_JAXPR]
        constants = params[names.PARAM_COND_NCONSTS], params[names.PARAM_BODY_NCONSTS]
        of_cond, of_body, carry = _cut(args, constants)

        # Each turn computes the condition for the next one, because a condition returns nothing
        # else, and it may have checks, too.
        def turn(*values: jax.Array) -> Arrays:
            of_cond, of_body, (failed, _, *carry) = _cut(values, constants)
            carry, failed_body = self.run(body, [*of_body, *carry])
            (goes_on,), failed_cond = self.run(cond, [*of_cond, *carry])
            return [_first(_first(failed, failed_body), failed_cond), goes_on, *carry]

        (goes_on,), failed = self.run(cond, [*of_cond, *carry])
        # Under `vmap` each element of the batch has its own condition.
        state = [jnp.broadcast_to(failed, goes_on.shape), goes_on]
        types = [*map(jax.typeof, state), *body.in_avals[constants[1] :]]
        constant_types = [*cond.in_avals[: constants[0]], *body.in_avals[: constants[1]]]
        failed, _, *carry = bind_as(
            eqn,
            [*of_cond, *of_body, *state, *carry],
            **{
                names.PARAM_COND_JAXPR: _traced(lambda failed, goes_on, *carry: goes_on, types),
                names.PARAM_COND_NCONSTS: 0,
                names.PARAM_BODY_JAXPR: _traced(turn, [*constant_types, *types]),
                names.PARAM_BODY_NCONSTS: sum(constants),
            },
        )
        return [*carry, jnp.max(failed)]

    def shard_map(self, eqn: JaxprEqn, args: Values) -> Arrays:
        params = eqn.params
        mesh, axes = params[names.PARAM_MESH], params[names.PARAM_MANUAL_AXES]
        ordered = tuple(name for name in mesh.axis_names if name in axes)

        def on_each_device(*args: jax.Array) -> tuple[Arrays, jax.Array]:
            values, failed = self.run(params[names.PARAM_JAXPR], args)
            return values, failed[None]

        mapped = jax.shard_map(
            on_each_device,
            mesh=mesh,
            in_specs=tuple(params[names.PARAM_IN_SPECS]),
            out_specs=(list(params[names.PARAM_OUT_SPECS]), PartitionSpec(ordered)),
            axis_names=set(axes),
            check_vma=params[names.PARAM_CHECK_VMA],
        )
        values, failed = mapped(*args)
        return [*values, jnp.max(failed)]

    def with_rules(self, eqn: JaxprEqn, args: Values) -> Arrays:
        """A call with rules of its own, which are for transformations of the program."""
        return (self._unreturned if self._is_transformed else self.inlined)(eqn, args)


_CALLS: dict[str, Callable[[_Rewriting, JaxprEqn, Values], Arrays]] = {
    check_p.name: _Rewriting.check,
    names.JIT: _Rewriting.jit,
    names.CLOSED_CALL: _Rewriting.inlined,
    names.EVAL_JAXPR: _Rewriting.inlined,
    names.COND: _Rewriting.rewritten,
    names.SCAN: _Rewriting.scan,
    names.WHILE: _Rewriting.while_,
    names.REMAT: _Rewriting.rewritten,
    names.SHARD_MAP: _Rewriting.shard_map,
    names.CUSTOM_JVP_CALL: _Rewriting.with_rules,
    names.CUSTOM_VJP_CALL: _Rewriting.with_rules,
    names.CUSTOM_VMAP_CALL: _Rewriting.with_rules,
}


def _none() -> jax.Array:
    """The number for "no message". It varies over the devices inside `shard_map`."""
    return cast(jnp.int32(-1), manual_axes())


def _on_mesh_in_force(number: jax.Array) -> jax.Array:
    """A number made on Auto axes (`jax.sharding.auto_axes`) of a mesh of Explicit ones, or vice
    versa, with the types around it.
    """
    mesh, in_force = jax.typeof(number).sharding.mesh, jax.sharding.get_abstract_mesh()
    if mesh == in_force or mesh.empty or in_force.empty:
        return number
    return jax.sharding.reshard(number, PartitionSpec())


def _first(failed: jax.Array, new: jax.Array) -> jax.Array:
    return jax.lax.select(failed < 0, jnp.broadcast_to(new, failed.shape), failed)


def _traced(fun: Callable[..., object], types: Sequence[AbstractValue]) -> ClosedJaxpr:
    return jit(fun).trace(*types).jaxpr


def _types(jaxpr_or_eqn: Jaxpr | JaxprEqn) -> list[AbstractValue]:
    return [var.aval for var in jaxpr_or_eqn.invars]


def _cut(values: Values, sizes: tuple[int, int]) -> tuple[Values, ...]:
    """The first values, the next ones, and the rest."""
    first, second = sizes
    return values[:first], values[first : first + second], values[first + second :]

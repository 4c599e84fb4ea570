"""Finds mistakes in programs of `shard_map`: values whose JAX types wrongly say that they are the
same on all devices, and deadlocks.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from operator import and_

import jax.numpy as jnp
from jax.core import Atom
from jax.extend.core import Jaxpr, JaxprEqn, Var

from ..._core.compat import Program, names, opened, type_under
from ..._core.jaxprs import all_equations, all_jaxprs, followed, is_opaque, jaxprs_in, line_of
from ..._core.placement import AxisSet, axes_of_type, union

# Primitives that name mesh axes without communicating.
_SILENT = (names.AXIS_INDEX, names.PVARY)


def communicates_over(program: Program) -> AxisSet:
    """The mesh axes along which a jaxpr communicates."""
    return union(
        axes_named_by(eqn) for eqn in all_equations(program) if eqn.primitive.name not in _SILENT
    )


def axes_named_by(eqn: JaxprEqn) -> AxisSet:
    named = eqn.params.get(names.PARAM_AXES, eqn.params.get(names.PARAM_AXIS_NAME, ()))
    several = named if isinstance(named, tuple | list) else (named,)
    # Numbers are array dimensions, as in a sum over one.
    return frozenset(axis for axis in several if not isinstance(axis, int))


# The name of functions wrapped by `mylib.opaque`, which makes their types right.
OPAQUE = "mylib_opaque"


def wrong_in(program: Program) -> list[str]:
    """Describes the deadlocks in a jaxpr of `shard_map`, and the values that differ between devices
    although their types say they don't.
    """
    looked_into = {id(opened(jaxpr)) for jaxpr in all_jaxprs(program, without=_is_sealed)}
    constants = cache(partial(_constants_in, program))
    problems: list[str] = []
    for jaxpr in map(opened, all_jaxprs(program)):
        for eqn in jaxpr.eqns:
            axes = _differs_over(eqn)
            if not axes:
                continue
            stuck = axes & union(map(communicates_over, _branches(eqn)))
            if stuck:
                problems.append(_problem(eqn, stuck, _WOULD_WAIT, _AGREE[eqn.primitive.name]))
            elif id(jaxpr) in looked_into:
                problems += _mistakes(eqn, axes, jaxpr, constants)
    return list(dict.fromkeys(problems))


def _differs_over(eqn: JaxprEqn) -> AxisSet:
    """The axes along which an equation's results may vary, regardless of their types."""
    name = eqn.primitive.name
    if name == names.COND:
        return _of_types(eqn.invars[:1])
    if name == names.WHILE:
        return union(map(axes_of_type, eqn.params[names.PARAM_COND_JAXPR].out_avals[:1]))
    if is_opaque(eqn) or _is_sealed(eqn):
        # JAX assumes that a callback's result is the same on all devices, and so is the result of
        # any primitive whose type is only a shape.
        return _of_types(eqn.invars) | _indices_read_in(eqn)
    return frozenset()


def _indices_read_in(eqn: JaxprEqn) -> AxisSet:
    """The axes whose index a call reads."""
    if eqn.primitive.name in names.KERNELS:
        return frozenset()  # kernels also name axes of their own
    inside = (e for jaxpr in jaxprs_in(eqn) for e in all_equations(jaxpr))
    return union(axes_named_by(e) for e in inside if e.primitive.name == names.AXIS_INDEX)


def _is_sealed(eqn: JaxprEqn) -> bool:
    """Whether it is a call of a function made by `mylib.opaque`."""
    return eqn.params.get(names.PARAM_NAME) == OPAQUE


def _branches(eqn: JaxprEqn) -> list[Program]:
    return jaxprs_in(eqn) if eqn.primitive.name in (names.COND, names.WHILE) else []


def _mistakes(
    eqn: JaxprEqn, axes: AxisSet, jaxpr: Jaxpr, constants: Callable[[], dict[int, list[bool]]]
) -> Iterator[str]:
    alike: list[int] = []
    if eqn.primitive.name == names.COND:
        pairs = zip(eqn.invars[1:], constants()[id(eqn)][1:], strict=True)
        alike = [
            i
            for i, (operand, is_constant) in enumerate(pairs)
            if _is_differentiable(operand) and axes - _of_types([operand]) and not is_constant
        ]
        if any(_casts(branch, alike, axes) for branch in _branches(eqn)):
            yield _problem(eqn, axes, _WOULD_ADD_UP, _FIX_OF_SUMS)
            return
    # An opaque call may also write to references among its arguments.
    written = [var for var in eqn.invars if is_opaque(eqn) and type_under(var.aval) is not None]
    mistaken = [var for var in (*eqn.outvars, *written) if axes - _of_types([var])]
    # A `pcast` of the result afterwards makes the result's type right, but not its gradient.
    uncast = (_uncast_outputs(jaxpr, {id(var)}, axes - _of_types([var])) for var in mistaken)
    if mistaken and (alike or any(outputs != set() for outputs in uncast)):
        yield _problem(eqn, axes, _IS_MISTAKEN, _FIXES.get(_name(eqn), _FIX_OF_CALLS))


def _casts(branch: Program, alike: list[int], axes: AxisSet) -> bool:
    """Whether a branch casts its operands, or values computed from them, to varying. Then its
    gradient communicates, although other devices may take another branch.
    """
    jaxpr = opened(branch)
    derived = {id(jaxpr.invars[i]) for i in alike}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == names.STOP_GRADIENT or derived.isdisjoint(map(id, eqn.invars)):
            continue
        inner = [e for jaxpr in jaxprs_in(eqn) for e in all_equations(jaxpr)]
        if any(_cast_to(e) & axes for e in (eqn, *inner)):
            return True
        derived |= {id(var) for var in eqn.outvars if _is_differentiable(var)}
    return False


def _is_differentiable(var: Atom) -> bool:
    return jnp.issubdtype(getattr(var.aval, "dtype", jnp.int32), jnp.inexact)


def _constants_in(program: Program) -> dict[int, list[bool]]:
    """For each cond in a program, by its id: which operands don't depend on the program's
    arguments. They have no gradient.
    """
    found: dict[int, list[bool]] = {}

    def rule(eqn: JaxprEqn, are_constant: list[bool]) -> list[bool]:
        name = eqn.primitive.name
        if name == names.COND:  # which may be in a function that is called several times
            elsewhere = found.get(id(eqn), are_constant)
            found[id(eqn)] = list(map(and_, are_constant, elsewhere))
        for inner in map(opened, jaxprs_in(eqn)):
            given = [False] * len(inner.invars)
            if name in _PASS_ON:
                given = are_constant[len(are_constant) - len(given) :]
            followed(inner, given, rule, lambda _: True)
        return [all(are_constant)] * len(eqn.outvars)

    followed(program, [False] * len(opened(program).invars), rule, lambda _: True)
    return found


# Equations that pass their operands on to their jaxprs (a cond all but the first).
_PASS_ON = (names.JIT, names.SHARD_MAP, names.COND, names.REMAT, names.CUSTOM_JVP_CALL)


# Not `followed`: it begins at a value in the middle, and ends at the first equation that decides.
def _uncast_outputs(jaxpr: Jaxpr, reached: set[int], axes: AxisSet) -> set[int] | None:
    """The outputs that these values, or values computed from them, reach without a `pcast`; None if
    an equation depends on the missing cast.
    """
    reached = {*reached}
    for eqn in jaxpr.eqns:
        index = [i for i, operand in enumerate(eqn.invars) if id(operand) in reached]
        derived = [] if not index or axes <= _cast_to(eqn) else _derived_results(index, eqn, axes)
        if derived is None:
            return None
        reached |= set(map(id, derived))
    return {i for i, result in enumerate(jaxpr.outvars) if id(result) in reached}


def _derived_results(index: list[int], eqn: JaxprEqn, axes: AxisSet) -> list[Var] | None:
    """The results of an equation that are computed from these operands."""
    inner = jaxprs_in(eqn)
    if not inner or eqn.primitive.name in names.ELEMENTWISE:
        return eqn.outvars
    if eqn.primitive.name not in (names.JIT, names.CUSTOM_JVP_CALL):
        return None
    called = opened(inner[0])
    outputs = _uncast_outputs(called, {id(called.invars[i]) for i in index}, axes)
    return None if outputs is None else [eqn.outvars[i] for i in outputs]


def _cast_to(eqn: JaxprEqn) -> AxisSet:
    is_cast = eqn.primitive.name == names.PVARY
    return frozenset(eqn.params[names.PARAM_AXES]) if is_cast else frozenset()


def _of_types(values: Iterable[Atom]) -> AxisSet:
    return union(axes_of_type(type_under(var.aval) or var.aval) for var in values)


def _problem(eqn: JaxprEqn, axes: AxisSet, what: str, instead: str) -> str:
    differing = _BRANCHING.get(_name(eqn), f"the input of the {_name(eqn)}")
    along = ", ".join(map(repr, sorted(axes, key=str)))
    return (
        f"{differing} {where(eqn)} differs between the devices along {along}, and {what}\n"
        f"    instead: {instead}"
    )


def _name(eqn: JaxprEqn) -> str:
    return OPAQUE if _is_sealed(eqn) else eqn.primitive.name


def where(eqn: JaxprEqn) -> str:
    return f"at {line_of(eqn)}"


_WOULD_WAIT = "its branches communicate along it: some devices would wait forever"
_WOULD_ADD_UP = (
    "its branches use arrays that are the same on all of them: a gradient would be summed over "
    "devices that took another branch"
)
_IS_MISTAKEN = "JAX assumes that its results are the same on all of them"
_BRANCHING = {
    names.WHILE: "the condition of the while_loop",
    names.COND: "the predicate of the cond",
    OPAQUE: "a captured value or axis_index in the mylib.opaque function",
}
_AGREE = {
    names.WHILE: "mylib.loops.while_loop(..., sync='any'), or 'all'",
    names.COND: "communicate outside the cond, or make the predicate the same everywhere "
    "(jax.lax.pmax); if it is a gradient that communicates, use mylib.vary(array, axis), made "
    "before the cond",
}
_FIXES = {
    names.WHILE: "mylib.loops.while_loop, or start with mylib.vary(init_val, axis), with arrays in "
    "init_val",
    names.COND: "in the branches use mylib.vary(array, axis), made before the cond, or return "
    "mylib.vary(result, axis), with arrays in the result",
    OPAQUE: "pass it as an argument",
}
_FIX_OF_CALLS = "wrap the function that makes this call with mylib.opaque"
_FIX_OF_SUMS = "use mylib.vary(array, axis) in the branches, made before the cond"

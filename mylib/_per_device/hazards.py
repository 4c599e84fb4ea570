"""Finds mistakes in programs of `shard_map`: values whose JAX types wrongly say that they are the
same on all devices, and deadlocks.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from operator import and_
from typing import Any

import jax.numpy as jnp

from .._compat import names, opened, type_under
from .._placement import AxisSet, axes_of_type, union
from .._programs import all_equations, all_jaxprs, followed, is_opaque, jaxprs_in, line_of

# Primitives that name mesh axes without communicating.
_SILENT = (names.AXIS_INDEX, names.PVARY)


def communicates_over(program: Any) -> AxisSet:
    """The mesh axes along which a jaxpr communicates."""
    return union(
        axes_named_by(eqn) for eqn in all_equations(program) if eqn.primitive.name not in _SILENT
    )


def axes_named_by(eqn: Any) -> AxisSet:
    named = eqn.params.get(names.PARAM_AXES, eqn.params.get(names.PARAM_AXIS_NAME, ()))
    several = named if isinstance(named, tuple | list) else (named,)
    # Numbers are array dimensions, as in a sum over one.
    return frozenset(axis for axis in several if not isinstance(axis, int))


# The name of functions wrapped by `mylib.opaque`, which makes their types right.
OPAQUE = "mylib_opaque"


def wrong_in(program: Any) -> list[str]:
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
                problems.append(_would_wait(eqn, stuck))
            elif id(jaxpr) in looked_into:
                problems += _mistakes(eqn, axes, jaxpr, constants)
    return list(dict.fromkeys(problems))


def _differs_over(eqn: Any) -> AxisSet:
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


def _indices_read_in(eqn: Any) -> AxisSet:
    """The axes whose index a call reads."""
    if eqn.primitive.name in names.KERNELS:
        return frozenset()  # kernels also name axes of their own
    inside = (e for jaxpr in jaxprs_in(eqn) for e in all_equations(jaxpr))
    return union(axes_named_by(e) for e in inside if e.primitive.name == names.AXIS_INDEX)


def _is_sealed(eqn: Any) -> bool:
    """Whether it is a call of a function made by `mylib.opaque`."""
    return eqn.params.get(names.PARAM_NAME) == OPAQUE


def _branches(eqn: Any) -> list[Any]:
    return jaxprs_in(eqn) if eqn.primitive.name in (names.COND, names.WHILE) else []


def _mistakes(
    eqn: Any, axes: AxisSet, jaxpr: Any, constants: Callable[[], dict[int, list[bool]]]
) -> Iterator[str]:
    alike: list[int] = []
    if eqn.primitive.name == names.COND:
        pairs = zip(eqn.invars[1:], constants()[id(eqn)][1:], strict=True)
        alike = [
            i
            for i, (x, is_constant) in enumerate(pairs)
            if _is_differentiable(x) and axes - _of_types([x]) and not is_constant
        ]
        if any(_casts(branch, alike, axes) for branch in _branches(eqn)):
            yield _would_add_up(eqn, axes)
            return
    # An opaque call may also write to references among its arguments.
    written = [x for x in eqn.invars if type_under(x.aval) is not None] if is_opaque(eqn) else []
    mistaken = [x for x in (*eqn.outvars, *written) if axes - _of_types([x])]
    # A `pcast` of the result afterwards makes the result's type right, but not its gradient.
    uncast = (_uncast_outputs(jaxpr, {id(x)}, axes - _of_types([x])) for x in mistaken)
    if mistaken and (alike or any(outputs != set() for outputs in uncast)):
        yield _is_mistaken(eqn, axes)


def _casts(branch: Any, alike: list[int], axes: AxisSet) -> bool:
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
        derived |= {id(x) for x in eqn.outvars if _is_differentiable(x)}
    return False


def _is_differentiable(x: Any) -> bool:
    return jnp.issubdtype(getattr(x.aval, "dtype", jnp.int32), jnp.inexact)


def _constants_in(program: Any) -> dict[int, list[bool]]:
    """For each cond in a program, by its id: which operands don't depend on the program's
    arguments. They have no gradient.
    """
    found: dict[int, list[bool]] = {}

    def rule(eqn: Any, are_constant: list[bool]) -> list[bool]:
        name = eqn.primitive.name
        if name == names.COND:  # which may be in a function that is called several times
            elsewhere = found.get(id(eqn), are_constant)
            found[id(eqn)] = list(map(and_, are_constant, elsewhere))
        for inner in map(opened, jaxprs_in(eqn)):
            given = [False] * len(inner.invars)
            if name in _PASS_ON:
                given = are_constant[len(are_constant) - len(given) :]
            followed(inner, given, rule, lambda x: True)
        return [all(are_constant)] * len(eqn.outvars)

    followed(program, [False] * len(opened(program).invars), rule, lambda x: True)
    return found


# Equations that pass their operands on to their jaxprs (a cond all but the first).
_PASS_ON = (names.JIT, names.SHARD_MAP, names.COND, names.REMAT, names.CUSTOM_JVP_CALL)


# Not `followed`: it begins at a value in the middle, and ends at the first equation that decides.
def _uncast_outputs(jaxpr: Any, reached: set[int], axes: AxisSet) -> set[int] | None:
    """The outputs that these values, or values computed from them, reach without a `pcast`; None if
    an equation depends on the missing cast.
    """
    reached = {*reached}
    for eqn in jaxpr.eqns:
        index = [i for i, x in enumerate(eqn.invars) if id(x) in reached]
        derived = [] if not index or axes <= _cast_to(eqn) else _derived_results(index, eqn, axes)
        if derived is None:
            return None
        reached |= set(map(id, derived))
    return {i for i, x in enumerate(jaxpr.outvars) if id(x) in reached}


def _derived_results(index: list[int], eqn: Any, axes: AxisSet) -> list[Any] | None:
    """The results of an equation that are computed from these operands."""
    inner = jaxprs_in(eqn)
    if not inner or eqn.primitive.name in names.ELEMENTWISE:
        return eqn.outvars
    if eqn.primitive.name not in (names.JIT, names.CUSTOM_JVP_CALL):
        return None
    called = opened(inner[0])
    outputs = _uncast_outputs(called, {id(called.invars[i]) for i in index}, axes)
    return None if outputs is None else [eqn.outvars[i] for i in outputs]


def _cast_to(eqn: Any) -> AxisSet:
    is_cast = eqn.primitive.name == names.PVARY
    return frozenset(eqn.params[names.PARAM_AXES]) if is_cast else frozenset()


def _of_types(values: Iterable[Any]) -> AxisSet:
    return union(axes_of_type(type_under(x.aval) or x.aval) for x in values)


def _would_wait(eqn: Any, axes: AxisSet) -> str:
    return (
        f"{_differing(eqn, axes)}, and its branches communicate along it: some devices would wait "
        f"forever\n    instead: {_AGREE[eqn.primitive.name]}"
    )


def _would_add_up(eqn: Any, axes: AxisSet) -> str:
    return (
        f"{_differing(eqn, axes)}, and its branches use arrays that are the same on all of them: a "
        "gradient would be summed over devices that took another branch\n"
        "    instead: use mylib.vary(array, axis) in the branches, made before the cond"
    )


def _is_mistaken(eqn: Any, axes: AxisSet) -> str:
    return (
        f"{_differing(eqn, axes)}, and JAX assumes that its results are the same on all of them\n"
        f"    instead: {_FIXES.get(_name(eqn), _FIX_OF_CALLS)}"
    )


def _differing(eqn: Any, axes: AxisSet) -> str:
    what = _BRANCHING.get(_name(eqn), f"the input of the {_name(eqn)}")
    along = ", ".join(map(repr, sorted(axes, key=str)))
    return f"{what} {where(eqn)} differs between the devices along {along}"


def _name(eqn: Any) -> str:
    return OPAQUE if _is_sealed(eqn) else eqn.primitive.name


def where(eqn: Any) -> str:
    return f"at {line_of(eqn)}"


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

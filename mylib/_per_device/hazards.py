"""Finds mistakes in programs of `shard_map`: values whose JAX types wrongly say that they are the
same on all devices, and deadlocks.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import Literal

from .._compat import names, opened, type_under
from .._placement import AxisSet, axes_of_type, union
from .._programs import all_jaxprs, is_opaque, jaxprs_in

# Primitives that name mesh axes without communicating.
_SILENT = (names.AXIS_INDEX, names.PVARY)


def communicates_over(program: Any) -> AxisSet:
    """The mesh axes along which a jaxpr communicates."""
    return union(
        axes_named_by(eqn)
        for jaxpr in all_jaxprs(program)
        for eqn in opened(jaxpr).eqns
        if eqn.primitive.name not in _SILENT
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
    constants = _Constants(program)
    found: list[str] = []
    for jaxpr in map(opened, all_jaxprs(program)):
        values = _Values(jaxpr)
        for eqn in jaxpr.eqns:
            axes = _differs_over(eqn)
            if not axes:
                continue
            stuck = axes & union(map(communicates_over, _branches(eqn)))
            if stuck:
                found.append(_would_wait(eqn, stuck))
            elif id(jaxpr) in looked_into:
                found += _mistakes(eqn, axes, values, constants)
    return list(dict.fromkeys(found))


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
    inside = (e for jaxpr in _jaxprs_inside(eqn) for e in opened(jaxpr).eqns)
    return union(axes_named_by(e) for e in inside if e.primitive.name == names.AXIS_INDEX)


def _is_sealed(eqn: Any) -> bool:
    """Whether it is a call of a function made by `mylib.opaque`."""
    return eqn.params.get(names.PARAM_NAME) == OPAQUE


def _branches(eqn: Any) -> list[Any]:
    if eqn.primitive.name == names.WHILE:
        return [eqn.params[names.PARAM_COND_JAXPR], eqn.params[names.PARAM_BODY_JAXPR]]
    return list(eqn.params.get(names.PARAM_BRANCHES, ()))


def _mistakes(eqn: Any, axes: AxisSet, values: "_Values", constants: "_Constants") -> Iterator[str]:
    alike: list[int] = []
    if eqn.primitive.name == names.COND:
        alike = [
            i
            for i, x in enumerate(eqn.invars[1:])
            if _is_differentiable(x) and axes - _of_types([x]) and not constants.has(x)
        ]
        if any(_casts(branch, alike, axes) for branch in _branches(eqn)):
            yield _would_add_up(eqn, axes)
            return
    # An opaque call may also write to references among its arguments.
    written = filter(_is_reference, eqn.invars) if is_opaque(eqn) else ()
    mistaken = [x for x in (*eqn.outvars, *written) if axes - _of_types([x])]
    # A `pcast` of the result afterwards makes the result's type right, but not its gradient.
    if any(alike or not values.are_cast(x, axes - _of_types([x])) for x in mistaken):
        yield _is_mistaken(eqn, axes)


def _casts(branch: Any, alike: list[int], axes: AxisSet) -> bool:
    """Whether a branch casts its operands, or values computed from them, to varying. Then its
    gradient communicates, although other devices may take another branch.
    """
    jaxpr = opened(branch)
    given = {id(jaxpr.invars[i]) for i in alike}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == names.STOP_GRADIENT or not any(id(x) in given for x in eqn.invars):
            continue
        inner = [e for jaxpr in _jaxprs_inside(eqn) for e in opened(jaxpr).eqns]
        if any(_cast_to(e) & axes for e in (eqn, *inner)):
            return True
        given |= {id(x) for x in eqn.outvars if _is_differentiable(x)}
    return False


def _jaxprs_inside(eqn: Any) -> list[Any]:
    return [jaxpr for inner in jaxprs_in(eqn) for jaxpr in all_jaxprs(inner)]


def _is_reference(x: Any) -> bool:
    return type_under(x.aval) is not None


def _is_differentiable(x: Any) -> bool:
    return jnp.issubdtype(getattr(x.aval, "dtype", jnp.int32), jnp.inexact)


class _Constants:
    """The values in a program that don't depend on its arguments: they have no gradient."""

    def __init__(self, program: Any):
        self._program = program

    def has(self, x: Any) -> bool:
        return isinstance(x, Literal) or id(x) in self._known

    @cached_property
    def _known(self) -> set[int]:
        calls = Counter(
            id(opened(inner))
            for jaxpr in all_jaxprs(self._program)
            for eqn in opened(jaxpr).eqns
            for inner in jaxprs_in(eqn)
        )
        known: set[int] = set()
        queue = [opened(self._program)]
        while queue:
            jaxpr = queue.pop()
            known |= set(map(id, jaxpr.constvars))
            for eqn in jaxpr.eqns:
                are_known = [isinstance(x, Literal) or id(x) in known for x in eqn.invars]
                if all(are_known):
                    known |= set(map(id, eqn.outvars))
                for inner in map(opened, jaxprs_in(eqn)):
                    # A jaxpr with several callers may have other arguments there.
                    if eqn.primitive.name in _PASS_ON and calls[id(inner)] == 1:
                        given = are_known[len(eqn.invars) - len(inner.invars) :]
                        pairs = zip(inner.invars, given, strict=True)
                        known |= {id(x) for x, is_known in pairs if is_known}
                        queue.append(inner)
        return known


# Equations that pass their operands on to their jaxprs (a cond all but the first).
_PASS_ON = (names.JIT, names.SHARD_MAP, names.COND, names.REMAT, names.CUSTOM_JVP_CALL)


class _Values:
    """Finds the values of a jaxpr that are cast to varying before their first use."""

    def __init__(self, jaxpr: Any):
        self._jaxpr = jaxpr

    @cached_property
    def _uses(self) -> dict[int, list[Any]]:
        uses: dict[int, list[Any]] = defaultdict(list)
        for eqn in self._jaxpr.eqns:
            for x in eqn.invars:
                uses[id(x)].append(eqn)
        return uses

    def are_cast(self, x: Any, axes: AxisSet) -> bool:
        return self._uncast_outputs(x, axes) == set()

    def _uncast_outputs(self, x: Any, axes: AxisSet) -> set[int] | None:
        """The outputs that `x`, or a value computed from it, reaches without a `pcast`; None if an
        equation depends on the missing cast.
        """
        returned: set[int] = set()
        queue, seen = [x], {id(x)}
        while queue:
            x = queue.pop()
            returned |= {i for i, y in enumerate(self._jaxpr.outvars) if x is y}
            for eqn in self._uses[id(x)]:
                made = [] if axes <= _cast_to(eqn) else self._made_of(x, eqn, axes)
                if made is None:
                    return None
                queue += [y for y in made if id(y) not in seen]
                seen |= set(map(id, made))
        return returned

    def _made_of(self, x: Any, eqn: Any, axes: AxisSet) -> list[Any] | None:
        inner = jaxprs_in(eqn)
        if not inner or eqn.primitive.name in names.ELEMENTWISE:
            return eqn.outvars
        if eqn.primitive.name not in (names.JIT, names.CUSTOM_JVP_CALL):
            return None
        called = opened(inner[0])
        returned: set[int] = set()
        for given, own in zip(eqn.invars, called.invars, strict=True):
            uncast = _Values(called)._uncast_outputs(own, axes) if given is x else set[int]()
            if uncast is None:
                return None
            returned |= uncast
        return [eqn.outvars[i] for i in returned]


def _cast_to(eqn: Any) -> AxisSet:
    is_cast = eqn.primitive.name == names.PVARY
    return frozenset(eqn.params[names.PARAM_AXES]) if is_cast else frozenset()


def _of_types(values: Iterable[Any]) -> AxisSet:
    return union(axes_of_type(type_under(x.aval) or x.aval) for x in values)


def _would_wait(eqn: Any, axes: AxisSet) -> str:
    name = eqn.primitive.name
    return (
        f"{_BRANCHING[name]} {where(eqn)} differs between the devices along {_show(axes)}, "
        f"and its branches communicate along it: some devices would wait forever\n"
        f"    instead: {_AGREE[name]}"
    )


def _would_add_up(eqn: Any, axes: AxisSet) -> str:
    return (
        f"{_BRANCHING[names.COND]} {where(eqn)} differs between the devices along {_show(axes)}, "
        "and its branches use arrays that are the same on all of them: a gradient would be summed "
        "over devices that took another branch\n"
        "    instead: use mylib.vary(array, axis) in the branches, made before the cond"
    )


def _is_mistaken(eqn: Any, axes: AxisSet) -> str:
    name = OPAQUE if _is_sealed(eqn) else eqn.primitive.name
    what = _BRANCHING.get(name, f"the input of the {name}")
    return (
        f"{what} {where(eqn)} differs between the devices along {_show(axes)}, and JAX assumes "
        "that its results are the same on all of them\n"
        f"    instead: {_FIXES.get(name, _FIX_OF_CALLS)}"
    )


def where(eqn: Any) -> str:
    known = source_info_util.summarize(eqn.source_info)
    return f"at {known}" if known else "(JAX doesn't know the line)"


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


def _show(axes: AxisSet) -> str:
    return ", ".join(map(repr, sorted(axes, key=str)))

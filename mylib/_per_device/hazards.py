"""Where JAX's types are wrong about what differs between the devices inside `shard_map`, and where
some devices would wait for ever.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import Literal

from .._compat import names, opened, type_under
from .._placement import Axes, axes_of_type, union
from .._programs import is_opaque, jaxprs_in, parts_of

# What names mesh axes without sending anything along them.
_SILENT = (names.AXIS_INDEX, names.PVARY)


def communicates_over(program: Any) -> Axes:
    """The axes along which a program, given as a jaxpr, sends anything."""
    return union(
        axes_named_by(eqn)
        for part in parts_of(program)
        for eqn in opened(part).eqns
        if eqn.primitive.name not in _SILENT
    )


def axes_named_by(eqn: Any) -> Axes:
    named = eqn.params.get(names.PARAM_AXES, eqn.params.get(names.PARAM_AXIS_NAME, ()))
    several = named if isinstance(named, tuple | list) else (named,)
    # Numbers are dimensions, of a sum over one for instance.
    return frozenset(axis for axis in several if not isinstance(axis, int))


# The name of the functions whose types `mylib.opaque` sees to.
OPAQUE = "mylib_opaque"


def wrong_in(program: Any) -> list[str]:
    """What would run into a deadlock, and what JAX's types take for the same on all devices
    although it isn't, in a program of `shard_map` given as a jaxpr.
    """
    looked_into = {id(opened(part)) for part in parts_of(program, without=_is_sealed)}
    constants = _Constants(program)
    found: list[str] = []
    for part in map(opened, parts_of(program)):
        values = _Values(part)
        for eqn in part.eqns:
            axes = _differs_over(eqn)
            if not axes:
                continue
            stuck = axes & union(map(communicates_over, _branches(eqn)))
            if stuck:
                found.append(_would_wait(eqn, stuck))
            elif id(part) in looked_into:
                found += _mistakes(eqn, axes, values, constants)
    return list(dict.fromkeys(found))


def _differs_over(eqn: Any) -> Axes:
    """The axes along which the results of an equation may differ, whatever their types say."""
    name = eqn.primitive.name
    if name == names.COND:
        return _of_types(eqn.invars[:1])
    if name == names.WHILE:
        return union(map(axes_of_type, eqn.params[names.PARAM_COND_JAXPR].out_avals[:1]))
    if is_opaque(eqn) or _is_sealed(eqn):
        # JAX takes a callback's result for the same on all devices, and that of any primitive whose
        # type says no more than a shape.
        return _of_types(eqn.invars) | _places_in(eqn)
    return frozenset()


def _places_in(eqn: Any) -> Axes:
    """The axes along which a call looks up where it runs."""
    if eqn.primitive.name in names.KERNELS:
        return frozenset()  # axes of its own are among those that it names
    inside = (e for part in _inner_parts(eqn) for e in opened(part).eqns)
    return union(axes_named_by(e) for e in inside if e.primitive.name == names.AXIS_INDEX)


def _is_sealed(eqn: Any) -> bool:
    """Whether it is a call of a function made by `mylib.opaque`."""
    return eqn.params.get(names.PARAM_NAME) == OPAQUE


def _branches(eqn: Any) -> list[Any]:
    if eqn.primitive.name == names.WHILE:
        return [eqn.params[names.PARAM_COND_JAXPR], eqn.params[names.PARAM_BODY_JAXPR]]
    return list(eqn.params.get(names.PARAM_BRANCHES, ()))


def _mistakes(eqn: Any, axes: Axes, values: "_Values", constants: "_Constants") -> Iterator[str]:
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
    # A call may write into references that it is given, as it may return values.
    written = filter(_is_reference, eqn.invars) if is_opaque(eqn) else ()
    mistaken = [x for x in (*eqn.outvars, *written) if axes - _of_types([x])]
    # Said of a result afterwards, it is right for the result, but not for its gradient.
    if any(alike or not values.are_told(x, axes - _of_types([x])) for x in mistaken):
        yield _is_mistaken(eqn, axes)


def _casts(branch: Any, alike: list[int], axes: Axes) -> bool:
    """Whether a branch says of what it is given, and made of these, that it varies: then in its
    gradient devices would communicate, which take another branch maybe.
    """
    jaxpr = opened(branch)
    given = {id(jaxpr.invars[i]) for i in alike}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == names.STOP_GRADIENT or not any(id(x) in given for x in eqn.invars):
            continue
        inner = [e for part in _inner_parts(eqn) for e in opened(part).eqns]
        if any(_cast_to(e) & axes for e in (eqn, *inner)):
            return True
        given |= {id(x) for x in eqn.outvars if _is_differentiable(x)}
    return False


def _inner_parts(eqn: Any) -> list[Any]:
    return [part for inner in jaxprs_in(eqn) for part in parts_of(inner)]


def _is_reference(x: Any) -> bool:
    return type_under(x.aval) is not None


def _is_differentiable(x: Any) -> bool:
    return jnp.issubdtype(getattr(x.aval, "dtype", jnp.int32), jnp.inexact)


class _Constants:
    """The values in a program that depend on nothing that it is given: there is no gradient with
    respect to them.
    """

    def __init__(self, program: Any):
        self._program = program

    def has(self, x: Any) -> bool:
        return isinstance(x, Literal) or id(x) in self._known

    @cached_property
    def _known(self) -> set[int]:
        calls = Counter(
            id(opened(inner))
            for part in parts_of(self._program)
            for eqn in opened(part).eqns
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
                    # What is called from several places may be given something there.
                    if eqn.primitive.name in _PASS_ON and calls[id(inner)] == 1:
                        given = are_known[len(eqn.invars) - len(inner.invars) :]
                        pairs = zip(inner.invars, given, strict=True)
                        known |= {id(x) for x, is_known in pairs if is_known}
                        queue.append(inner)
        return known


# Equations whose programs are given what they are given themselves; a cond decides by the first.
_PASS_ON = (names.JIT, names.SHARD_MAP, names.COND, names.REMAT, names.CUSTOM_JVP_CALL)


class _Values:
    """Of which values of a jaxpr it is said, before anything relies on it, that they vary."""

    def __init__(self, jaxpr: Any):
        self._jaxpr = jaxpr

    @cached_property
    def _uses(self) -> dict[int, list[Any]]:
        uses: dict[int, list[Any]] = defaultdict(list)
        for eqn in self._jaxpr.eqns:
            for x in eqn.invars:
                uses[id(x)].append(eqn)
        return uses

    def are_told(self, x: Any, axes: Axes) -> bool:
        return self._untold(x, axes) == set()

    def _untold(self, x: Any, axes: Axes) -> set[int] | None:
        """Through which of the jaxpr's results `x`, or what is made of it, leaves without its
        having been said; None if something has relied on it before.
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

    def _made_of(self, x: Any, eqn: Any, axes: Axes) -> list[Any] | None:
        inner = jaxprs_in(eqn)
        if not inner or eqn.primitive.name in names.ELEMENTWISE:
            return eqn.outvars
        if eqn.primitive.name not in (names.JIT, names.CUSTOM_JVP_CALL):
            return None
        part = opened(inner[0])
        returned: set[int] = set()
        for given, own in zip(eqn.invars, part.invars, strict=True):
            untold = _Values(part)._untold(own, axes) if given is x else set[int]()
            if untold is None:
                return None
            returned |= untold
        return [eqn.outvars[i] for i in returned]


def _cast_to(eqn: Any) -> Axes:
    is_cast = eqn.primitive.name == names.PVARY
    return frozenset(eqn.params[names.PARAM_AXES]) if is_cast else frozenset()


def _of_types(values: Iterable[Any]) -> Axes:
    return union(axes_of_type(type_under(x.aval) or x.aval) for x in values)


def _would_wait(eqn: Any, axes: Axes) -> str:
    name = eqn.primitive.name
    return (
        f"{_BRANCHING[name]} {where(eqn)} differs between the devices along {_show(axes)}, "
        f"and what it decides on communicates along it: some devices would wait for ever\n"
        f"    instead: {_AGREE[name]}"
    )


def _would_add_up(eqn: Any, axes: Axes) -> str:
    return (
        f"{_BRANCHING[names.COND]} {where(eqn)} differs between the devices along {_show(axes)}, "
        "and its branches use arrays that are the same on all of them: a gradient would be added "
        "up over devices that took another branch\n"
        "    instead: use mylib.vary(array, axis) in the branches, made before the cond"
    )


def _is_mistaken(eqn: Any, axes: Axes) -> str:
    name = OPAQUE if _is_sealed(eqn) else eqn.primitive.name
    what = _BRANCHING.get(name, f"what the {name} is given")
    return (
        f"{what} {where(eqn)} differs between the devices along {_show(axes)}, and JAX takes what "
        "comes of it for the same on all of them\n"
        f"    instead: {_MENDS.get(name, _MEND_OF_CALLS)}"
    )


def where(eqn: Any) -> str:
    known = source_info_util.summarize(eqn.source_info)
    return f"at {known}" if known else "(JAX doesn't know the line)"


_BRANCHING = {
    names.WHILE: "the condition of the while_loop",
    names.COND: "the predicate of the cond",
    OPAQUE: "what the function in mylib.opaque finds outside of its arguments",
}
_AGREE = {
    names.WHILE: "mylib.loops.while_loop(..., sync='any'), or 'all'",
    names.COND: "communicate outside of it, or make the predicate the same everywhere "
    "(jax.lax.pmax); if it is a gradient that communicates, use mylib.vary(array, axis), made "
    "before the cond",
}
_MENDS = {
    names.WHILE: "mylib.loops.while_loop, or start with mylib.vary(init_val, axis), of arrays",
    names.COND: "in the branches use mylib.vary(array, axis), made before the cond, or return "
    "mylib.vary(result, axis), of arrays",
    OPAQUE: "pass it as an argument",
}
_MEND_OF_CALLS = "wrap the function that makes this call with mylib.opaque"


def _show(axes: Axes) -> str:
    return ", ".join(map(repr, sorted(axes, key=str)))

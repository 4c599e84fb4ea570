"""The equations of a jaxpr, with calls opened."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal

from .._compat import names, opened
from .._programs import jaxprs_in

# Calls of jaxprs whose arguments are the last ones of the equation.
_INLINED = frozenset(
    {
        names.JIT,
        names.CLOSED_CALL,
        names.EVAL_JAXPR,
        names.CUSTOM_JVP_CALL,
        names.CUSTOM_VJP_CALL,
    }
)


# The axis of the mesh of one device on which steps are traced.
AXIS = "_"


class Equation(NamedTuple):
    """One equation, after calls around it have been opened. `source` is the original."""

    name: str
    invars: Sequence[Any]
    outvars: Sequence[Any]
    source: Any

    @property
    def params(self) -> Any:
        return self.source.params


class _Renamed:
    """A variable of a jaxpr that is called. It may be called several times."""

    def __init__(self, var: Any):
        self.aval = var.aval


def equations_of(jaxpr: Any) -> tuple[list[Equation], list[Any]]:
    """The equations whose results are used, with calls opened, and the jaxpr's results."""
    eqns: list[Equation] = []

    def inline(jaxpr: Any, arguments: Sequence[Any]) -> list[Any]:
        renamed = dict(zip(jaxpr.invars, arguments, strict=True))

        def named(var: Any) -> Any:
            return var if is_literal(var) else renamed.get(var, var)

        for eqn in jaxpr.eqns:
            invars = [named(var) for var in eqn.invars]
            called = jaxprs_in(eqn) if eqn.primitive.name in _INLINED else ()
            if called:
                inner = opened(called[0])
                last = invars[len(invars) - len(inner.invars) :]
                renamed.update(zip(eqn.outvars, inline(inner, last), strict=True))
            else:
                renamed.update({var: _Renamed(var) for var in eqn.outvars})
                outvars = [renamed[var] for var in eqn.outvars]
                eqns.append(Equation(eqn.primitive.name, invars, outvars, eqn))
        return [named(var) for var in jaxpr.outvars]

    results = inline(jaxpr, jaxpr.invars)
    return _used(eqns, results), results


def _used(eqns: Sequence[Equation], results: Sequence[Any]) -> list[Equation]:
    used = {var for var in results if not is_literal(var)}
    needed: list[Equation] = []
    for eqn in reversed(eqns):
        if any(var in used for var in eqn.outvars):
            used.update(var for var in eqn.invars if not is_literal(var))
            needed.append(eqn)
    return needed[::-1]


def is_literal(var: Any) -> bool:
    return isinstance(var, Literal)


def shape_of(aval: Any) -> tuple[int, ...]:
    return tuple(getattr(aval, "shape", ()))


def bytes_of(aval: Any) -> int:
    size = getattr(getattr(aval, "dtype", None), "itemsize", 0)
    return math.prod(shape_of(aval)) * size


def is_on_host(aval: Any) -> bool:
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def is_of_plan(eqn: Equation) -> bool:
    """Whether a constraint is on the mesh on which steps are traced, not on one of the step's."""
    mesh = getattr(eqn.params[names.PARAM_SHARDING], "mesh", None)
    return mesh is not None and mesh.axis_names == (AXIS,)


def is_kept(eqn: Equation) -> bool:
    """Whether it is a constraint that splits an array: to where a weight is kept."""
    if eqn.name != names.CONSTRAINT:
        return False
    spec = getattr(eqn.params[names.PARAM_SHARDING], "spec", ())
    return any(entry is not None for entry in spec)

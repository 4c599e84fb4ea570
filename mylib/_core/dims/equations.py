"""The equations of a jaxpr, with calls opened."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal

from ..compat import names
from ..jaxprs import called_by, followed, shape_of
from ..placement import PLANNING


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

    def inline(eqn: Any, invars: list[Any]) -> list[Any]:
        if eqn.primitive.name != names.REMAT and (called := called_by(eqn, invars)):
            return followed(*called, inline, others=lambda var: var)
        outvars = list(map(_Renamed, eqn.outvars))
        eqns.append(Equation(eqn.primitive.name, invars, outvars, eqn))
        return outvars

    results = followed(jaxpr, jaxpr.invars, inline, others=lambda var: var)
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


def bytes_of(aval: Any) -> int:
    size = getattr(getattr(aval, "dtype", None), "itemsize", 0)
    return math.prod(shape_of(aval)) * size


def is_of_plan(eqn: Equation) -> bool:
    """Whether it is on the mesh on which steps are traced, not on one of the step's."""
    mesh = eqn.params.get(names.PARAM_MESH)
    if mesh is None:
        mesh = getattr(eqn.params[names.PARAM_SHARDING], "mesh", None)
    return mesh is not None and mesh.axis_names == (PLANNING,)


def is_kept(eqn: Equation) -> bool:
    """Whether it is a constraint that splits an array: to where a weight is kept."""
    if eqn.name != names.CONSTRAINT:
        return False
    spec = getattr(eqn.params[names.PARAM_SHARDING], "spec", ())
    return any(entry is not None for entry in spec)

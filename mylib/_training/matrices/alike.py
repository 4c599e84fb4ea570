"""Which programs compute the same numbers, and which only move them element by element."""

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from ..._core.compat import Program, names, opened
from ..._core.jaxprs import all_equations, followed, shape_of, with_jaxprs
from ..._core.tree import is_of_keys, outlined


def key_of(program: Program) -> object:
    """Equal for programs of equal equations that hold equal constants and the same objects. A
    function that is another object in each trace makes them different, as it may hold anything.
    """
    jaxpr: Jaxpr = opened(program)
    equations: list[object] = []
    # Constants of a jaxpr that isn't closed are arguments like others.
    constants = map(_value, getattr(program, "consts", range(len(jaxpr.constvars))))
    held = dict(zip(jaxpr.constvars, constants, strict=True))

    def rule(eqn: JaxprEqn, operands: list[object]) -> list[object]:
        arrays, others = outlined(with_jaxprs(eqn, key_of))
        types = [var.aval for var in eqn.outvars]
        equations.append((eqn.primitive, operands, types, others, list(map(_value, arrays))))
        return [(len(equations), i) for i in range(len(types))]

    def other(atom: Literal | Var) -> object:
        return (atom.aval, _value(atom.val)) if isinstance(atom, Literal) else held[atom]

    results = followed(program, range(len(jaxpr.invars)), rule, other)
    return [var.aval for var in jaxpr.invars], equations, results


def _value(constant: object) -> object:
    """What is equal for equal constants. Those that can't be read are equal to themselves only."""
    if isinstance(constant, Tracer):
        return id(constant)
    if isinstance(constant, jax.Array):
        if is_of_keys(constant) or not constant.is_fully_addressable:
            return id(constant)
    array = np.asarray(constant)
    return array.shape, str(array.dtype), array.tobytes()


def is_by_element(program: Program) -> bool:
    """Whether each number of a result depends on those at its place alone."""
    return all(
        eqn.primitive.name in _BY_ELEMENT or not any(shape_of(var.aval) for var in eqn.invars)
        for eqn in all_equations(program)
    )


_BY_ELEMENT = names.BY_ELEMENT | names.CALLS | {names.COND}

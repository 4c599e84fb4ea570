"""On which arguments the results of a function depend.

Read from its jaxpr. An equation's results depend on all of its operands; in loops, branches and
calls each result depends on what its own equations use. An unknown primitive counts as an ordinary
operation, so that a dependence may be assumed but is never missed.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import Any

from jax.extend.core import Literal

from .._compat import names, opened, scan_sizes, while_body
from .._programs import jaxprs_in

# A set of arguments, as bits: programs have many values, and sets of numbers would be slow.
Bits = int


def dependences(
    program: Any, args: Sequence[Bits], watch: Callable[[Any, Sequence[Bits]], None] | None = None
) -> list[Bits]:
    """The arguments that each result of a jaxpr depends on. `watch` is called with each equation
    without a jaxpr of its own, and what its operands depend on.
    """
    jaxpr = opened(program)
    values: dict[Any, Bits] = dict(zip(jaxpr.invars, args, strict=True))

    def read(x: Any) -> Bits:
        return 0 if isinstance(x, Literal) else values.get(x, 0)

    for eqn in jaxpr.eqns:
        operands = [read(x) for x in eqn.invars]
        values.update(zip(eqn.outvars, _through(eqn, operands, watch), strict=True))
    return [read(x) for x in jaxpr.outvars]


def _through(eqn: Any, operands: list[Bits], watch: Any) -> Sequence[Bits]:
    name, inner = eqn.primitive.name, jaxprs_in(eqn)
    if name == names.SCAN:
        return _scan(eqn, operands, watch)
    if name == names.WHILE:
        return _while(eqn, operands, watch)
    if name == names.COND:
        branches = [dependences(branch, operands[1:], watch) for branch in inner]
        if watch is not None and any(operands[1:]):
            watch(eqn, operands[:1])
        return [reduce(or_, results, operands[0]) for results in zip(*branches, strict=True)]
    if len(inner) == 1 and len(opened(inner[0]).invars) == len(operands):
        results = dependences(inner[0], operands, watch)
        if len(results) == len(eqn.outvars):
            return results
    if watch is not None:
        watch(eqn, operands)
    return [reduce(or_, operands, 0)] * len(eqn.outvars)


def _scan(eqn: Any, operands: list[Bits], watch: Any) -> list[Bits]:
    constants, carried = scan_sizes(eqn)
    carry = slice(constants, constants + carried)
    while True:
        results = dependences(eqn.params[names.PARAM_JAXPR], operands, watch)
        grown = list(map(or_, operands[carry], results[:carried]))
        if grown == operands[carry]:
            return results
        operands = [*operands[:constants], *grown, *operands[carry.stop :]]


def _while(eqn: Any, operands: list[Bits], watch: Any) -> list[Bits]:
    tests = eqn.params[names.PARAM_COND_NCONSTS]
    start = tests + eqn.params[names.PARAM_BODY_NCONSTS]
    carry = operands[start:]
    while True:
        test = [*operands[:tests], *carry]
        (again,) = dependences(eqn.params[names.PARAM_COND_JAXPR], test, watch)
        results = dependences(while_body(eqn), [*operands[tests:start], *carry], watch)
        grown = [again | a | b for a, b in zip(carry, results, strict=True)]
        if grown == carry:
            return carry
        carry = grown

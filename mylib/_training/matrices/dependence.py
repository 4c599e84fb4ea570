"""On which arguments the results of a function depend.

Read from its jaxpr. An equation's results depend on all of its operands; in loops, branches and
calls each result depends on what its own equations use. An unknown primitive counts as an ordinary
operation, so that a dependence may be assumed but is never missed.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_

from jax.extend.core import JaxprEqn

from ..._core.compat import Program, names, opened
from ..._core.jaxprs import Looped, followed, jaxprs_in, loop_of, repeated

# A set of arguments, as bits: programs have many values, and sets of numbers would be slow.
Bits = int
Visit = Callable[[JaxprEqn, Sequence[Bits]], None]


def dependences(program: Program, args: Sequence[Bits], visit: Visit | None = None) -> list[Bits]:
    """The arguments that each result of a jaxpr depends on. `visit` is called with each equation
    without a jaxpr of its own, and what its operands depend on.
    """
    return followed(
        program, args, lambda eqn, operands: _through(eqn, operands, visit), lambda atom: 0
    )


def _through(eqn: JaxprEqn, operands: list[Bits], visit: Visit | None) -> Sequence[Bits]:
    name, inner = eqn.primitive.name, jaxprs_in(eqn)
    loop = loop_of(eqn, operands)
    if loop is not None:
        return _repeated(loop, visit)
    if name == names.COND:
        branches = [dependences(branch, operands[1:], visit) for branch in inner]
        if visit is not None and any(operands[1:]):
            visit(eqn, operands[:1])
        return [reduce(or_, results, operands[0]) for results in zip(*branches, strict=True)]
    if len(inner) == 1 and len(opened(inner[0]).invars) == len(operands):
        results = dependences(inner[0], operands, visit)
        if len(results) == len(eqn.outvars):
            return results
    if visit is not None:
        visit(eqn, operands)
    return [reduce(or_, operands, 0)] * len(eqn.outvars)


def _repeated(loop: Looped[Bits], visit: Visit | None) -> list[Bits]:
    def turn(given: list[Bits]) -> list[Bits]:
        results = dependences(loop.body, given, visit)
        if loop.test is None:
            return results
        carry = given[len(loop.constants) :]
        (again,) = dependences(loop.test, [*loop.of_test, *carry], visit)
        return [again | bits for bits in results]

    carry, results = repeated(loop, turn, or_)
    # A `while_loop` may end before its first turn.
    return results if loop.test is None else carry

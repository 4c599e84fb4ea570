"""Which dimensions of a program's arrays must be split alike, and what is computed and summed.

A program is traced once, without a mesh or a compiler. Dimensions that an operation maps to each
other are joined; what remains are groups, and a mesh axis is assigned to a group, not to an array.
What the program computes, sums and holds is noted with its dimensions, so that any assignment is
priced in milliseconds.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..compat import names, opened
from . import by_element, calls, kernels, lookups, products, shapes
from .applied import Applied, Operand, Rule
from .equations import Equation, equations_of, is_literal
from .program import Place, Reading, Scope

_RULES: dict[str, Rule] = {
    **by_element.RULES,
    **shapes.RULES,
    **products.RULES,
    **lookups.RULES,
    **kernels.RULES,
    **calls.RULES,
}


def relate_as_operands(primitive: Any) -> None:
    """Says of a primitive that each result has the dimensions of the operand at its place."""
    _RULES[primitive.name] = by_element.barrier


def program_of(closed: Any) -> Reading:
    """Reads a closed jaxpr."""
    reader = _Reader()
    jaxpr = opened(closed)
    program = reader.program
    program.inputs = [program.fresh(var.aval) for var in jaxpr.invars]
    operands = [Operand(nodes, origin=i) for i, nodes in enumerate(program.inputs)]
    results = reader.through(jaxpr, operands, program.places[0], top=True)
    program.results = [x.nodes for x in results]
    return program


class _Reader:
    def __init__(self) -> None:
        self.program = Reading()
        self.clock = 0

    def constant(self, var: Any) -> Operand:
        nodes = self.program.fresh(var.aval)
        self.program.undivided += nodes
        return Operand(nodes)

    def through(
        self, jaxpr: Any, operands: Sequence[Operand], place: Place, top: bool = False
    ) -> list[Operand]:
        """Walks through a jaxpr with these arguments; its results."""
        # Not `followed` of `_programs`, which opens no calls: the uses of a value are counted over
        # all equations, and when each begins and ends tells what is held at the same time. By way
        # of it this would be as long, and as fast: 1.00 of the time for a transformer of 4 layers.
        values = dict(zip(jaxpr.invars, operands, strict=True))
        values |= {var: self.constant(var) for var in jaxpr.constvars}

        def read(var: Any) -> Operand:
            if is_literal(var):
                return self.constant(var)
            value = values[var]
            # If a turn also uses what it adds to, the sum is needed in each turn.
            is_used_once = value.carried is None or uses[var] == 1
            return value if is_used_once else replace(value, carried=None)

        eqns, results = equations_of(jaxpr)
        used = itertools.chain(results, *(eqn.invars for eqn in eqns))
        uses = Counter(var for var in used if not is_literal(var))
        moments: list[tuple[Equation, int, int]] = []
        for eqn in eqns:
            self.clock += 1
            start = self.clock
            ins = [read(var) for var in eqn.invars]
            outs = _applied(Applied(self.program, self.through, eqn, ins, place, top))
            values.update(zip(eqn.outvars, outs, strict=True))
            moments.append((eqn, start, self.clock))
        returned = {var for var in results if not is_literal(var)}
        nodes = {var: value.nodes for var, value in values.items()}
        self.program.scopes.append(Scope(moments, returned, nodes, self.clock, place.times, top))
        return [read(var) for var in results]


def _applied(op: Applied) -> list[Operand]:
    """The results of an operation, after its rule has joined its dimensions."""
    rule = _RULES.get(op.eqn.name)
    if rule is not None:
        rule(op)
    elif op.eqn.name not in names.SHOWS:
        op.unknown()
    if op.eqn.name in names.SAME_NUMBERS and op.keeps_bytes():
        op.outs[0].sum = op.ins[0].sum
    op.end()
    return op.outs

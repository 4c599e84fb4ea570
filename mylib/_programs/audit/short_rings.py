"""Finds reduce-scatters that the TPU's compiler has written as short rings of permutations.

It combines them with a matrix product: in each step a device adds its part of the product to the
sum that it has received, and sends it on. Long rings are loops. Short rings are written step by
step, and equal products may share their first step. A permutation whose result is added to nothing,
or to what is no part of a product, only moves it.
"""

from collections.abc import Iterator, Sequence

from .attribution import is_of_dot
from .hlo import Instruction
from .opcodes import Likeness
from .values import uses_in


def rings_in(
    steps: Sequence[tuple[Instruction, Instruction]],
) -> Iterator[tuple[list[int], Instruction]]:
    """Groups the permutations that are steps of one reduce-scatter, with the instruction that
    returns its result. Each step is given by two instructions: the one that starts it, and the one
    that returns its result.
    """
    # The permutations of such a ring have the name of the product that they are combined with.
    number = {id(done): i for i, (_, done) in enumerate(steps) if is_of_dot(done)}
    before = {i: _sources(steps[i][0], number) for i in number.values()}
    inner = {j for sources in before.values() for j in sources}
    ends: dict[Instruction, list[int]] = {}
    # A ring ends at a step that no other one sends on.
    for i in before.keys() - inner:
        for user in steps[i][1].users:
            if _adds(user, steps[i][1]):
                ends.setdefault(user, []).append(i)
    for end, last in ends.items():
        members = list(dict.fromkeys(sorted(last)))
        for i in members:
            members += [j for j in before[i] if j not in members]
        yield sorted(members), end


def _sources(start: Instruction, number: dict[int, int]) -> list[int]:
    """The permutations whose results are sent after a sum."""
    sources: list[int] = []
    queue = [(x, False) for x in start.inputs()]
    for x, summed in queue:
        if id(x) in number and summed:
            sources.append(number[id(x)])
        elif _is_moved(x):
            queue += [(y, summed) for y in x.inputs()]
        elif not summed:  # each step adds once to what it sends on
            queue += [(y, True) for y in x.inputs() if _adds(x, y)]
    return sources


def _adds(x: Instruction, operand: Instruction) -> bool:
    """Whether an instruction adds one of its operands to a part of a product."""
    if x.opcode == "fusion":
        return any(_is_added(parameter) for parameter in uses_in(x, operand))
    return x.opcode == "add" and is_of_dot(x)


def _is_added(x: Instruction) -> bool:
    return any(_is_added(user) if _is_moved(user) else _adds(user, x) for user in x.users)


def _is_moved(x: Instruction) -> bool:
    is_local = x.row.like >= Likeness.PART and not x.row.sends and not x.target
    return is_local or x.opcode in ("get-tuple-element", "tuple")

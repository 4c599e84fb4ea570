"""Finds reduce-scatters that the TPU's compiler has written as short rings of permutations.

It combines them with a matrix product: in each step a device adds its part of the product to the
sum that it has received, and sends it on. Long rings are loops. Short rings are written step by
step, and equal products may share their first step.
"""

from collections.abc import Iterator, Sequence

from .attribution import is_of_dot
from .hlo import Instruction
from .values import MOVES

_MOVED = MOVES | {"get-tuple-element", "tuple"}


def rings_in(
    steps: Sequence[tuple[Instruction, Instruction]],
) -> Iterator[tuple[list[int], Instruction]]:
    """Groups the permutations that are steps of one reduce-scatter, with the instruction that
    returns its result. Each step is given by two instructions: the one that starts it, and the one
    that returns its result.
    """
    number = {id(done): i for i, (_, done) in enumerate(steps) if is_of_dot(done)}
    before = {i: _sources(steps[i][0], number) for i in number.values()}
    inner = {j for sources in before.values() for j in sources}
    ends: dict[Instruction, list[int]] = {}
    for i in before.keys() - inner:
        for user in steps[i][1].users:
            ends.setdefault(user, []).append(i)
    for end, last in ends.items():
        members = list(dict.fromkeys(sorted(last)))
        for i in members:
            members += [j for j in before[i] if j not in members]
        yield sorted(members), end


def _sources(start: Instruction, number: dict[int, int]) -> list[int]:
    """The permutations whose results are sent, after at most one sum."""
    sources: list[int] = []
    queue = [(x, False) for x in start.inputs()]
    for x, summed in queue:
        if id(x) in number:
            sources.append(number[id(x)])
        elif x.opcode in _MOVED or (x.opcode in ("fusion", "add") and not summed):
            queue += [(y, summed or x.opcode not in _MOVED) for y in x.inputs()]
    return sources

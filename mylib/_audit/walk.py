"""Evaluates a program once, with something else in place of its numbers.

Computations are entered where they are called, tuples taken apart, and collectives found that
another instruction has started. What an operation does to values is for the subclass to say.
"""

from collections.abc import Callable, Sequence
from typing import Any

from .collectives import Transfer
from .hlo import Computation, Instruction
from .values import operands_of_call

# What stands for an array, or a tuple of these. Arrays are no plain tuples.
Abstract = Any


class Walk:
    """An evaluation. Values are hashable; `nothing` stands for what depends on nothing."""

    nothing: Abstract

    def __init__(self, transfers: Sequence[Transfer]):
        self.transfers = transfers
        # The transfers of each instruction, and the whole that each is a step of, with its number.
        self.sent: dict[int, list[tuple[int, Transfer, Transfer]]] = {}
        self.channels: dict[tuple[str, str | None], Instruction] = {}
        self.evaluated: dict[tuple[str, object], object] = {}
        # The results of collectives, for the fusions that go on with them.
        self.held: dict[int, Abstract] = {}
        # Where sums that are chains of permutations end, and the numbers of these.
        self.ends: dict[int, int] = {
            id(x): i for i, whole in enumerate(transfers) for x in whole.ends
        }
        self.ending: int | None = None  # of the end that is being evaluated
        self.loops: list[Instruction] = []  # those that are being evaluated
        for i, whole in enumerate(transfers):
            for t in whole.members or (whole,):
                self.sent.setdefault(id(t.first), []).append((i, whole, t))
                if "channel_id" in t.first.attributes:
                    self.channels.setdefault(t.first.channel, t.first)

    def run(self, computation: Computation, arguments: tuple[Abstract, ...]) -> Abstract:
        # Layers that are alike share a computation, and loops run theirs again.
        key = computation.name, arguments
        if key not in self.evaluated:
            values: dict[str, Abstract] = {}
            for x in computation.instructions:
                inputs = [values[name] for name in x.operands]
                values[x.name] = self.value(x, inputs, arguments)
            self.evaluated[key] = values[computation.result.name]
        return self.evaluated[key]

    def value(
        self, x: Instruction, inputs: list[Abstract], arguments: tuple[Abstract, ...]
    ) -> Abstract:
        """What stands for the result of an instruction."""
        if id(x) not in self.ends:
            return self._value(x, inputs, arguments)
        self.ending = number = self.ends[id(x)]
        value = self._value(x, inputs, arguments)
        self.ending = None
        return each(lambda one: self.ended(one, number), value)

    def _value(
        self, x: Instruction, inputs: list[Abstract], arguments: tuple[Abstract, ...]
    ) -> Abstract:
        match x.opcode:
            case "parameter":
                return arguments[int(x.rest)]
            case "get-tuple-element":
                value = inputs[0]
                return value[x.index] if type(value) is tuple else value
            case "tuple":
                return tuple(inputs)
            case "while":
                self.loops.append(x)
                value = self.loop(x, inputs[0])
                self.loops.pop()
                return value
            case "conditional":
                branches = [
                    self.run(called, (argument,))
                    for called, argument in zip(x.calls, inputs[1:], strict=True)
                ]
                return self.branch(branches, inputs[0])
        if x.waits:
            return inputs[0]
        if x.row.of_device:
            return self.of_this_device(x)
        if x.row.reserves:
            return shaped(x, self.nothing)
        if x.row.window:
            return self._in_parts(x, inputs)
        if x.sends:
            return self._sent(x, inputs)
        return self._called(x, inputs) if x.row.calls == "run" else self.computed(x, inputs)

    def _in_parts(self, x: Instruction, inputs: list[Abstract]) -> Abstract:
        """A part of a collective that the TPU's compiler has taken apart."""
        if x.row.window == "start":
            return (self.given_so_far(x.operand(0), inputs[0]), *inputs[:1] * (len(x.arrays) - 1))
        ends = [value for y, value in zip(x.inputs(), inputs, strict=True) if y.sends]
        return ends[0] if ends else self.unknown(inputs)

    def _called(self, x: Instruction, inputs: list[Abstract]) -> Abstract:
        operands = operands_of_call(x)
        input_of = dict(zip(x.operands, inputs, strict=True))
        # An update that comes later brings the operands: see `operands_of_call`.
        if any(y.name not in input_of for y in operands):
            return self.unknown(inputs)
        return self.run(x.called, tuple(input_of[y.name] for y in operands))

    def _sent(self, x: Instruction, inputs: list[Abstract]) -> Abstract:
        # Another instruction may have started it.
        first = x if id(x) in self.sent else self.channels.get(x.channel, x)
        if id(first) not in self.sent:  # each device alone
            return inputs[0] if len(inputs) == 1 else tuple(inputs)
        if any(whole.ends for _, whole, _ in self.sent[id(first)]):
            return self.step(first, inputs)
        if first is x or id(first) not in self.held:
            results = self.collective(x, first, inputs)
            self.held[id(first)] = results[0] if len(results) == 1 else tuple(results)
        return self.held[id(first)]

    # What a subclass says.

    def computed(self, x: Instruction, inputs: list[Abstract]) -> Abstract:
        """The result of an operation of one device."""
        raise NotImplementedError

    def collective(
        self, x: Instruction, first: Instruction, inputs: list[Abstract]
    ) -> list[Abstract]:
        """The results of a collective, which the instruction `first` has started."""
        raise NotImplementedError

    def step(self, first: Instruction, inputs: list[Abstract]) -> Abstract:
        """The result of a step of sums that are chains of permutations."""
        raise NotImplementedError

    def ended(self, value: Abstract, number: int) -> Abstract:
        """What such a chain returns, if its last sum is this value."""
        raise NotImplementedError

    def given_so_far(self, x: Instruction, operand: Abstract) -> Abstract:
        """What has been given to a collective that fusions go on with."""
        return operand

    def loop(self, x: Instruction, carried: Abstract) -> Abstract:
        raise NotImplementedError

    def branch(self, branches: list[Abstract], which: Abstract) -> Abstract:
        """The result of a condition, from those of its branches and what chooses among them."""
        raise NotImplementedError

    def of_this_device(self, x: Instruction) -> Abstract:
        """The device's own number."""
        raise NotImplementedError

    def unknown(self, inputs: list[Abstract]) -> Abstract:
        """What is computed from these in a way that isn't understood."""
        raise NotImplementedError


def each(change: Callable[..., Abstract], *values: Abstract) -> Abstract:
    """Changes each array, or those at the same place of several values."""
    if all(type(value) is tuple for value in values):
        return tuple(each(change, *parts) for parts in zip(*values, strict=True))
    return change(*values)


def flat(value: Abstract) -> list[Abstract]:
    """What stands for each array of a value."""
    return [y for x in value for y in flat(x)] if type(value) is tuple else [value]


def shaped(x: Instruction, value: Abstract) -> Abstract:
    """This value for each array of a result."""
    return (value,) * len(x.arrays) if x.type.startswith("(") else value

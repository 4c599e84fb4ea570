"""Evaluates a program once, with marks in place of its numbers.

Computations are entered where they are called, tuples taken apart, and collectives found that
another instruction has started.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np

from ..._core.compat import names
from .attribution import UNKNOWN, own_primitive_of, phase_of, phases_in
from .collectives import Transfer
from .dataflow import NOTHING, Graph, Mark, Marks, Source, Use, chosen, each, joined, union
from .hlo import Computation, HloModule, Instruction
from .opcodes import Likeness
from .positions import positions
from .values import is_invariant, operands_of_call


def graph_of(module: HloModule, transfers: Sequence[Transfer], devices: int) -> Graph:
    """The graph of a program."""
    walk = _Walk(module, transfers, devices)
    parameters = tuple(
        walk.source(Source("parameter", i)) for i in range(len(module.entry.parameters))
    )
    walk.graph.made = walk.source(Source("made")).any
    result = walk.run(module.entry, parameters)
    results = result if type(result) is tuple else (result,)
    walk.graph.results = [joined([value]) for value in results]
    return walk.graph


class _Walk:
    """An evaluation: a value is a mark, or a tuple of these."""

    def __init__(self, module: HloModule, transfers: Sequence[Transfer], devices: int):
        self.devices = devices
        self.graph = Graph()
        # The transfers of each instruction, and the whole that each is a step of, with its number.
        self.sent: dict[int, list[tuple[int, Transfer, Transfer]]] = {}
        self.channels: dict[tuple[str, str | None], Instruction] = {}
        self.evaluated: dict[tuple[str, object], object] = {}
        # The results of collectives, for the fusions that go on with them.
        self.held: dict[int, Marks] = {}
        # Where sums that are chains of permutations end, and the numbers of these.
        self.ends = {id(x): i for i, whole in enumerate(transfers) for x in whole.ends}
        self.rings = 0
        self.loops: list[Instruction] = []  # those that are being evaluated
        # Instructions that depend on the device alone, and the sources that do.
        self.of_device: dict[int, Mark | None] = {}
        self.numbers = 0
        # If the program is differentiated, products without a phase are those of an optimiser.
        phases = phases_in(module)
        self.phased = not phases <= {"", UNKNOWN}
        known = phases and UNKNOWN not in phases
        self.graph.differentiates = "backward" in phases or (False if known else None)
        for i, whole in enumerate(transfers):
            for t in whole.members or (whole,):
                self.sent.setdefault(id(t.first), []).append((i, whole, t))
                if "channel_id" in t.first.attributes:
                    self.channels.setdefault(t.first.channel, t.first)

    def source(self, source: Source) -> Mark:
        bit = 1 << self.graph.bit(source)
        return Mark(bit, bit, arrays=bit)

    def run(self, computation: Computation, arguments: tuple[Marks, ...]) -> Marks:
        # Layers that are alike share a computation, and loops run theirs again.
        key = computation.name, arguments
        if key not in self.evaluated:
            values: dict[str, Marks] = {}
            for x in computation.instructions:
                inputs = [values[name] for name in x.operands]
                values[x.name] = self.value(x, inputs, arguments)
            self.evaluated[key] = values[computation.result.name]
        return self.evaluated[key]

    def value(self, x: Instruction, inputs: list[Marks], arguments: tuple[Marks, ...]) -> Marks:
        """What the result of an instruction depends on."""
        value = self._value(x, inputs, arguments)
        if id(x) in self.ends:
            value = each(lambda one: self._ended(one, self.ends[id(x)]), value)
        if isinstance(value, Mark) and value.any and not value.any & ~self.numbers:
            return self._of_device(x, value)
        return value

    def _value(self, x: Instruction, inputs: list[Marks], arguments: tuple[Marks, ...]) -> Marks:
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
                value = self._loop(x, inputs[0])
                self.loops.pop()
                return value
            case "conditional":
                branches = [
                    self.run(called, (argument,))
                    for called, argument in zip(x.calls, inputs[1:], strict=True)
                ]
                return chosen(reduce(union, branches), joined(inputs[:1]))
        if x.waits:
            return inputs[0]
        if x.row.of_device:
            return self._of_device(x, NOTHING)
        if x.row.reserves:
            return _shaped(x, NOTHING)
        if x.row.window:
            return self._in_parts(x, inputs)
        if x.sends:
            return self._sent(x, inputs)
        return self._called(x, inputs) if x.row.calls == "run" else self._computed(x, inputs)

    def _in_parts(self, x: Instruction, inputs: list[Marks]) -> Marks:
        """A part of a collective that the TPU's compiler has taken apart."""
        if x.row.window == "start":
            return (self._given_so_far(x.operand(0)), *inputs[:1] * (len(x.arrays) - 1))
        ends = [value for y, value in zip(x.inputs(), inputs, strict=True) if y.sends]
        return ends[0] if ends else self._unknown()

    def _called(self, x: Instruction, inputs: list[Marks]) -> Marks:
        operands = operands_of_call(x)
        input_of = dict(zip(x.operands, inputs, strict=True))
        # An update that comes later brings the operands: see `operands_of_call`.
        if any(y.name not in input_of for y in operands):
            return self._unknown()
        return self.run(x.called, tuple(input_of[y.name] for y in operands))

    def _sent(self, x: Instruction, inputs: list[Marks]) -> Marks:
        # Another instruction may have started it.
        first = x if id(x) in self.sent else self.channels.get(x.channel, x)
        if id(first) not in self.sent:  # each device alone
            return inputs[0] if len(inputs) == 1 else tuple(inputs)
        if any(whole.ends for _, whole, _ in self.sent[id(first)]):
            return self._step(first, inputs)
        if first is x or id(first) not in self.held:
            results = self._collective(x, first, inputs)
            self.held[id(first)] = results[0] if len(results) == 1 else tuple(results)
        return self.held[id(first)]

    def _given_so_far(self, x: Instruction) -> Mark:
        """What has been given to a collective that fusions go on with."""
        bits = [
            self.graph.bit(Source("collective", number))
            for number, *_ in self.sent.get(id(x), [])[:1]
        ]
        return joined([self.graph.into.get(bit, NOTHING) for bit in bits])

    def _computed(self, x: Instruction, inputs: list[Marks]) -> Marks:
        """The result of an operation of one device."""
        row = x.row
        if row.outside:
            return _shaped(x, self._unknown())
        row_of = inputs[0] if len(inputs) and isinstance(inputs[0], Mark) else NOTHING
        if x.does == "concatenate" and len(x.arrays[0].shape) == 1:
            ends = np.cumsum([y.arrays[0].size for y in x.inputs()]).tolist()
            parts = [joined([value]) for value in inputs]
            return joined(parts)._replace(row=tuple(zip(ends, parts, strict=True)))
        if row_of.row and x.does == "slice":
            cut = x.slices[0]
            parts = [
                m for (start, end), m in row_of.parts() if start < cut.stop and cut.start < end
            ]
            return joined(parts)
        if row_of.row and row.like >= Likeness.PART:
            if x.arrays[0].shape == x.operand(0).arrays[0].shape:
                return row_of
        if len(inputs) == 1 and type(inputs[0]) is tuple and row.like >= Likeness.PART:
            return inputs[0]
        mark = joined(inputs)._replace(arrays=self._arrays(x, inputs))
        primitive, phase = own_primitive_of(x), phase_of(x.op_names)
        # Small products are written as sums.
        if row.product or (x.does == "reduce" and primitive in names.PRODUCTS):
            self._use(x, inputs, phase)
            if self.phased and phase == UNKNOWN:
                before = self.graph.unnamed.get(id(x), 0)
                self.graph.unnamed[id(x)] = before | mark.any
            of_model = phase not in ("", UNKNOWN) or not self.phased
            product = mark.any if of_model else mark.product
            return _shaped(x, mark._replace(near=self.graph.made, product=product))
        # Rows of a table are made anew, as a product with one would be.
        if x.does == "gather" and not joined(inputs[:1]).product:
            return _shaped(x, mark._replace(near=self.graph.made))
        if x.does == "scatter":
            self.graph.rows |= joined(inputs[-1:]).near
        return _shaped(x, mark._replace(near=self._near(x, inputs)))

    def _arrays(self, x: Instruction, inputs: list[Marks]) -> int:
        # What moves a single number puts it somewhere. Others combine it with all elements.
        moves = x.row.like >= Likeness.PART or x.row.puts is not None or x.row.gathers
        operands = zip(_data_of(x, x.inputs()), _data_of(x, inputs), strict=True)
        each = [value for y, value in operands if moves or _size(y) > 1 or _size(x) == 1]
        return joined(each).arrays

    def _use(self, x: Instruction, inputs: list[Marks], phase: str) -> None:
        for operand, value in zip(x.inputs(), inputs, strict=True):
            use = Use(phase, len(self.loops), sum(array.size for array in operand.arrays))
            for bit in self.graph.sources_in(joined([value]).near):
                self.graph.uses.setdefault(bit, set()).add(use)

    def _near(self, x: Instruction, inputs: list[Marks]) -> int:
        row, data = x.row, _data_of(x, inputs)
        if row.elementwise or row.like >= Likeness.PART or row.puts is not None:
            # What chooses between two values is in neither of them.
            return joined(data[x.does == "select" :]).near
        if x.does in ("broadcast", "reduce") and len(data) and len(x.arrays) == 1:
            return joined(data[:1]).near if x.operand(0).arrays[0].size == x.arrays[0].size else 0
        return 0

    def _loop(self, x: Instruction, carried: Marks) -> Marks:
        condition, body = x.calls
        # As compilers write small ones. What the loop changes is the table.
        if own_primitive_of(x) == names.SCATTER_ADD and type(carried) is tuple:
            rows = [value for i, value in enumerate(carried) if is_invariant(x, (i,))]
            self.graph.rows |= joined(rows).near
        # It ends, as sets only grow.
        before: Marks = None
        while carried != before:
            before = carried
            after = union(carried, self.run(body, (carried,)))
            carried = chosen(after, joined([self.run(condition, (after,))]))
        return carried

    def _collective(self, x: Instruction, first: Instruction, inputs: list[Marks]) -> list[Marks]:
        sent = self.sent[id(first)]
        if len(inputs) == 1 and isinstance(inputs[0], Mark) and inputs[0].row:
            if x.does == "all-reduce":
                return [self._row(inputs[0], sent[0][0])]
        # An all-to-all of several operands gives each device parts of all of them.
        count = len({element for *_, t in sent for element in t.elements})
        together = count != len(inputs) or x.does.endswith("all-to-all")
        is_chain = any(whole.members for _, whole, _ in sent)
        results: list[Mark] = []
        for element in range(count):
            number = next((i for i, _, t in sent if element in t.elements), sent[0][0])
            operand = joined(inputs if together else inputs[element : element + 1])
            results.append(self._result(number, operand, 0 if is_chain else element))
        return results

    def _result(
        self, number: int, operand: Mark, element: int = 0, part: tuple[int, int] | None = None
    ) -> Mark:
        """A result of a collective that is given this."""
        result = self.source(Source("collective", number, element, part))
        bit = result.any.bit_length() - 1
        self.graph.into[bit] = self.graph.into.get(bit, NOTHING) | operand
        return result

    def _step(self, first: Instruction, inputs: list[Marks]) -> Marks:
        """The result of sums of several permutations is known where they end. Until then it is
        marked as one of each.
        """
        sources = (self.graph.bit(Source("collective", i)) for i, _, _ in self.sent[id(first)])
        bits = sum(1 << bit for bit in sources)
        self.rings |= bits
        return joined(inputs) | Mark(bits, arrays=bits)

    def _row(self, row: Mark, number: int) -> Mark:
        """A sum of concatenated arrays: one source for each."""
        parts = [(part[1], self._result(number, mark, part=part)) for part, mark in row.parts()]
        return joined([mark for _, mark in parts])._replace(row=tuple(parts))

    def _ended(self, value: Mark, number: int) -> Mark:
        """Takes a value at the end of a chain of permutations, and returns it as the result of
        collective `number`, whose sources include the values added along the chain.
        """
        if not value.any >> self.graph.bit(Source("collective", number)) & 1:
            return value
        sent = ~self.rings
        masks = value.any & sent, value.near & sent, value.product & sent, value.arrays & sent
        return self._result(number, Mark(*masks))

    def _unknown(self) -> Mark:
        return self.source(Source("unknown"))

    def _of_device(self, x: Instruction, value: Mark) -> Mark:
        """A value that depends on the device alone, known by its numbers if they are few."""
        if id(x) not in self.of_device:
            position = positions(x, self.devices) if x.arrays[0].size == 1 else None
            self.of_device[id(x)] = None if position is None else self._position(position[:, 0])
        position = self.of_device[id(x)]
        return value if position is None else position

    def _position(self, numbers: np.ndarray) -> Mark:
        # Which devices have the same, whatever it is: places in several arrays are one source then.
        labels = np.unique(numbers, return_inverse=True)[1].reshape(-1)
        if not labels.any():
            return NOTHING
        bit = 1 << self.graph.bit(Source("position", labels=tuple(labels.tolist())))
        self.numbers |= bit
        return Mark(bit)


def _data_of(x: Instruction, operands: list[Any]) -> list[Any]:
    """Those of its operands that are no indices."""
    return [operands[0], operands[-1]] if x.does == "scatter" else operands[: x.row.data]


def _size(x: Instruction) -> int:
    return sum(array.size for array in x.arrays)


def _shaped(x: Instruction, value: Marks) -> Marks:
    """This value for each array of a result."""
    return (value,) * len(x.arrays) if x.type.startswith("(") else value

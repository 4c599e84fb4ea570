"""What each value of a program depends on: arguments, collectives, and the device's own number.

The program is evaluated once, with sets in place of numbers. A set is an integer with a bit for
each source. A collective ends what comes before it: its result depends on the collective, and the
collective on what is given to it. So the program becomes a small graph of arguments, collectives
and results, which `flow.py` reads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import numpy as np

from .._compat import names
from .attribution import UNKNOWN, own_primitive_of, phase_of, phases_in
from .collectives import Transfer
from .hlo import HloModule, Instruction
from .opcodes import Likeness
from .positions import positions
from .walk import Walk, each, flat, shaped


class Mark(NamedTuple):
    """Sets of sources that a value depends on: `any` has all of them, `near` those that it combines
    element by element, and `product` those behind a product of the model or a kernel. `row`: the
    arrays that are concatenated into this one of one dimension, and where each ends. The GPU's
    compiler sums several gradients in this way.
    """

    any: int = 0
    near: int = 0
    product: int = 0
    row: "tuple[tuple[int, Mark], ...]" = ()

    def __or__(self, other: "Mark") -> "Mark":
        """Either of two values, or what is computed from both."""
        if self == other:
            return self
        masks = self.any | other.any, self.near | other.near, self.product | other.product
        if [end for end, _ in self.row] != [end for end, _ in other.row]:
            return Mark(*masks)
        row = zip(self.row, other.row, strict=True)
        return Mark(*masks, tuple((end, a | b) for (end, a), (_, b) in row))

    def parts(self) -> "Iterator[tuple[tuple[int, int], Mark]]":
        """The arrays of a row, and from where to where each is in it."""
        starts = [0, *(end for end, _ in self.row)]
        return (((start, end), m) for start, (end, m) in zip(starts, self.row, strict=False))


# A mark, or a tuple of these.
Marks = Any
NOTHING = Mark()


class Source(NamedTuple):
    """Where values come from: `"parameter"`, `"collective"`, `"position"` (a number that depends on
    the device), `"made"` (a product, or rows of a table), or `"unknown"`. `number` is the number of
    the parameter or of the collective, and `element` the number of the collective's result, or of
    the one that this is a `part` of. `labels` are a position's numbers.
    """

    kind: str
    number: int = 0
    element: int = 0
    part: tuple[int, int] | None = None
    labels: tuple[int, ...] = ()


class Use(NamedTuple):
    """A product: its phase, in how many loops it is, and the size of the factor."""

    phase: str
    loops: int
    size: int


@dataclass
class Graph:
    """`into` has what is given to each collective, `results` what the program's results are, and
    `uses` the products that sources are factors of. The first sources are the program's parameters,
    in order. `differentiates`: whether it has gradients; None if the program doesn't tell.
    `unnamed`: products that may be of the model or of an optimiser, and what is behind each. `made`
    is a source, as a set, that products and rows of tables are combined with element by element: so
    it is known what is made of them. `rows` are those that are added to tables.
    """

    sources: list[Source] = field(default_factory=list)
    into: dict[int, Mark] = field(default_factory=dict)
    results: list[Mark] = field(default_factory=list)
    uses: dict[int, set[Use]] = field(default_factory=dict)
    unnamed: dict[int, int] = field(default_factory=dict)
    made: int = 0
    rows: int = 0
    differentiates: bool | None = False
    bits: dict[Source, int] = field(default_factory=dict)

    def bit(self, source: Source) -> int:
        """The number of a source, a new one for one that is new."""
        if source not in self.bits:
            self.bits[source] = len(self.sources)
            self.sources.append(source)
        return self.bits[source]

    def sources_in(self, mask: int) -> Iterator[int]:
        while mask:
            low = mask & -mask
            yield low.bit_length() - 1
            mask ^= low


def graph_of(module: HloModule, transfers: Sequence[Transfer], devices: int) -> Graph:
    """The graph of a program."""
    walk = _Marking(module, transfers, devices)
    parameters = tuple(
        walk.source(Source("parameter", i)) for i in range(len(module.entry.parameters))
    )
    walk.graph.made = walk.source(Source("made")).any
    result = walk.run(module.entry, parameters)
    results = result if type(result) is tuple else (result,)
    walk.graph.results = [joined([value]) for value in results]
    return walk.graph


class _Marking(Walk):
    nothing = NOTHING

    def __init__(self, module: HloModule, transfers: Sequence[Transfer], devices: int):
        super().__init__(transfers)
        self.devices = devices
        self.graph = Graph()
        self.rings = 0
        # Instructions that depend on the device alone, and the sources that do.
        self.of_device: dict[int, Mark | None] = {}
        self.numbers = 0
        # If the program is differentiated, products without a phase are those of an optimiser.
        phases = phases_in(module)
        self.phased = not phases <= {"", UNKNOWN}
        known = phases and UNKNOWN not in phases
        self.graph.differentiates = "backward" in phases or (False if known else None)

    def source(self, source: Source) -> Mark:
        bit = 1 << self.graph.bit(source)
        return Mark(bit, bit)

    def value(self, x: Instruction, inputs: list[Marks], arguments: tuple[Marks, ...]) -> Marks:
        """What the result of an instruction depends on."""
        value = super().value(x, inputs, arguments)
        if isinstance(value, Mark) and value.any and not value.any & ~self.numbers:
            return self._of_device(x, value)
        return value

    def branch(self, branches: list[Marks], which: Marks) -> Marks:
        return _with(reduce(_union, branches), joined([which]))

    def of_this_device(self, x: Instruction) -> Marks:
        return self._of_device(x, NOTHING)

    def given_so_far(self, x: Instruction, operand: Marks) -> Marks:
        bits = [
            self.graph.bit(Source("collective", number))
            for number, *_ in self.sent.get(id(x), [])[:1]
        ]
        return joined([self.graph.into.get(bit, NOTHING) for bit in bits])

    def computed(self, x: Instruction, inputs: list[Marks]) -> Marks:
        """The result of an operation of one device."""
        row = x.row
        if row.outside:
            return shaped(x, self.unknown(inputs))
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
        mark = joined(inputs)
        primitive, phase = own_primitive_of(x), phase_of(x.op_names)
        # Small products are written as sums.
        if row.product or (x.does == "reduce" and primitive in names.PRODUCTS):
            self._use(x, inputs, phase)
            if self.phased and phase == UNKNOWN:
                before = self.graph.unnamed.get(id(x), 0)
                self.graph.unnamed[id(x)] = before | mark.any
            of_model = phase not in ("", UNKNOWN) or not self.phased
            product = mark.any if of_model else mark.product
            return shaped(x, Mark(mark.any, self.graph.made, product))
        # Rows of a table are made anew, as a product with one would be.
        if x.does == "gather" and not joined(inputs[:1]).product:
            return shaped(x, Mark(mark.any, self.graph.made, mark.product))
        data = inputs[: row.data]
        if x.does == "scatter":
            data = [inputs[0], inputs[-1]]
            self.graph.rows |= joined(inputs[-1:]).near
        return shaped(x, Mark(mark.any, self._near(x, data), mark.product))

    def _use(self, x: Instruction, inputs: list[Marks], phase: str) -> None:
        for operand, value in zip(x.inputs(), inputs, strict=True):
            use = Use(phase, len(self.loops), sum(array.size for array in operand.arrays))
            for bit in self.graph.sources_in(joined([value]).near):
                self.graph.uses.setdefault(bit, set()).add(use)

    def _near(self, x: Instruction, data: list[Marks]) -> int:
        row = x.row
        if row.elementwise or row.like >= Likeness.PART or row.puts is not None:
            # What chooses between two values is in neither of them.
            return joined(data[x.does == "select" :]).near
        if x.does in ("broadcast", "reduce") and len(data) and len(x.arrays) == 1:
            return joined(data[:1]).near if x.operand(0).arrays[0].size == x.arrays[0].size else 0
        return 0

    def loop(self, x: Instruction, carried: Marks) -> Marks:
        condition, body = x.calls
        if own_primitive_of(x) == names.SCATTER_ADD:  # as XLA:CPU of JAX 0.10 writes it
            self.graph.rows |= joined([carried]).near
        # It ends, as sets only grow.
        before: Marks = None
        while carried != before:
            before = carried
            after = _union(carried, self.run(body, (carried,)))
            carried = _with(after, joined([self.run(condition, (after,))]))
        return carried

    def collective(self, x: Instruction, first: Instruction, inputs: list[Marks]) -> list[Marks]:
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

    def step(self, first: Instruction, inputs: list[Marks]) -> Marks:
        """The result of sums of several permutations is known where they end. Until then it is
        marked as one of each.
        """
        sources = (self.graph.bit(Source("collective", i)) for i, _, _ in self.sent[id(first)])
        bits = sum(1 << bit for bit in sources)
        self.rings |= bits
        return joined(inputs) | Mark(bits)

    def _row(self, row: Mark, number: int) -> Mark:
        """A sum of concatenated arrays: one source for each."""
        parts = [(part[1], self._result(number, mark, part=part)) for part, mark in row.parts()]
        return joined([mark for _, mark in parts])._replace(row=tuple(parts))

    def ended(self, value: Mark, number: int) -> Mark:
        """What was added on the way of a chain was sent, too."""
        if not value.any >> self.graph.bit(Source("collective", number)) & 1:
            return value
        others = ~self.rings
        known = Mark(value.any & others, value.near & others, value.product & others)
        return self._result(number, known)

    def unknown(self, inputs: list[Marks]) -> Mark:
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


def joined(values: Sequence[Marks]) -> Mark:
    """What is computed from all of these."""
    return reduce(or_, (mark._replace(row=()) for value in values for mark in flat(value)), NOTHING)


def _union(a: Marks, b: Marks) -> Marks:
    """One of two values."""

    def of_one(a: Marks, b: Marks) -> Mark:
        return joined([a, b]) if tuple in (type(a), type(b)) else a | b

    return each(of_one, a, b)


def _with(value: Marks, chosen_by: Mark) -> Marks:
    """A value that depends on something besides."""
    return each(lambda mark: mark | Mark(chosen_by.any), value) if chosen_by.any else value

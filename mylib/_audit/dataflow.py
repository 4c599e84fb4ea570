"""What each value of a program depends on: arguments, collectives, and the device's own number.

The program is evaluated once, with sets in place of numbers. A set is an integer with a bit for
each source. A collective ends what comes before it: its result depends on the collective, and the
collective on what is given to it. So the program becomes a small graph of arguments, collectives
and results, which `flow.py` reads.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from .._compat import names
from .attribution import UNKNOWN, own_primitive_of, phase_of, phases_in
from .collectives import Transfer
from .hlo import HloModule, Instruction
from .opcodes import Likeness
from .positions import positions
from .values import done_of
from .walk import Walk, shaped


class Mark(NamedTuple):
    """Sets of sources that a value depends on: `any` has all of them, `near` those that it combines
    element by element, and `product` those behind a product of the model or a kernel.
    """

    any: int = 0
    near: int = 0
    product: int = 0


# A mark, or a tuple of these.
Marks = Any
NOTHING = Mark()


class Concatenated(NamedTuple):
    """Arrays that are concatenated into one of one dimension, and where each ends. The GPU's
    compiler sums several gradients in this way.
    """

    ends: tuple[int, ...]
    marks: tuple[Mark, ...]


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
    results = [result] if isinstance(result, Mark | Concatenated) else result
    walk.graph.results = [joined([value]) for value in results]
    return walk.graph


class _Marking(Walk):
    nothing = NOTHING

    def __init__(self, module: HloModule, transfers: Sequence[Transfer], devices: int):
        super().__init__(transfers)
        self.devices = devices
        self.graph = Graph()
        # Where sums that are chains end, and what marks them.
        self.ends = {id(x): i for i, whole in enumerate(transfers) for x in whole.ends}
        self.rings = 0
        # Instructions that depend on the device alone, and the sources that do.
        self.of_device: dict[int, Mark | None] = {}
        self.numbers = 0
        self.depth = 0
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
        if id(x) in self.ends:
            return self._ended(value, self.ends[id(x)])
        if isinstance(value, Mark) and value.any and not value.any & ~self.numbers:
            return self._of_device(x, value)
        return value

    def branch(self, branches: list[Marks], which: Marks) -> Marks:
        return _with(reduce(_joined, branches), Mark(joined([which]).any))

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
        if x.does == "concatenate" and len(x.arrays[0].shape) == 1:
            ends = np.cumsum([y.arrays[0].size for y in x.inputs()]).tolist()
            return Concatenated(tuple(ends), tuple(joined([value]) for value in inputs))
        if isinstance(inputs[0] if inputs else None, Concatenated):
            if x.does == "slice":
                return _sliced(inputs[0], x)
            if row.like >= Likeness.PART and x.arrays[0].shape == x.operand(0).arrays[0].shape:
                return inputs[0]
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
        if x.does == "gather" and not joined(inputs[:1]).product:
            return shaped(x, Mark(mark.any, self.graph.made, mark.product))
        data = inputs[: row.data]
        if x.does == "scatter":
            data = [inputs[0], inputs[-1]]
            self.graph.rows |= joined(inputs[-1:]).near
        return shaped(x, Mark(mark.any, self._near(x, data), mark.product))

    def _use(self, x: Instruction, inputs: list[Marks], phase: str) -> None:
        for operand, value in zip(x.inputs(), inputs, strict=True):
            use = Use(phase, self.depth, sum(array.size for array in operand.arrays))
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
        self.depth += 1
        before: Marks = None
        while carried != before:
            before = carried
            after = _joined(carried, self.run(body, (carried,)))
            until = joined([self.run(condition, (after,))])
            carried = _with(after, Mark(until.any))
        self.depth -= 1
        return carried

    def collective(self, x: Instruction, inputs: list[Marks]) -> Marks:
        first = self.started(x)
        if first is None:  # each device alone
            return inputs[0] if len(inputs) == 1 else tuple(inputs)
        sent = self.sent[id(first)]
        if any(whole.ends for _, whole, _ in sent):
            return self._step(joined(inputs), [number for number, _, _ in sent])
        if len(inputs) == 1 and isinstance(inputs[0], Concatenated) and x.does == "all-reduce":
            return self._row(inputs[0], sent[0][0])
        count = max(1, len(done_of(first).arrays))
        together = count != len(inputs) or x.does.endswith("all-to-all")
        is_chain = any(whole.members for _, whole, _ in sent)
        results: list[Mark] = []
        for element in range(count):
            number = next((i for i, _, t in sent if element in t.elements), sent[0][0])
            operand = joined(inputs if together else inputs[element : element + 1])
            results.append(
                self._result(number, operand if first is x else NOTHING, 0 if is_chain else element)
            )
        return results[0] if count == 1 else tuple(results)

    def _result(
        self, number: int, operand: Mark, element: int = 0, part: tuple[int, int] | None = None
    ) -> Mark:
        """A result of a collective that is given this."""
        result = self.source(Source("collective", number, element, part))
        bit = result.any.bit_length() - 1
        self.graph.into[bit] = _joined(self.graph.into.get(bit, NOTHING), operand)
        return result

    def _step(self, operand: Mark, chains: Sequence[int]) -> Mark:
        """A step of sums of several permutations: their result is known where they end. Until then
        it is marked as one of each.
        """
        bits = sum(1 << self.graph.bit(Source("collective", number)) for number in chains)
        self.rings |= bits
        return Mark(operand.any | bits, operand.near, operand.product)

    def _row(self, row: Concatenated, number: int) -> Concatenated:
        """A sum of concatenated arrays: one source for each."""
        parts = zip((0, *row.ends), row.ends, row.marks, strict=False)
        marks = [self._result(number, mark, part=(start, end)) for start, end, mark in parts]
        return Concatenated(row.ends, tuple(marks))

    def _ended(self, value: Marks, number: int) -> Marks:
        """The result of a chain of permutations: what was added on the way was sent, too."""
        bit = self.graph.bit(Source("collective", number))
        if isinstance(value, Concatenated):
            value = joined([value])
        if not isinstance(value, Mark):
            return tuple(self._ended(element, number) for element in value)
        if not value.any >> bit & 1:
            return value
        return self._result(number, Mark(*(mask & ~self.rings for mask in value)))

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
        labels = np.unique(numbers, return_inverse=True)[1].reshape(-1)
        if not labels.any():
            return NOTHING
        bit = 1 << self.graph.bit(Source("position", labels=tuple(labels.tolist())))
        self.numbers |= bit
        return Mark(bit)


def _sliced(row: Concatenated, x: Instruction) -> Mark:
    """The arrays that a slice takes out of a row."""
    bounds = re.fullmatch(r"\{\[(\d+):(\d+)(:\d+)?\]\}", x.attribute("slice"))
    if bounds is None:
        return joined(row.marks)
    first, last = int(bounds[1]), int(bounds[2])
    parts = zip((0, *row.ends), row.ends, row.marks, strict=False)
    return joined([mark for start, end, mark in parts if start < last and first < end])


def _flat(value: Marks) -> Iterator[Mark]:
    if isinstance(value, Mark):
        yield value
    elif isinstance(value, Concatenated):
        yield from value.marks
    else:
        for element in value:
            yield from _flat(element)


def joined(values: Sequence[Marks]) -> Mark:
    return reduce(_joined, (mark for value in values for mark in _flat(value)), NOTHING)


def _joined(a: Marks, b: Marks) -> Marks:
    if isinstance(a, Mark) and isinstance(b, Mark):
        return a if a == b else Mark(a.any | b.any, a.near | b.near, a.product | b.product)
    if isinstance(a, Concatenated) and isinstance(b, Concatenated) and a.ends == b.ends:
        return Concatenated(a.ends, tuple(map(_joined, a.marks, b.marks)))
    if isinstance(a, Mark | Concatenated) or isinstance(b, Mark | Concatenated):
        return _joined(joined([a]), joined([b]))
    return tuple(map(_joined, a, b))


def _with(value: Marks, mark: Mark) -> Marks:
    if not mark.any:
        return value
    if isinstance(value, Mark | Concatenated):
        return _joined(joined([value]), mark)
    return tuple(_with(element, mark) for element in value)

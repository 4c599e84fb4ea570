"""What each value of a program depends on: arguments, collectives, and the device's own number.

The program is evaluated once, with sets in place of numbers (`walk.py`). A set is an integer with
a bit for each source. A collective ends what comes before it: its result depends on the collective,
and the collective on what is given to it. So the program becomes a small graph of arguments,
collectives and results, which `flow.py` reads.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any, NamedTuple


class Mark(NamedTuple):
    """Sets of sources that a value depends on: `any` has all of them, `near` those that it combines
    element by element, `product` those behind a product of the model or a kernel, and `arrays`
    those that it depends on other than through a single number, such as a norm that all elements
    are divided by, or through indices. `row`: the arrays that are concatenated into this one of one
    dimension, and where each ends. The GPU's compiler sums several gradients in this way.
    """

    any: int = 0
    near: int = 0
    product: int = 0
    arrays: int = 0
    row: "tuple[tuple[int, Mark], ...]" = ()

    def __or__(self, other: "Mark") -> "Mark":
        """Either of two values, or what is computed from both."""
        if self == other:
            return self
        masks = self.any | other.any, self.near | other.near, self.product | other.product
        arrays = self.arrays | other.arrays
        if [end for end, _ in self.row] != [end for end, _ in other.row]:
            return Mark(*masks, arrays)
        row = zip(self.row, other.row, strict=True)
        return Mark(*masks, arrays, tuple((end, a | b) for (end, a), (_, b) in row))

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


def each(change: Callable[..., Marks], *values: Marks) -> Marks:
    """Changes each array, or those at the same place of several values."""
    if all(type(value) is tuple for value in values):
        return tuple(each(change, *parts) for parts in zip(*values, strict=True))
    return change(*values)


def flat(value: Marks) -> list[Marks]:
    """The mark of each array of a value."""
    return [y for x in value for y in flat(x)] if type(value) is tuple else [value]


def joined(values: Sequence[Marks]) -> Mark:
    """What is computed from all of these."""
    return reduce(or_, (mark._replace(row=()) for value in values for mark in flat(value)), NOTHING)


def union(a: Marks, b: Marks) -> Marks:
    """One of two values."""

    def of_one(a: Marks, b: Marks) -> Mark:
        return joined([a, b]) if tuple in (type(a), type(b)) else a | b

    return each(of_one, a, b)


def chosen(value: Marks, chosen_by: Mark) -> Marks:
    """A value that depends on what it is chosen by, too."""
    return each(lambda mark: mark | Mark(chosen_by.any), value) if chosen_by.any else value

"""Which values are the same on all devices, and which collectives lie on the way to a result."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, reduce
from operator import or_
from typing import Literal

import numpy as np

from .attribution import origin
from .collectives import Transfer
from .dataflow import NOTHING, Graph, Source, joined
from .groups import Groups
from .hlo import Array, HloModule
from .moments import Window, windows_of
from .values import Value, computed
from .walk import graph_of

# For each device a number; devices of one number have the same value.
Labels = np.ndarray


class Flow:
    """The way of values through a program. It is followed when it is first asked for."""

    def __init__(
        self, module: HloModule, transfers: Sequence[Transfer], numbers: Sequence[int] = ()
    ):
        self.module: HloModule = module
        self._transfers = transfers
        # Of the devices, in the program's order.
        self.numbers: Sequence[int] = numbers or range(module.devices)
        self.devices: int = module.devices

    @cached_property
    def windows(self) -> list[list[Window]]:
        """The steps of each collective."""
        return windows_of(self.module, self._transfers)

    @cached_property
    def graph(self) -> Graph:
        return graph_of(self.module, self._transfers, self.devices)

    @cached_property
    def sources_of(self) -> Mapping[int, Sequence[int]]:
        """By the number of a collective: its sources, one for each array."""
        sources: dict[int, list[int]] = {i: [] for i in range(len(self._transfers))}
        for bit in self.graph.into:
            sources[self.graph.sources[bit].number].append(bit)
        return sources

    def parameters(self, numbers: Iterable[int]) -> int:
        """The sources that these parameters are, as a set. They are the graph's first, in order."""
        return sum(1 << i for i in numbers)

    def array(self, bit: int) -> Array:
        """The array that a collective returns; of a reduce-scatter the one that it is given."""
        source = self.graph.sources[bit]
        transfer = self._transfers[source.number]
        if transfer.members:
            return transfer.arrays[0]
        if source.part is not None:
            start, end = source.part
            return transfer.arrays[0]._replace(shape=(end - start,))
        return transfer.arrays[transfer.elements.index(source.element)]

    def made_by(self, bit: int) -> tuple[str, str, str]:
        """The line, the primitive and the phase of what a collective is given."""
        source = self.graph.sources[bit]
        operands = self._transfers[source.number].first.inputs()
        operand = operands[min(source.element, len(operands) - 1)]
        if source.part is not None:  # one of several arrays in a row
            row = computed(Value(operand)).made_by.inputs()
            starts = np.cumsum([0, *(x.arrays[0].size for x in row)]).tolist()
            operand = row[starts.index(source.part[0])]
        return origin(operand)

    def scatters(self, bit: int) -> bool:
        """Whether this source is the result of a reduce-scatter."""
        source = self.graph.sources[bit]
        is_sent = source.kind == "collective"
        return is_sent and self._transfers[source.number].kind == "reduce-scatter"

    def is_sum(self, bit: int) -> bool:
        """Whether a collective adds."""
        transfer = self._transfers[self.graph.sources[bit].number]
        if transfer.members:
            return True
        return transfer.first.adds

    def reaching(
        self,
        mask: int,
        by: Literal["any", "near", "arrays"] = "any",
        through: Callable[[int], bool] = lambda bit: True,
    ) -> int:
        """All sources that values depend on, directly or `through` collectives: those in this field
        of their marks.
        """
        reached, new = 0, mask
        while new:
            reached |= new
            passed = filter(through, self.graph.sources_in(new))
            behind = joined([self.graph.into.get(bit, NOTHING) for bit in passed])
            new = getattr(behind, by) & ~reached
        return reached

    @cached_property
    def _combined(self) -> list[tuple[int, int]]:
        """For each result, the sources that it combines element by element: directly, and directly
        or through collectives.
        """
        results = self.graph.results
        return [(mark.near, self.reaching(mark.near, "near")) for mark in results]

    def updated(self, number: int) -> tuple[list[int], list[int]]:
        """The parameters that are combined with what a collective returns into a result, and the
        results into which it goes without any.
        """
        # An update combines a weight with a gradient element by element, as the optimiser does.
        sent = sum(1 << bit for bit in self.sources_of[number] if not self._sums_rows(bit))
        updated: set[int] = set()
        returned: list[int] = []
        for i, (near, all_) in enumerate(self._combined):
            if all_ & sent:
                sources = (self.graph.sources[bit] for bit in self.graph.sources_in(near))
                found = [source.number for source in sources if source.kind == "parameter"]
                updated.update(found)
                returned += [] if found else [i]
        return sorted(updated), returned

    @cached_property
    def _behind_rows(self) -> int:
        return self.reaching(self.graph.rows, "near")

    def _sums_rows(self, bit: int) -> bool:
        """Whether it adds what later becomes rows of a table's gradient: they are gradients of
        activations, in parts as tensor parallelism leaves them.
        """
        return self.is_sum(bit) and bool(self._behind_rows >> bit & 1)

    def activations(self, is_of_model: Callable[[int], bool]) -> int:
        """The collectives that the model computes with: between them and a result lies a product.
        The others sum gradients, or serve the optimiser. `is_of_model` tells it of a product
        without a name, by the sources that it is computed from.
        """
        sinks = [*self.graph.results, *self.graph.into.values()]
        unnamed = filter(is_of_model, {*self.graph.unnamed.values()})
        return self.reaching(reduce(or_, unnamed, joined(sinks).product))

    def labels(self, of_parameter: Callable[[int], Labels]) -> Callable[[int], Labels]:
        """For a set of sources, which devices have the same value, if the parameters are so."""
        labels: dict[int, Labels] = {}
        for bit, source in enumerate(self.graph.sources):
            match source.kind:
                case "parameter":
                    labels[bit] = of_parameter(source.number)
                case "position":
                    labels[bit] = np.array(source.labels)
                case "collective":
                    labels[bit] = np.zeros(self.devices, int)
                case _:  # unknown, so different on all
                    labels[bit] = np.arange(self.devices)

        def joined(mask: int) -> Labels:
            rows = [labels[bit] for bit in self.graph.sources_in(mask)]
            return _alike(rows) if rows else np.zeros(self.devices, int)

        # At first all devices have the same; what differs is found in turns, as a loop's results
        # are given to its own collectives.
        changed = True
        while changed:
            changed = False
            for bit, mark in self.graph.into.items():
                after = self._after(self.graph.sources[bit], joined(mark.any))
                if not np.array_equal(after, labels[bit]):
                    labels[bit], changed = after, True
        return joined

    def _after(self, source: Source, before: Labels) -> Labels:
        """Which devices have the same result of a collective."""
        transfer = self._transfers[source.number]
        groups = transfer.groups
        # Of a reduce-scatter that is an all-reduce and a slice, the slice comes later.
        kind = transfer.kind if transfer.members else transfer.first.sends
        if kind == "collective-permute":
            return _moved(groups, before)
        if transfer.members and kind == "all-gather":  # in a turn each device has another part
            return np.arange(self.devices)
        grouped = before[groups]
        if kind in ("all-reduce", "reduce-scatter"):  # sums of the same in any order
            grouped = np.sort(grouped, 1)
        each = np.unique(grouped, axis=0, return_inverse=True)[1].reshape(-1)
        rows = np.repeat(each[:, None], groups.shape[1], 1)
        # Of others each device of a group has its own part.
        if kind not in ("all-reduce", "all-gather", "broadcast"):
            rows = rows * groups.shape[1] + np.arange(groups.shape[1])
        labels = np.zeros(self.devices, int)
        labels[groups] = rows
        return _alike([labels])

    def is_repeated(self, bit: int, labels: Labels) -> bool:
        """Whether a sum adds the same value several times."""
        number = self.graph.sources[bit].number
        groups = self._transfers[number].groups
        return self.is_sum(bit) and any(len(np.unique(row)) < len(row) for row in labels[groups])


def _alike(rows: Sequence[Labels]) -> Labels:
    """Numbers the devices: two have the same number if they have it in all rows."""
    labels: dict[tuple[int, ...], int] = {}
    columns = zip(*(row.tolist() for row in rows), strict=True)
    return np.array([labels.setdefault(column, len(labels)) for column in columns])


def _moved(pairs: Groups, before: Labels) -> Labels:
    after = np.full(before.shape, -1)
    after[pairs[:, 1]] = before[pairs[:, 0]]
    return _alike([after])

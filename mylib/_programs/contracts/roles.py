"""The roles of a program's arguments and results: weights, the optimiser's state, and data."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ..._core.belongs import Owner, Owners
from ..._core.errors import AuditError
from ..._core.tree import parts_in
from ..audit import ProgramArray, Report, size_of


@dataclass(frozen=True)
class Roles:
    """Which argument is the model, by its name; by default the first."""

    report: Report
    argument: str | None

    @cached_property
    def root(self) -> str:
        if self.argument is not None:
            return self.argument
        if not self.report.parameters:
            raise ValueError(f"{self.report.name} has no arguments")
        return _first(self.report.parameters[0].path)

    @cached_property
    def weights(self) -> list[int]:
        """The numbers of the arguments that are arrays of the model."""
        weights = [
            i
            for i, p in enumerate(self.report.parameters)
            if re.match(rf"{re.escape(self.root)}(?![\w])", p.path)
        ]
        if not weights:
            used = ", ".join(dict.fromkeys(_first(p.path) for p in self.report.parameters))
            raise ValueError(f"{self.report.name} uses arrays of {used}, not of {self.root!r}")
        return weights

    @cached_property
    def state(self) -> dict[int, int | None]:
        """The numbers of the arrays of an optimiser, and the weight that each is the state of. Such
        an array is returned anew, and the model doesn't multiply it, as it does its batch; or it
        is of a second model, placed as the first is.
        """
        weights = set(self.weights)
        of_weights = Owners({i: self.key(i) for i in self.weights})
        others = [i for i in range(len(self.report.parameters)) if i not in weights]
        of = {i: of_weights.of(self.key(i)).only for i in others}
        returned = {i for owner in self._replaced for i in owner.all if self.key(i)}
        multiplied = self.report.flow.activations(lambda _: False)
        copies: dict[str, set[int]] = {}
        for i, weight in of.items():
            if weight is not None and self._is_copy(i, weight):
                copies.setdefault(_first(self._path(i)), set()).add(weight)
        return {
            i: weight
            for i, weight in of.items()
            if (i in returned and not multiplied >> i & 1)
            or (copies.get(_first(self._path(i))) == weights and self._is_copy(i, weight))
        }

    @cached_property
    def _replaced(self) -> list[Owner[int]]:
        """For each result the arguments that it may be the new value of, or the gradient."""
        report, graph = self.report, self.report.flow.graph
        owners = Owners(
            {i: self.key(i) for i in range(len(report.parameters))},
            lambda i: self._form(report.parameters[i]),
        )
        replaced: list[Owner[int]] = []
        for r, mark in zip(report.results, graph.results, strict=True):
            owner = owners.of(parts_in(r.path))
            if owner.all:
                near = {*graph.sources_in(mark.near)}
                owner = owners.of(parts_in(r.path), self._form(r), near)
            replaced.append(owner)
        return replaced

    def _is_copy(self, number: int, weight: int | None) -> bool:
        """Whether an array has the size and the sharding of a weight."""
        p_of = self.report.parameters
        if weight is None or not self.alike(p_of[number], p_of[weight]):
            return False
        return axes_of(p_of[number]) == axes_of(p_of[weight])

    @cached_property
    def data(self) -> list[int]:
        """The numbers of all other arguments, without single numbers."""
        others = {*self.weights, *self.state}
        return [i for i, p in enumerate(self.report.parameters) if i not in others and p.shape]

    @cached_property
    def returned(self) -> dict[int, int]:
        """For the results that are new values of arguments, or gradients: the argument's number."""
        # If it is unknown which, it is more likely to be a weight.
        known = [*self.weights, *self.state]
        each = [next((x for x in known if x in owner.all), None) for owner in self._replaced]
        returned = {i: number for i, number in enumerate(each) if number is not None}
        # A model that is one array.
        for alone in [i for i in self.weights if not self.key(i)]:
            for i, r in enumerate(self.report.results):
                if r.shape and self.alike(r, self.report.parameters[alone]):
                    returned.setdefault(i, alone)
        return returned

    def alike(self, a: ProgramArray, b: ProgramArray) -> bool:
        """Whether two arrays are of the same size, over all devices."""
        return self._form(a) == self._form(b)

    def _form(self, p: ProgramArray) -> tuple[int, int]:
        """Its rank, and its size over all devices."""
        return len(p.shape), self.size(p)

    def size(self, p: ProgramArray) -> int:
        return math.prod(p.shape) * parts(self.report, p, list(self.report.axes))

    @cached_property
    def trained(self) -> dict[int, int]:
        """The results that are new values of weights, or gradients, with the weights' numbers."""
        weights = set(self.weights)
        return {i: number for i, number in self.returned.items() if number in weights}

    def _path(self, number: int) -> str:
        return self.report.parameters[number].path

    def key(self, number: int) -> tuple[str, ...]:
        """A path without the argument's name."""
        return parts_in(self._path(number))[1:]


def _first(path: str) -> str:
    return parts_in(path)[0]


def axes_of(p: ProgramArray) -> tuple[str, ...]:
    """The axes that an array is split over."""
    if p.axes is None:
        raise AuditError(f"the sharding of {p.path} is unknown: audit the compiled program")
    return p.axes


def parts(report: Report, p: ProgramArray, over: Sequence[str]) -> int:
    """The number of parts that these axes split it into."""
    split = axes_of(p)
    return math.prod(size_of(report, axis) for axis in over if axis in split)

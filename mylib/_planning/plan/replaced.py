"""Which arguments of a step its results replace."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ..._core.belongs import Owners, places_of
from ..._core.dims import Nodes
from ..._core.tree import parts_in
from .trace import ArrayIn, TracedStep


@dataclass(frozen=True, eq=False)
class Replaced:
    """An argument is replaced if it is the only one with the tree, the shapes, the dtypes and the
    groups of dimensions of a result. Data flow alone couldn't tell: a model and the anchor of a
    proximal term both reach the new model, element by element.
    """

    traced: TracedStep

    @cached_property
    def _leaves(self) -> dict[tuple[str, ...], ArrayIn]:
        return {parts_in(x.path): x for x in self.traced.leaves}

    @cached_property
    def _fitting(self) -> dict[tuple[str, ...], list[int]]:
        """For each node of the result: the numbers of the arguments that it could replace. Moments
        inside of a state that is replaced have the tree of a model, and replace none.
        """
        results = {parts_in(x.path): _form_of(x) for x in self.traced.results}
        fitting: dict[tuple[str, ...], list[int]] = {}
        for i in range(len(self.traced.step.names)):
            leaves = {path[1:]: x for path, x in self._leaves.items() if path[0] == str(i)}
            # Single numbers are no tree: a loss doesn't replace a learning rate.
            if any(x.aval.shape for x in leaves.values()):
                forms = {path: _form_of(x) for path, x in leaves.items()}
                for node in places_of(forms, results):
                    fitting.setdefault(node, []).append(i)
        return {
            node: numbers
            for node, numbers in fitting.items()
            if not any(node[: len(other)] == other for other in fitting if other != node)
        }

    @cached_property
    def donated(self) -> tuple[str, ...]:
        step = self.traced.step
        alone = {numbers[0] for numbers in self._fitting.values() if len(numbers) == 1}
        return tuple(step.names[i] for i in sorted(alone - {step.batch}))

    @property
    def unclear(self) -> list[list[str]]:
        """The names of arguments, of each of which a result could be the new value."""
        names = self.traced.step.names
        several = dict.fromkeys(tuple(x) for x in self._fitting.values() if len(x) > 1)
        unclear = [[names[i] for i in numbers] for numbers in several]
        return [group for group in unclear if not {*group} & {*self.donated}]

    def alike(self) -> Iterator[tuple[ArrayIn, ArrayIn]]:
        """Each result, with the argument next to which it is kept, or with itself."""
        owners = Owners({x: x for x in self._leaves}, lambda x: _form_of(self._leaves[x]))
        replaced = {n: str(numbers[0]) for n, numbers in self._fitting.items() if len(numbers) == 1}
        for result in self.traced.results:
            path = parts_in(result.path)
            node = next((node for node in replaced if path[: len(node)] == node), None)
            if node is not None:
                yield result, self._leaves[replaced[node], *path[len(node) :]]
            else:
                owner = owners.alike(path, _form_of(result)).all
                yield result, self._leaves[owner[0]] if owner else result


def _form_of(x: ArrayIn) -> tuple[Nodes, tuple[int, ...], str]:
    # A single number can't be split, such as what adafactor keeps in place of moments.
    groups = x.groups if math.prod(x.aval.shape) > 1 else ()
    return groups, tuple(x.aval.shape), str(x.aval.dtype)

"""Which arguments of a step its results replace."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from os.path import commonprefix
from typing import Any

from .calls import argument_of
from .trace import ArrayIn, TracedStep


@dataclass(frozen=True, eq=False)
class Replaced:
    """An argument is replaced if it is the only one with the tree, the shapes, the dtypes and the
    groups of dimensions of a result. Data flow alone couldn't tell: a model and the anchor of a
    proximal term both reach the new model, element by element.
    """

    traced: TracedStep

    @cached_property
    def _fitting(self) -> dict[str, list[int]]:
        """For each node of the result: the numbers of the arguments that it could replace. Moments
        inside of a state that is replaced have the tree of a model, and replace none.
        """
        results, fitting = {x.path: x for x in self.traced.results}, dict[str, list[int]]()
        for i in range(len(self.traced.step.names)):
            leaves = [x for x in self.traced.leaves if argument_of(x.path)[0] == i]
            for node in _nodes({argument_of(x.path)[1]: x for x in leaves}, results):
                fitting.setdefault(node, []).append(i)
        return {
            node: numbers
            for node, numbers in fitting.items()
            if not any(_is_in(node, other) for other in fitting if other != node)
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
        of_path = {leaf.path: leaf for leaf in self.traced.leaves}
        of_form: dict[Any, list[ArrayIn]] = {}
        for leaf in self.traced.leaves:
            of_form.setdefault(_form_of(leaf), []).append(leaf)
        replaced = {n: numbers[0] for n, numbers in self._fitting.items() if len(numbers) == 1}
        for result in self.traced.results:
            node = next((node for node in replaced if _is_in(result.path, node)), None)
            if node is not None:
                yield result, of_path[f"[{replaced[node]}]{result.path[len(node) :]}"]
                continue
            # Of several the one whose path ends in the same way.
            end = result.path[::-1]
            alike = of_form.get(_form_of(result), [result])
            yield result, max(alike, key=lambda x: len(commonprefix([x.path[::-1], end])))


def _form_of(x: ArrayIn) -> tuple[Any, ...]:
    return x.groups, tuple(x.aval.shape), str(x.aval.dtype)


def _is_in(path: str, node: str) -> bool:
    return path.startswith(node) and path[len(node) :][:1] in ("", ".", "[")


def _nodes(leaves: Mapping[str, ArrayIn], results: Mapping[str, ArrayIn]) -> Iterator[str]:
    """The paths of the nodes of the result with these leaves. Single numbers are no tree: a loss
    doesn't replace a learning rate.
    """
    if not any(x.aval.shape for x in leaves.values()):
        return
    forms = {path: _form_of(x) for path, x in leaves.items()}
    first = next(iter(forms))
    ends = [
        x for path, x in results.items() if path.endswith(first) and _form_of(x) == forms[first]
    ]
    for node in [x.path[: len(x.path) - len(first)] for x in ends]:
        inside = {path[len(node) :]: x for path, x in results.items() if _is_in(path, node)}
        if {path: _form_of(x) for path, x in inside.items()} == forms:
            yield node

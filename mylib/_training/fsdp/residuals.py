"""Split residuals: `saved=` of `fully_shard`.

With tensor parallelism each device has the whole input of a layer, and so would save it whole. Here
it saves a part. The layer gathers its input, computes as it would without this, and returns a part
of its result.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import equinox as eqx
import jax
import jax.tree_util as jtu
from jax.core import ShapedArray
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from ..._core.errors import Fault, PlacementError, because
from ..._core.placement import (
    AnyMesh,
    Placement,
    Target,
    axes_in,
    current_world,
    decide,
    restricted,
    sharding_of,
)
from ..._core.tree import Outline, outlined, split
from ..._moving.transfer import place_leaves
from .checkpoint import refuse_memory_kinds
from .gather import of_type

Targets = Sequence[Target | None]
T = TypeVar("T")


@dataclass(frozen=True)
class Residuals:
    """How the inputs of layers are saved: a prefix, which can be hashed like the rest of a layer's
    plan, and the mesh of its specs. `axes` are those over which weights are split where layers use
    them.
    """

    prefix: Outline
    mesh: AnyMesh | None
    axes: frozenset[str]

    @staticmethod
    def of(saved: PyTree[Placement], mesh: AnyMesh | None, used: Targets) -> "Residuals":
        _, prefix = outlined(saved)
        return Residuals(prefix, mesh, frozenset().union(*map(_axes, used)))

    def residual(self, args: Sequence[object], layer: str) -> "Residual":
        """The residual of a layer's call: its first argument."""
        prefix = self.prefix.fill(())

        def refuse(reason: str, fix: str) -> NoReturn:
            request = f"fully_shard(..., saved={prefix!r}), and a call of {layer}"
            raise PlacementError([because(reason, fix, request)])

        if not args:
            refuse(
                "it is called without positional arguments, and `saved` is for the first one",
                "pass the input as the first positional argument",
            )
        leaves = split(args[0], naming=lambda path: f"the input of {layer}{jtu.keystr(path)}")
        decision = decide(leaves, prefix, self.mesh, current_world(), _refuse)
        if decision.faults:
            raise PlacementError(decision.faults)
        if self.axes.isdisjoint(axis for to in decision.targets for axis in _axes(to)):
            axes = ", ".join(map(repr, sorted(self.axes))) or "none"
            refuse(
                "`saved` splits nothing over the axes of tensor parallelism, by which `used` "
                f"splits weights: {axes}",
                "name one of them in the dimension to split, such as the sequence's; or leave out "
                "saved=",
            )
        whole = [to and _without(to, self.axes) for to in decision.targets]
        return Residual(decision.targets, whole, list(map(jax.typeof, leaves.arrays)))


@dataclass(frozen=True)
class Residual:
    """The input of a layer: where it is saved, where the layer computes with it, and its types."""

    saved: Targets
    whole: Targets
    types: Sequence[ShapedArray]

    def split(self, args: Sequence[object]) -> tuple[object, ...]:
        """The arguments as they are saved."""
        return _moved(args[0], self.saved), *args[1:]

    def inside(self, method: Callable[..., object]) -> Callable[..., object]:
        """A layer's method with an input as it is saved, which it gathers. It must be
        rematerialised.
        """

        def gathering(layer: eqx.Module, *args: object, **kwargs: object) -> object:
            saved, *others = self.split(args)
            results = method(layer, _moved(saved, self.whole), *others, **kwargs)
            # Without this the compiler would split values inside of the layer as its result, too,
            # and gather weights over these axes, or exchange queries and keys.
            return self._results_at(self.whole, results)

        return gathering

    def back(self, results: object) -> object:
        """The results as they are saved. On Explicit axes with the input's type, because the carry
        of a scan must keep its type.
        """
        return self._results_at(self.saved, results, with_types=True)

    def _results_at(self, targets: Targets, results: object, with_types: bool = False) -> object:
        """Places each result as the first input that has its shape and dtype and is saved sharded,
        if there is one.
        """
        of_inputs = [
            (of.shape, of.dtype) if target is not None else None
            for of, target in zip(self.types, self.saved, strict=True)
        ]
        leaves = split(results)
        of_results = [(result.shape, result.dtype) for result in leaves.arrays]
        inputs = [of_inputs.index(form) if form in of_inputs else None for form in of_results]
        placed = [None if i is None else targets[i] for i in inputs]
        arrays = place_leaves(leaves, placed, current_world())
        if with_types:
            pairs = zip(arrays, inputs, strict=True)
            arrays = [each if i is None else of_type(each, self.types[i]) for each, i in pairs]
        return leaves.join(arrays)


def _moved(tree: T, targets: Targets) -> T:
    leaves = split(tree)
    return leaves.join(place_leaves(leaves, targets, current_world()))


def _axes(target: Target | None) -> frozenset[str]:
    sharding = None if target is None else sharding_of(target)
    return frozenset(axes_in(sharding.spec) if isinstance(sharding, NamedSharding) else ())


def _without(target: Target, axes: frozenset[str]) -> NamedSharding:
    sharding = sharding_of(target)
    assert isinstance(sharding, NamedSharding)
    return sharding.update(spec=restricted(sharding.spec, axes_in(sharding.spec) - axes))


def _refuse(target: Target) -> Iterator[Fault]:
    if not isinstance(sharding_of(target), NamedSharding):
        yield because("it splits nothing", "write a PartitionSpec or a NamedSharding")
        return
    yield from refuse_memory_kinds(target)

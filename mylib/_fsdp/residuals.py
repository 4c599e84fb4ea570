"""Split residuals: `saved=` of `fully_shard`.

With tensor parallelism each device has the whole input of a layer, and so would save it whole. Here
it saves a part. The layer gathers its input, computes as it would without this, and returns a part
of its result.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.tree_util as jtu
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from .._errors import Fault, PlacementError, because
from .._placement import (
    AnyMesh,
    Placement,
    Target,
    axes_in,
    current_world,
    decide,
    restricted,
    sharding_of,
)
from .._transfer import place_leaves
from .._tree import Outline, outlined, split
from .checkpoint import refuse_memory_kinds
from .gather import of_type

Targets = Sequence[Target | None]


@dataclass(frozen=True)
class Residuals:
    """How the inputs of layers are saved: a prefix, which can be hashed like the rest of a layer's
    plan, and the mesh of its specs. `axes` are those over which weights are split where layers use
    them.
    """

    prefix: Outline
    mesh: AnyMesh | None
    axes: frozenset[Any]

    @staticmethod
    def of(saved: PyTree[Placement], mesh: AnyMesh | None, used: Targets) -> "Residuals":
        _, prefix = outlined(saved)
        return Residuals(prefix, mesh, frozenset().union(*map(_axes, used)))

    def residual(self, args: Sequence[Any], layer: str) -> "Residual":
        """The residual of a layer's call: its first argument."""
        prefix = self.prefix.fill(())
        if not args:
            raise PlacementError([_without_input(layer, prefix)])
        leaves = split(args[0], naming=lambda path: f"the input of {layer}{jtu.keystr(path)}")
        decision = decide(leaves, prefix, self.mesh, current_world(), _refuse)
        faults = decision.faults
        named = frozenset().union(*map(_axes, decision.targets))
        if not faults and not named & self.axes:
            faults = [_splits_nothing(layer, prefix, self.axes)]
        if faults:
            raise PlacementError(faults)
        whole = [t and _without(t, self.axes) for t in decision.targets]
        return Residual(decision.targets, whole, [jax.typeof(x) for x in leaves.arrays])


@dataclass(frozen=True)
class Residual:
    """The input of a layer: where it is saved, where the layer computes with it, and its types."""

    saved: Targets
    whole: Targets
    types: Sequence[Any]

    def split(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments as they are saved."""
        return _moved(args[0], self.saved), *args[1:]

    def inside(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A layer's method with an input as it is saved, which it gathers. It must be
        rematerialised.
        """

        def gathering(layer: Any, *args: Any, **kwargs: Any) -> Any:
            x, *others = self.split(args)
            results = method(layer, _moved(x, self.whole), *others, **kwargs)
            # Without this the compiler would split values inside of the layer as its result, too,
            # and gather weights over these axes, or exchange queries and keys.
            return self._results_at(self.whole, results)

        return gathering

    def back(self, results: Any) -> Any:
        """The results as they are saved. On Explicit axes with the input's type, because the carry
        of a scan must keep its type.
        """
        return self._results_at(self.saved, results, with_types=True)

    def _results_at(self, targets: Targets, results: Any, with_types: bool = False) -> Any:
        """Places each result as the first input that has its shape and dtype and is saved sharded,
        if there is one.
        """
        of_inputs = [
            (x.shape, x.dtype) if target is not None else None
            for x, target in zip(self.types, self.saved, strict=True)
        ]
        leaves = split(results)
        of_results = [(x.shape, x.dtype) for x in leaves.arrays]
        inputs = [of_inputs.index(x) if x in of_inputs else None for x in of_results]
        placed = [None if i is None else targets[i] for i in inputs]
        arrays = place_leaves(leaves, placed, current_world())
        if with_types:
            pairs = zip(arrays, inputs, strict=True)
            arrays = [x if i is None else of_type(x, self.types[i]) for x, i in pairs]
        return leaves.join(arrays)


def _moved(tree: Any, targets: Targets) -> Any:
    leaves = split(tree)
    return leaves.join(place_leaves(leaves, targets, current_world()))


def _axes(target: Target | None) -> frozenset[Any]:
    sharding = None if target is None else sharding_of(target)
    return frozenset(axes_in(sharding.spec) if isinstance(sharding, NamedSharding) else ())


def _without(target: Target, axes: frozenset[Any]) -> NamedSharding:
    sharding = sharding_of(target)
    assert isinstance(sharding, NamedSharding)
    return sharding.update(spec=restricted(sharding.spec, axes_in(sharding.spec) - axes))


def _refuse(target: Target) -> Iterator[Fault]:
    if not isinstance(sharding_of(target), NamedSharding):
        yield because("it splits nothing", "write a PartitionSpec or a NamedSharding")
        return
    yield from refuse_memory_kinds(target)


def _splits_nothing(layer: str, prefix: Any, axes: frozenset[Any]) -> Fault:
    asked = f"fully_shard(..., saved={prefix!r}), and a call of {layer}"
    if not axes:
        return because(
            "`used` splits no weights, so each device has only its own part of a layer's input",
            "leave out saved=, or give `used` a rule that splits weights (tensor parallelism)",
            asked,
        )
    names = " and ".join(map(repr, sorted(axes)))
    return because(
        f"`used` splits weights over {names}, and `saved` splits nothing over them",
        f"name {names} in the dimension to split, such as the sequence's: "
        f"saved=P(..., {next(iter(sorted(axes)))!r})",
        asked,
    )


def _without_input(layer: str, prefix: Any) -> Fault:
    return because(
        "it is called without positional arguments, and `saved` is the placement of the first",
        "pass the input as the first positional argument",
        f"fully_shard(..., saved={prefix!r}), and a call of {layer}",
    )

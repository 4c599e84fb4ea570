"""`like`: places leaves as in another tree."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.tree_util import GetAttrKey
from jaxtyping import PyTree

from ..belongs import Owner, Owners
from ..compat import sharding_under
from ..errors import Fault, because
from ..placement import PASS, AnyMesh, Target, sharding_of
from ..tree import Kind, Leaf, parts_of, spelled, split
from .rule import Rule

Parts = tuple[str, ...]


def like(tree: PyTree[Any], /) -> Rule:
    """Places leaves where another tree has leaves with the same path and shape.

    A leaf also matches another one whose path is the end of its own, so that an optimiser state
    follows its model: `opt_state[0].mu.layers[0].weight` goes where `.layers[0].weight` is. The
    longest matching path counts, and a list index alone is not a path. Where no end matches, keys
    may stand inside of the path, as in the states of a tuple of models: `[1][0].mu.weight` goes
    where `[1].weight` is. For other leaves the rule returns PASS, except that those of rank 0 are
    replicated, if the whole tree is on one mesh.

    **Arguments:**

    - `tree`: arrays on devices, or `jax.ShapeDtypeStruct`s with a sharding. The rule keeps only
        shapes and shardings, not the arrays.

    **Returns:**

    A `mylib.rules.Rule`.

    **Raises:**

    `ValueError` if no array of the tree has a sharding.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=8)
        model = eqx.nn.MLP(64, 64, 512, 1, key=jax.random.key(0))
        model = mylib.filter_shard(model, mylib.rules.fsdp("data"), mesh=mesh)
        state = optax.adamw(1e-3).init(eqx.filter(model, eqx.is_array))
        state = mylib.filter_shard(state, mylib.rules.like(model))
        assert (
            state[0].mu.layers[0].weight.sharding == model.layers[0].weight.sharding
        )
        ```
    """
    leaves = split(tree)
    targets: dict[tuple[Parts, tuple[int, ...]], Target] = {}
    for path, x, kind in zip(leaves.paths, leaves.arrays, leaves.kinds, strict=True):
        target = _target_of(x, kind)
        if target is not None:
            targets[parts_of(path), tuple(x.shape)] = target
    if not targets:
        raise ValueError(
            "like(tree): no array of the tree has a sharding to follow. Place it first, or give "
            "`jax.ShapeDtypeStruct`s with shardings"
        )
    return Like(targets)


def _target_of(x: Any, kind: Kind) -> Target | None:
    if kind is Kind.ABSTRACT:
        return x.format if x.format.layout is not None else x.sharding
    if kind is Kind.TRACED:
        sharding = jax.typeof(x).sharding
        return None if sharding.mesh.empty else sharding
    place = sharding_under(x)
    return place if isinstance(place, Sharding) else None


@dataclass(frozen=True, repr=False, eq=False)
class Like(Rule):
    targets: dict[tuple[Parts, tuple[int, ...]], Target]

    def __call__(self, leaf: Leaf) -> Any:
        found = self._owner(leaf).only
        if found is not None:
            return self.targets[found]
        everywhere = self._everywhere
        return PASS if leaf.ndim or everywhere is None else everywhere

    def why(self, leaf: Leaf) -> str:
        found = self._owner(leaf).only
        if found is not None:
            return f"like {spelled(found[0]) or 'the array'}"
        return "like no other leaf" if self(leaf) is PASS else "a leaf of rank 0"

    def _unmatched(self, leaves: Sequence[Leaf]) -> Sequence[Fault]:
        # Shapes may differ: all factored moments may have other shapes than their weights.
        if any(self._owner(leaf, any_shape=True).all for leaf in leaves):
            return []
        reason = f"no path of the {len(leaves)} leaves is, or ends like, a path of that tree"
        fix = f"give a tree with such paths: this one has {'.'.join(next(iter(self.targets))[0])!r}"
        return [because(reason, fix, repr(self))]

    @cached_property
    def _owners(self) -> Owners[tuple[Parts, tuple[int, ...]]]:
        return Owners({key: key[0] for key in self.targets}, lambda key: key[1])

    def _owner(self, leaf: Leaf, any_shape: bool = False) -> Owner[Any]:
        """An end of only list indices counts only after a field, as for the moments of `[weight,
        bias]` in `.mu`.
        """
        form = None if any_shape else leaf.shape
        is_field = [isinstance(key, GetAttrKey) for key in leaf.path].__getitem__
        return self._owners.of(leaf.parts, form, is_field=is_field)

    @property
    def _everywhere(self) -> Sharding | None:
        """The sharding of replicated leaves, if the tree is on one mesh or one device."""
        shardings = map(sharding_of, self.targets.values())
        first, *others = {s.mesh if isinstance(s, NamedSharding) else s for s in shardings}
        if others or not isinstance(first, AnyMesh | SingleDeviceSharding):
            return None
        return first if isinstance(first, Sharding) else NamedSharding(first, PartitionSpec())

    def __repr__(self) -> str:
        return f"like(a tree of {len(self.targets)} arrays)"

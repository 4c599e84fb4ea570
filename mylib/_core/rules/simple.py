"""Rules that depend only on shapes."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import PartitionSpec

from ..errors import Fault
from ..placement import AnyMesh, axis_names, is_rule, trimmed, unfit_spec
from ..text import show_spec
from ..tree import Leaf
from .axes import dimensions_in_front
from .rule import AnyRule, Axes, Rule, as_rule, free_dimensions, used_axes, with_entry

_WHOLE = PartitionSpec()


def replicated() -> Rule:
    """Copies every leaf to every device of the mesh.

    **Returns:**

    A `mylib.rules.Rule`. At the end of a chain, `... | replicated()`, it replicates all leaves
    that no other rule decides.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=8)
        model = eqx.nn.MLP(8, 8, 64, 1, key=jax.random.key(0))
        model = mylib.filter_shard(model, mylib.rules.replicated(), mesh=mesh)
        ```
    """
    return Replicated(_WHOLE)


def batch(axis: Axes) -> Rule:
    """Splits the first dimension of every leaf over a mesh axis; leaves of rank 0 are copied.

    For batches, whose arrays may have different ranks.

    **Arguments:**

    - `axis`: the mesh axis, or a tuple of them.

    **Returns:**

    A `mylib.rules.Rule`.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=8)
        examples = {"image": np.zeros((16, 28, 28)), "label": np.zeros(16)}
        examples = mylib.filter_shard(examples, mylib.rules.batch("data"), mesh=mesh)
        ```
    """
    return Batch(checked_axis("batch", axis))


@dataclass(frozen=True, repr=False)
class Batch(Rule):
    axis: Axes

    def __call__(self, leaf: Leaf) -> PartitionSpec:
        return PartitionSpec(self.axis) if leaf.ndim else _WHOLE

    def why(self, leaf: Leaf) -> str:
        return f"{self!r}: " + ("the first dimension" if leaf.ndim else "a leaf of rank 0")

    def __repr__(self) -> str:
        return f"batch({self.axis!r})"


def fsdp(axis: Axes, *, min_size: int = 2**12, stacked: type | tuple[type, ...] = ()) -> Rule:
    """Shards the largest dimension that the axis divides; of equal ones, the first. To gather the
    layers of a model sharded this way, use `mylib.fully_shard`.

    The dimension of stacked layers, which `jax.lax.scan` iterates over, is never sharded: each
    iteration would gather all of them. It is detected if a leaf has more dimensions than its
    jaxtyping annotation, or than `eqx.nn`'s layers have (those of `mylib.rules.by_axes`); for
    other layers use `stacked`.

    A leaf without such a dimension, or with fewer than `min_size` elements, is replicated;
    `mylib.explain` shows it.

    On the right of `&` it chooses among the dimensions that the left rule leaves unsharded:
    `by_path(...) & fsdp("data")`.

    **Arguments:**

    - `axis`: the mesh axis, or a tuple of them.
    - `min_size`: the fewest elements of a leaf worth sharding: gathering a small one costs almost
        as much as a large one, and saves little memory.
    - `stacked`: the class of stacked layers, or a tuple of classes: the first dimension of all
        arrays in them is that of the layers.

    **Returns:**

    A `mylib.rules.Rule`.

    **Raises:**

    `TypeError` if `stacked` is neither a class nor a tuple of classes.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=8)
        model = eqx.nn.MLP(64, 64, 512, 1, key=jax.random.key(0))
        model = mylib.filter_shard(model, mylib.rules.fsdp("data"), mesh=mesh)
        assert model.layers[0].weight.sharding.spec == P("data")
        ```
    """
    classes = stacked if isinstance(stacked, tuple) else (stacked,)
    if not all(isinstance(cls, type) for cls in classes):
        raise TypeError(f"fsdp: stacked={stacked!r} is not a class, nor a tuple of classes")
    return Fsdp(checked_axis("fsdp", axis), min_size, classes)


@dataclass(frozen=True, repr=False)
class Fsdp(Rule):
    axis: Axes
    min_size: int
    stacked: tuple[type, ...] = ()

    def __call__(self, leaf: Leaf) -> PartitionSpec:
        return self.fill(leaf, _WHOLE)

    def fill(self, leaf: Leaf, spec: PartitionSpec) -> PartitionSpec:
        parts = number_of_parts(self.axis, leaf.mesh)
        if parts is None or self._is_small(leaf):
            return spec
        if used_axes(spec).intersection(axis_names(self.axis)):
            return spec
        free = free_dimensions(spec, leaf.ndim)
        sizes = leaf.shape
        # Symbolic sizes, as in `jax.export`, are unknown.
        dims = [dim for dim in free if isinstance(sizes[dim], int) and not sizes[dim] % parts]
        if dims:
            # Only now: finding the annotation of a leaf takes longer than all the rest.
            layers = self._layers(leaf)
            dims = [dim for dim in dims if dim >= layers]
        if not dims:
            return spec
        return with_entry(spec, max(dims, key=lambda dim: leaf.shape[dim]), self.axis)

    def contradictions(self, leaves: Sequence[Leaf]) -> Sequence[Fault]:
        # One fault for the rule, not one per leaf. Small leaves alone would not show it.
        meshes = {leaf.mesh for leaf in leaves} - {None}
        unknown = [fault for mesh in meshes for fault in unfit_spec(PartitionSpec(self.axis), mesh)]
        return [replace(fault, request=repr(self)) for fault in unknown]

    def _layers(self, leaf: Leaf) -> int:
        """The number of dimensions of stacked layers."""
        in_front = dimensions_in_front(leaf)
        if in_front or not self.stacked:
            return in_front
        return int(any(issubclass(owner, self.stacked) for owner, _ in leaf.owners))

    def _is_small(self, leaf: Leaf) -> bool:
        # Symbolic sizes, as in `jax.export`, are unknown.
        return all(isinstance(n, int) for n in leaf.shape) and leaf.size < self.min_size

    def why(self, leaf: Leaf) -> str:
        if self._is_small(leaf):
            return f"{self!r}: replicated, fewer than {self.min_size} elements"
        parts = number_of_parts(self.axis, leaf.mesh)
        if parts is None:
            return f"{self!r}: replicated, there is no such axis"
        if self(leaf) == _WHOLE:
            return f"{self!r}: replicated, {parts} divides no dimension"
        behind = ", behind that of the stacked layers" if self._layers(leaf) else ""
        return f"{self!r}: the largest free dimension{behind}"

    def __repr__(self) -> str:
        min_size = "" if self.min_size == 2**12 else f", min_size={self.min_size}"
        names = ", ".join(cls.__qualname__ for cls in self.stacked)
        stacked = f", stacked=({names})" if self.stacked else ""
        return f"fsdp({self.axis!r}{min_size}{stacked})"


def where_even(rule: AnyRule | PartitionSpec) -> Rule:
    """Another rule, but dimensions that the mesh axes don't divide stay unsharded, and raise no
    error.

    **Arguments:**

    - `rule`: the other rule, or one `PartitionSpec` for all leaves.

    **Returns:**

    A `mylib.rules.Rule`, which changes `PartitionSpec`s alone. `mylib.explain` shows the
    leaves that it changed.

    **Raises:**

    `TypeError` if `rule` is neither a rule nor a `PartitionSpec`.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=8)
        rule = mylib.rules.where_even(mylib.rules.batch("data"))
        last = mylib.filter_shard(np.zeros((13, 4)), rule, mesh=mesh)
        assert last.sharding.is_fully_replicated
        ```
    """
    return WhereEven(as_rule_or_spec("where_even", rule))


@dataclass(frozen=True, repr=False)
class Always(Rule):
    spec: PartitionSpec

    def __call__(self, leaf: Leaf) -> PartitionSpec:
        return self.spec

    def __repr__(self) -> str:
        return show_spec(self.spec)


class Replicated(Always):
    def __repr__(self) -> str:
        return "replicated()"


def as_rule_or_spec(name: str, rule: AnyRule | PartitionSpec) -> Rule:
    """What a rule of this name was given: another rule, or a spec for all leaves."""
    if isinstance(rule, PartitionSpec):
        return Always(rule)
    if not is_rule(rule):
        raise TypeError(f"{name} takes a rule or a PartitionSpec, not {rule!r}")
    return as_rule(rule)


@dataclass(frozen=True, repr=False)
class WhereEven(Rule):
    rule: Rule

    def __call__(self, leaf: Leaf) -> Any:
        spec = self.rule(leaf)
        return _without(spec, _uneven(spec, leaf)) if isinstance(spec, PartitionSpec) else spec

    def fill(self, leaf: Leaf, spec: PartitionSpec) -> PartitionSpec:
        filled = self.rule.fill(leaf, spec)
        # Keep the other rule's entries, even if they don't divide.
        added = set(free_dimensions(spec, leaf.ndim))
        return _without(filled, added.intersection(_uneven(filled, leaf)))

    def why(self, leaf: Leaf) -> str:
        spec = self.rule(leaf)
        uneven = _uneven(spec, leaf) if isinstance(spec, PartitionSpec) else []
        parts = [(number_of_parts(spec.partitions[dim], leaf.mesh), dim) for dim in uneven]
        changes = [f"not sharded, as {n} does not divide {leaf.shape[dim]}" for n, dim in parts]
        return "; ".join([self.rule.why(leaf), *changes])

    def _parts(self, leaves: Sequence[Leaf]) -> Iterable[tuple[Rule, Sequence[Leaf]]]:
        return [(self.rule, leaves)]

    def __repr__(self) -> str:
        return f"where_even({self.rule!r})"


def checked_axis(name: str, axis: Any) -> Axes:
    """The mesh axes that a rule of this name was given."""
    names = axis_names(axis)
    if not names or not all(isinstance(n, str) for n in names):
        raise TypeError(f"{name}: {axis!r} is not a mesh axis; write a name, or several")
    return tuple(axis) if isinstance(axis, list) else axis


def number_of_parts(entry: Any, mesh: AnyMesh | None) -> int | None:
    """The number of parts that `entry` splits a dimension into; None without a mesh that has its
    axes, which is reported as a fault of the spec.
    """
    names = axis_names(entry)
    if mesh is None or not set(names) <= set(mesh.axis_names):
        return None
    return math.prod(mesh.shape[name] for name in names)


def _uneven(spec: PartitionSpec, leaf: Leaf) -> list[int]:
    # Symbolic sizes, as in `jax.export`, may be even.
    return [
        dim
        for dim, (entry, size) in enumerate(zip(spec.partitions, leaf.shape, strict=False))
        if isinstance(size, int) and size % (number_of_parts(entry, leaf.mesh) or 1)
    ]


def _without(spec: PartitionSpec, dims: Collection[int]) -> PartitionSpec:
    entries = [None if dim in dims else entry for dim, entry in enumerate(spec.partitions)]
    return spec.update(partitions=trimmed(entries)) if dims else spec

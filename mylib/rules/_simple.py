"""Rules that depend only on shapes."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.experimental.layout import Format
from jax.sharding import NamedSharding, PartitionSpec

from .._errors import Fault
from .._placement import AnyMesh, axis_names, is_rule, trimmed, unfit_spec
from .._text import show_spec
from .._tree import Leaf
from ._axes import dimensions_in_front
from ._rule import AnyRule, Axes, Rule, as_rule, free_dimensions, makes_rules, used_axes, with_entry

_WHOLE = PartitionSpec()


@makes_rules("replicated()")
def replicated() -> Rule:
    """Copies every leaf to every device of the mesh.

    **Returns:**

    A [`mylib.rules.Rule`][]. At the end of a chain, `... | replicated()`, it replicates all leaves
    that no other rule decides.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=8)
        model = eqx.nn.MLP(8, 8, 64, 1, key=jax.random.key(0))
        model = mylib.filter_shard(model, mylib.rules.replicated(), mesh=mesh)
        ```
    """
    return Replicated()


@dataclass(frozen=True, repr=False)
class Replicated(Rule):
    def __call__(self, leaf: Leaf) -> PartitionSpec:
        return _WHOLE

    def __repr__(self) -> str:
        return "replicated()"


@makes_rules("batch('data')")
def batch(axis: Axes) -> Rule:
    """Splits the first dimension of every leaf over a mesh axis; leaves of rank 0 are copied.

    For batches, whose arrays may have different ranks.

    **Arguments:**

    - `axis`: the mesh axis, or a tuple of them.

    **Returns:**

    A [`mylib.rules.Rule`][].

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


@makes_rules("fsdp('data')")
def fsdp(axis: Axes, *, min_size: int = 2**12, stacked: type | tuple[type, ...] = ()) -> Rule:
    """Shards the largest dimension that the axis divides; of equal ones, the first. To gather the
    layers of a model sharded this way, use [`mylib.fully_shard`][].

    The dimension of stacked layers, which `jax.lax.scan` iterates over, is never sharded: each
    iteration would gather all of them. It is detected if a leaf has more dimensions than its
    jaxtyping annotation, or than `eqx.nn`'s layers have (those of [`mylib.rules.by_axes`][]); for
    other layers use `stacked`.

    A leaf without such a dimension, or with fewer than `min_size` elements, is replicated;
    [`mylib.explain`][] shows it.

    On the right of `&` it chooses among the dimensions that the left rule leaves unsharded:
    `by_path(...) & fsdp("data")`.

    **Arguments:**

    - `axis`: the mesh axis, or a tuple of them.
    - `min_size`: the fewest elements of a leaf worth sharding: gathering a small one costs almost
        as much as a large one, and saves little memory.
    - `stacked`: the class of stacked layers, or a tuple of classes: the first dimension of all
        arrays in them is that of the layers.

    **Returns:**

    A [`mylib.rules.Rule`][].

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
        dims = [dim for dim in free if _is_multiple(leaf.shape[dim], parts)]
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


@makes_rules("where_even(P('data'))")
def where_even(rule: AnyRule | PartitionSpec | NamedSharding | Format) -> Rule:
    """Another rule, but dimensions that the mesh axes don't divide stay unsharded, and raise no
    error.

    **Arguments:**

    - `rule`: the other rule; or one placement for all leaves, a `PartitionSpec`, a `NamedSharding`
        or a `Format`.

    **Returns:**

    A [`mylib.rules.Rule`][]. [`mylib.explain`][] shows the leaves that it changed.

    **Raises:**

    `TypeError` if `rule` is none of these.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=8)
        rule = mylib.rules.where_even(mylib.rules.batch("data"))
        last = mylib.filter_shard(np.zeros((13, 4)), rule, mesh=mesh)
        assert last.sharding.is_fully_replicated
        ```
    """
    if isinstance(rule, PartitionSpec | NamedSharding | Format):
        return WhereEven(Always(rule))
    if not is_rule(rule):
        raise TypeError(
            f"where_even takes a rule, a PartitionSpec or a NamedSharding, not {rule!r}"
        )
    return WhereEven(as_rule(rule))


@dataclass(frozen=True, repr=False)
class Always(Rule):
    placement: PartitionSpec | NamedSharding | Format

    def __call__(self, leaf: Leaf) -> PartitionSpec | NamedSharding | Format:
        return self.placement

    def __repr__(self) -> str:
        return show_spec(self.placement)


@dataclass(frozen=True, repr=False)
class WhereEven(Rule):
    rule: Rule

    def __call__(self, leaf: Leaf) -> Any:
        placement = self.rule(leaf)
        spec, mesh = _spec_of(placement, leaf)
        if spec is None or not (uneven := _uneven(spec, leaf, mesh)):
            return placement
        return _with_spec(placement, _without(spec, uneven))

    def fill(self, leaf: Leaf, spec: PartitionSpec) -> PartitionSpec:
        filled = self.rule.fill(leaf, spec)
        # Keep the other rule's entries, even if they don't divide.
        added = set(free_dimensions(spec, leaf.ndim))
        return _without(filled, added.intersection(_uneven(filled, leaf, leaf.mesh)))

    def why(self, leaf: Leaf) -> str:
        reason = self.rule.why(leaf)
        spec, mesh = _spec_of(self.rule(leaf), leaf)
        if spec is None:
            return reason
        return reason + "".join(
            f"; not sharded, as {number_of_parts(spec.partitions[dim], mesh)} does not divide "
            f"{leaf.shape[dim]}"
            for dim in _uneven(spec, leaf, mesh)
        )

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


def _spec_of(placement: Any, leaf: Leaf) -> tuple[PartitionSpec | None, AnyMesh | None]:
    """The spec of a placement, and its mesh."""
    if isinstance(placement, PartitionSpec):
        return placement, leaf.mesh
    sharding = placement.sharding if isinstance(placement, Format) else placement
    return (sharding.spec, sharding.mesh) if isinstance(sharding, NamedSharding) else (None, None)


def _with_spec(placement: Any, spec: PartitionSpec) -> Any:
    if isinstance(placement, Format):
        return Format(placement.layout, _with_spec(placement.sharding, spec))
    return placement.update(spec=spec) if isinstance(placement, NamedSharding) else spec


def _uneven(spec: PartitionSpec, leaf: Leaf, mesh: AnyMesh | None) -> list[int]:
    # Symbolic sizes, as in `jax.export`, may be even.
    return [
        dim
        for dim, (entry, size) in enumerate(zip(spec.partitions, leaf.shape, strict=False))
        if isinstance(size, int) and not _is_multiple(size, number_of_parts(entry, mesh) or 1)
    ]


def _is_multiple(size: Any, parts: int) -> bool:
    return isinstance(size, int) and size % parts == 0


def _without(spec: PartitionSpec, dims: Collection[int]) -> PartitionSpec:
    entries = [None if dim in dims else entry for dim, entry in enumerate(spec.partitions)]
    return spec.update(partitions=trimmed(entries)) if dims else spec

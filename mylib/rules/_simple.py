"""Rules that look at shapes alone."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from jax.experimental.layout import Format
from jax.sharding import NamedSharding, PartitionSpec

from .._errors import Fault
from .._placement import AnyMesh, axis_names, entries_of, is_rule, unfit_spec, with_entries
from .._tree import Leaf
from ._axes import dimensions_in_front
from ._rule import AnyRule, Axes, Rule, as_rule, free_dimensions, trimmed, used_axes, with_entry


def replicated() -> Rule:
    """Copies every leaf to every device of the mesh.

    **Returns:**

    A [`mylib.rules.Rule`][]. At the end of a chain, `... | replicated()`, it says what becomes of
    the leaves on which nothing else has an opinion.

    !!! Example

        ```python
        mesh = jax.make_mesh((8,), ("data",))
        model = eqx.nn.MLP(8, 8, 64, 1, key=jax.random.key(0))
        model = mylib.filter_shard(model, mylib.rules.replicated(), mesh=mesh)
        ```
    """
    return Replicated()


@dataclass(frozen=True, repr=False)
class Replicated(Rule):
    def __call__(self, leaf: Leaf) -> PartitionSpec:
        return PartitionSpec()

    def __repr__(self) -> str:
        return "replicated()"


def batch(axis: Axes) -> Rule:
    """Splits the first dimension of every leaf over a mesh axis; leaves of rank 0 are copied.

    For batches, whose arrays may have different ranks.

    **Arguments:**

    - `axis`: the mesh axis, or a tuple of them.

    **Returns:**

    A [`mylib.rules.Rule`][].

    !!! Example

        ```python
        mesh = jax.make_mesh((8,), ("data",))
        examples = {"image": np.zeros((16, 28, 28)), "label": np.zeros(16), "scale": np.ones(())}
        examples = mylib.filter_shard(examples, mylib.rules.batch("data"), mesh=mesh)
        ```
    """
    return Batch(_checked("batch", axis))


@dataclass(frozen=True, repr=False)
class Batch(Rule):
    axis: Axes

    def __call__(self, leaf: Leaf) -> PartitionSpec:
        return PartitionSpec(self.axis) if leaf.ndim else PartitionSpec()

    def why(self, leaf: Leaf) -> str:
        return f"{self!r}: " + ("the first dimension" if leaf.ndim else "a leaf of rank 0")

    def __repr__(self) -> str:
        return f"batch({self.axis!r})"


def fsdp(axis: Axes, *, min_size: int = 2**12, stacked: type | tuple[type, ...] = ()) -> Rule:
    """Shards the largest dimension that the axis divides, the first of equals. How the layers of a
    model come to gather what is kept so: [`mylib.fully_shard`][].

    The dimension of stacked layers, over which `jax.lax.scan` goes, is never sharded: each turn of
    the loop would gather all of them. It is known as such where a leaf has more dimensions than its
    jaxtyping annotation, or than `eqx.nn`'s layers have (those of [`mylib.rules.by_axes`][]); of
    others `stacked` tells.

    A leaf with no such dimension, or with fewer than `min_size` elements, is replicated;
    [`mylib.explain`][] says so.

    On the right of `&` it chooses among the dimensions that the rule on the left leaves whole:
    `by_path(...) & fsdp("data")`.

    **Arguments:**

    - `axis`: the mesh axis, or a tuple of them.
    - `min_size`: how many elements a leaf must have to be worth sharding: a small one is gathered
        for little less than a large one costs, and saves nothing.
    - `stacked`: the class of layers that are stacked, or a tuple of classes: the first dimension of
        whatever is in them is that of the layers.

    **Returns:**

    A [`mylib.rules.Rule`][].

    !!! Example

        ```python
        mesh = jax.make_mesh((8,), ("data",))
        model = eqx.nn.MLP(64, 64, 512, 1, key=jax.random.key(0))
        model = mylib.filter_shard(model, mylib.rules.fsdp("data"), mesh=mesh)
        assert model.layers[0].weight.sharding.spec == P("data")
        ```
    """
    classes = stacked if isinstance(stacked, tuple) else (stacked,)
    if not all(isinstance(cls, type) for cls in classes):
        raise TypeError(f"fsdp: stacked={stacked!r} is not a class, nor a tuple of classes")
    return Fsdp(_checked("fsdp", axis), min_size, classes)


@dataclass(frozen=True, repr=False)
class Fsdp(Rule):
    axis: Axes
    min_size: int
    stacked: tuple[type, ...] = ()

    def __call__(self, leaf: Leaf) -> PartitionSpec:
        return self.fill(leaf, PartitionSpec())

    def fill(self, leaf: Leaf, spec: PartitionSpec) -> PartitionSpec:
        taken = used_axes(spec).intersection(axis_names(self.axis))
        if taken or self._is_small(leaf) or parts_of_axes(self.axis, leaf.mesh) is None:
            return spec
        layers = self._layers(leaf)
        dims = [
            dim
            for dim in free_dimensions(spec, leaf.ndim)
            if dim >= layers and _divides(self.axis, leaf, dim, leaf.mesh)
        ]
        if not dims:
            return spec
        return with_entry(spec, max(dims, key=lambda dim: leaf.shape[dim]), self.axis)

    def contradictions(self, leaves: Sequence[Leaf]) -> Sequence[Fault]:
        # One fault of the rule, not one of every leaf; and none of small leaves would show it.
        meshes = {leaf.mesh for leaf in leaves} - {None}
        unknown = [fault for mesh in meshes for fault in unfit_spec(PartitionSpec(self.axis), mesh)]
        return [Fault("", None, repr(self), reason, mend) for reason, mend in unknown]

    def _layers(self, leaf: Leaf) -> int:
        """How many dimensions are those of stacked layers."""
        told = any(issubclass(owner, self.stacked) for owner, _ in leaf.owners)
        return max(dimensions_in_front(leaf), int(told))

    def _is_small(self, leaf: Leaf) -> bool:
        # A symbolic size, as in `jax.export`, may be anything.
        return all(isinstance(n, int) for n in leaf.shape) and leaf.size < self.min_size

    def why(self, leaf: Leaf) -> str:
        if self._is_small(leaf):
            return f"{self!r}: replicated, fewer than {self.min_size} elements"
        parts = parts_of_axes(self.axis, leaf.mesh)
        if parts is None:
            return f"{self!r}: replicated, there is no such axis"
        if self(leaf) == PartitionSpec():
            return f"{self!r}: replicated, {parts} divides no dimension"
        behind = ", behind that of the stacked layers" if self._layers(leaf) else ""
        return f"{self!r}: the largest free dimension{behind}"

    def __repr__(self) -> str:
        min_size = "" if self.min_size == 2**12 else f", min_size={self.min_size}"
        names = ", ".join(cls.__qualname__ for cls in self.stacked)
        stacked = f", stacked=({names})" if self.stacked else ""
        return f"fsdp({self.axis!r}{min_size}{stacked})"


def where_even(rule: AnyRule | PartitionSpec | NamedSharding | Format) -> Rule:
    """Another rule, but for dimensions that the mesh axes don't divide: they stay whole, where
    they would be an error.

    **Arguments:**

    - `rule`: the rule that may ask for the impossible; or one placement for all leaves, a
        `PartitionSpec`, a `NamedSharding` or a `Format`.

    **Returns:**

    A [`mylib.rules.Rule`][]. [`mylib.explain`][] says where it has made a difference.

    !!! Example

        ```python
        mesh = jax.make_mesh((8,), ("data",))
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
        return repr(self.placement)


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
        # What the other rule has said stands, also where it can't be had.
        added = set(free_dimensions(spec, leaf.ndim))
        return _without(filled, added.intersection(_uneven(filled, leaf, leaf.mesh)))

    def why(self, leaf: Leaf) -> str:
        told = self.rule.why(leaf)
        spec, mesh = _spec_of(self.rule(leaf), leaf)
        if spec is None:
            return told
        return told + "".join(
            f"; whole, as {parts_of_axes(entries_of(spec)[dim], mesh)} does not divide "
            f"{leaf.shape[dim]}"
            for dim in _uneven(spec, leaf, mesh)
        )

    def contradictions(self, leaves: Sequence[Leaf]) -> Sequence[Fault]:
        return self.rule.contradictions(leaves)

    def unused(self, leaves: Sequence[Leaf]) -> Sequence[Fault]:
        return self.rule.unused(leaves)

    def __repr__(self) -> str:
        return f"where_even({self.rule!r})"


def _checked(name: str, axis: Any) -> Axes:
    names = axis_names(axis)
    if isinstance(axis, Leaf) or not names or not all(isinstance(n, str) for n in names):
        mend = f"call it: {name}('data')" if isinstance(axis, Leaf) else "write a name, or several"
        raise TypeError(f"{name}: {axis!r} is not a mesh axis; {mend}")
    return axis


def parts_of_axes(entry: Any, mesh: AnyMesh | None) -> int | None:
    """Into how many parts `entry` splits a dimension, or None if there is no mesh that knows its
    axes; the spec is found fault with as it stands, then.
    """
    names = axis_names(entry)
    if mesh is None or not set(names) <= set(mesh.axis_names):
        return None
    return math.prod(mesh.shape[name] for name in names)


def _spec_of(placement: Any, leaf: Leaf) -> tuple[PartitionSpec | None, AnyMesh | None]:
    """The spec that a placement is, or has in it, and the mesh that it speaks of."""
    if isinstance(placement, PartitionSpec):
        return placement, leaf.mesh
    sharding = placement.sharding if isinstance(placement, Format) else placement
    return (sharding.spec, sharding.mesh) if isinstance(sharding, NamedSharding) else (None, None)


def _with_spec(placement: Any, spec: PartitionSpec) -> Any:
    match placement:
        case Format():
            return Format(placement.layout, _with_spec(placement.sharding, spec))
        case NamedSharding():
            return placement.update(spec=spec)
        case _:
            return spec


def _uneven(spec: PartitionSpec, leaf: Leaf, mesh: AnyMesh | None) -> list[int]:
    entries = entries_of(spec)[: leaf.ndim]
    return [dim for dim, entry in enumerate(entries) if not _divides(entry, leaf, dim, mesh, True)]


def _divides(
    entry: Any, leaf: Leaf, dim: int, mesh: AnyMesh | None, symbolic: bool = False
) -> bool:
    """Whether a dimension can be split so; of one of symbolic size, `symbolic` is the answer."""
    size = leaf.shape[dim]
    return size % (parts_of_axes(entry, mesh) or 1) == 0 if isinstance(size, int) else symbolic


def _without(spec: PartitionSpec, dims: Collection[int]) -> PartitionSpec:
    entries = [None if dim in dims else entry for dim, entry in enumerate(entries_of(spec))]
    return with_entries(spec, trimmed(entries)) if dims else spec

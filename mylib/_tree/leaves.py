"""A PyTree's array leaves with their paths; the static rest; joining them again."""

from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import ShapedArray, Tracer

from .annotations import Fit, Step, Walker, fit_of

KeyPath = tuple[Any, ...]


class Kind(Enum):
    """What a leaf is, as far as placing it goes."""

    STATIC = "static"
    HOST = "host"  # NumPy arrays and scalars
    DEVICE = "device"  # concrete `jax.Array`s, typed PRNG keys among them
    TRACED = "traced"
    ABSTRACT = "abstract"  # `jax.ShapeDtypeStruct`

    # Every leaf's kind is looked up in tables, and an enum's own hash is written in Python.
    __hash__ = object.__hash__


_kind_of_type: dict[type, Kind] = {}
_kind_of_dtype: dict[np.dtype, Kind] = {}


def kind_of(x: Any) -> Kind:
    kind = _kind_of_type.get(type(x))
    if kind is None:
        kind = _kind_of_type[type(x)] = _classify(x)
    if kind is Kind.HOST:
        kind = _kind_of_dtype.get(x.dtype)
        if kind is None:
            kind = _kind_of_dtype[x.dtype] = _classify_dtype(x.dtype)
    elif kind is Kind.TRACED and is_ref(x):
        return Kind.STATIC
    return kind


def _classify(x: Any) -> Kind:
    if isinstance(x, Tracer):
        return Kind.TRACED
    if isinstance(x, jax.ShapeDtypeStruct):
        return Kind.ABSTRACT
    if isinstance(x, jax.Array):
        return Kind.DEVICE
    if isinstance(x, np.ma.MaskedArray):
        # JAX has no arrays with holes, and what is under the mask is not meant to be seen.
        return Kind.STATIC
    return Kind.HOST if eqx.is_array(x) else Kind.STATIC


def _classify_dtype(dtype: np.dtype) -> Kind:
    holdable = dtype.isnative and (dtype == np.bool_ or jnp.issubdtype(dtype, jnp.number))
    # To NumPy these are numbers too.
    holdable = holdable and dtype.type not in (np.timedelta64, np.longdouble, np.clongdouble)
    return Kind.HOST if holdable else Kind.STATIC


def is_array(x: Any, abstract: bool = False) -> bool:
    """Whether a leaf is an array to transformations and loops; what isn't, is static.
    `jax.ShapeDtypeStruct`s are arrays if `abstract`.
    """
    if isinstance(x, np.ndarray | np.generic):
        # `float0`, the dtype of tangents of integers, holds nothing to place, but JAX traces it.
        return kind_of(x) is not Kind.STATIC or x.dtype == jax.dtypes.float0
    return _is_array_type(type(x), abstract)


def which_are_arrays(types: tuple[type, ...], abstract: bool) -> tuple[bool, ...] | None:
    """For each type whether it is one of arrays, or None if the types don't tell."""
    if any(issubclass(t, np.ndarray | np.generic) for t in types):
        return None  # there are dtypes that JAX has no arrays for
    return tuple(_is_array_type(t, abstract) for t in types)


def _is_array_type(t: type, abstract: bool) -> bool:
    return issubclass(t, jax.Array | Tracer) or (abstract and issubclass(t, jax.ShapeDtypeStruct))


def is_ref(x: Any) -> bool:
    """Whether a traced leaf is a place and not a value."""
    return isinstance(x, Tracer) and not isinstance(jax.typeof(x), ShapedArray)


@dataclass
class Leaves:
    """A flattened PyTree: all its leaves, and which of them are arrays."""

    tree: Any
    treedef: Any
    all: list[Any]
    positions: list[int]
    arrays: list[Any]
    kinds: list[Kind]

    @cached_property
    def paths(self) -> list[KeyPath]:
        """The key path of every array leaf. Costly, so made only where a rule or an error asks."""
        with_paths, _ = jtu.tree_flatten_with_path(self.tree)
        return [with_paths[i][0] for i in self.positions]

    @cached_property
    def walker(self) -> Walker:
        return Walker(self.tree)

    def join(self, arrays: Iterable[Any]) -> Any:
        """The same tree with other arrays in it."""
        return self._unflatten(list(self.all), arrays)

    def with_shapes(self, arrays: Iterable[Any]) -> "Leaves":
        """The same leaves for who asks where `arrays` would go in their place: only shapes and
        dtypes are known of them. The tree stays: its nodes need not be able to hold shapes.
        """
        shapes = [jax.ShapeDtypeStruct(x.shape, canonical_dtype(x)) for x in arrays]
        return replace(self, arrays=shapes, kinds=[Kind.ABSTRACT] * len(shapes))

    def fill(self, values: Iterable[Any]) -> Any:
        """A tree of the same structure with a value for each array leaf, and None for the rest."""
        return self._unflatten([None] * len(self.all), values)

    def _unflatten(self, leaves: list[Any], values: Iterable[Any]) -> Any:
        for position, value in zip(self.positions, values, strict=True):
            leaves[position] = value
        return jtu.tree_unflatten(self.treedef, leaves)


def split(tree: Any, static: Container[int] = ()) -> Leaves:
    """`tree`, flattened. The leaves at the positions `static` are none to place."""
    leaves, treedef = jtu.tree_flatten(tree)
    positions: list[int] = []
    arrays: list[Any] = []
    kinds: list[Kind] = []
    for i, x in enumerate(leaves):
        kind = kind_of(x)
        if kind is not Kind.STATIC and i not in static:
            positions.append(i)
            arrays.append(x)
            kinds.append(kind)
    return Leaves(tree, treedef, leaves, positions, arrays, kinds)


def canonical_dtype(x: Any) -> Any:
    """The dtype that JAX will hold `x` with: 64 bits become 32 unless `jax_enable_x64` is set."""
    return jax.dtypes.canonicalize_dtype(x.dtype) if isinstance(x.dtype, np.dtype) else x.dtype


def name_of(path: KeyPath) -> str:
    """A path as text, `.layers[0].weight`; the tree itself, when it is a single leaf, is
    `the array`.
    """
    return jtu.keystr(path) or "the array"


def parts_of(path: KeyPath) -> tuple[str, ...]:
    """A path as the texts of its keys: `("layers", "0", "weight")`."""
    return tuple(_key_text(key) for key in path)


def _key_text(key: Any) -> str:
    match key:
        case jtu.GetAttrKey():
            return key.name
        case jtu.SequenceKey():
            return str(key.idx)
        case jtu.DictKey() | jtu.FlattenedIndexKey():
            return str(key.key)
        case _:
            return str(key)


@dataclass(frozen=True)
class Leaf:
    """What a rule sees of one array leaf. It is no array itself: `equinox.is_array` of it is False,
    and a rule is never asked about anything but arrays.

    **Attributes:**

    - `path`: the key path from the root of the tree that was given to the verb.
    - `shape`, `dtype`: of the leaf, the dtype as JAX will hold it (`float64` from NumPy is
        `float32` unless `jax_enable_x64` is set).
    - `mesh`: the mesh that a `PartitionSpec` returned by the rule will be read over, or None.
    - `name`: the path as text, such as `.layers[0].weight`.
    - `parts`: the path as the texts of its keys, such as `("layers", "0", "weight")`.
    - `ndim`, `size`, `nbytes`: as of an array.
    - `axes`: the names that the leaf's jaxtyping annotation gives its dimensions, one entry a
        dimension (None where it gives no name, and in front where there are more dimensions than
        annotated), or None if the leaf has no annotation that fits.
    - `in_front`: how many dimensions the leaf has in front of the annotated ones, those of layers
        that are stacked by `vmap`; 0 if it has no annotation that fits.
    - `owners`: the classes of which the leaf is a part, from the outermost to the innermost, each
        with the parts of the path that lead from there to the leaf.

    !!! Example

        ```python
        def rule(leaf):
            return P("data") if leaf.ndim == 2 else P()
        ```
    """

    path: KeyPath
    shape: tuple[int, ...]
    dtype: Any
    mesh: Any
    _walker: Walker | None = field(default=None, repr=False, compare=False)

    @property
    def name(self) -> str:
        return jtu.keystr(self.path)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        size = 1
        for dim in self.shape:
            size *= dim
        return size

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @cached_property
    def parts(self) -> tuple[str, ...]:
        return parts_of(self.path)

    @cached_property
    def axes(self) -> tuple[str | None, ...] | None:
        return None if self._fit is None else self._fit[1]

    @property
    def in_front(self) -> int:
        return 0 if self._fit is None else self._fit[0]

    @cached_property
    def _fit(self) -> Fit | None:
        return fit_of(self._steps, self.ndim)

    @cached_property
    def owners(self) -> tuple[tuple[type, tuple[str, ...]], ...]:
        return tuple(
            (type(node), self.parts[depth:])
            for depth, (node, key) in enumerate(self._steps)
            if isinstance(key, jtu.GetAttrKey)
        )

    @cached_property
    def _steps(self) -> tuple[Step, ...]:
        return () if self._walker is None else tuple(self._walker.steps_to(self.path))

"""Splits a PyTree into array leaves, with their paths, and static leaves, and joins them again."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import ShapedArray, Tracer

from ..compat import classes_in, nodes_of
from ..errors import Fault
from .annotations import Fit, Step, Walker, fit_of

KeyPath = tuple[Any, ...]


class Kind(Enum):
    """The kinds of leaves that are placed, or traced, differently."""

    STATIC = "static"
    HOST = "host"  # NumPy arrays and scalars
    DEVICE = "device"  # concrete `jax.Array`s, typed PRNG keys among them
    TRACED = "traced"
    ABSTRACT = "abstract"  # `jax.ShapeDtypeStruct`
    # Transformations trace these two, but they are never placed.
    REF = "reference"  # a traced `jax.Ref`
    FLOAT0 = "float0"  # a NumPy array of the tangents of integers

    # Kinds are looked up in tables for every leaf, and an enum's own hash is slow Python.
    __hash__ = object.__hash__


_PLACED = frozenset({Kind.HOST, Kind.DEVICE, Kind.TRACED, Kind.ABSTRACT})
_kind_of_dtype: dict[np.dtype, Kind] = {}
_kind_of_type: dict[type, Kind] = {}


def kind_of(x: Any) -> Kind:
    kind = _kind_of_type.get(type(x)) or _classify(type(x))
    if kind is Kind.HOST:
        kind = _kind_of_dtype.get(x.dtype)
        if kind is None:
            kind = _kind_of_dtype[x.dtype] = _classify_dtype(x.dtype)
    elif kind is Kind.TRACED and is_ref(x):
        return Kind.REF
    return kind


def _classify(t: type) -> Kind:
    kind = next((kind for base, kind in _KINDS.items() if issubclass(t, base)), Kind.STATIC)
    _kind_of_type[t] = kind
    return kind


# The first one counts.
_KINDS: dict[type, Kind] = {
    Tracer: Kind.TRACED,
    jax.ShapeDtypeStruct: Kind.ABSTRACT,
    jax.Array: Kind.DEVICE,
    # JAX has no masked arrays, and the values under the mask must not be used.
    np.ma.MaskedArray: Kind.STATIC,
    np.ndarray: Kind.HOST,
    np.generic: Kind.HOST,
}


def _classify_dtype(dtype: np.dtype) -> Kind:
    if dtype == jax.dtypes.float0:
        return Kind.FLOAT0
    holdable = dtype == np.bool_ or jnp.issubdtype(dtype, jnp.number)
    # NumPy counts these as numbers, JAX doesn't.
    holdable = holdable and dtype.type not in (np.timedelta64, np.longdouble, np.clongdouble)
    return Kind.HOST if holdable else Kind.STATIC


def is_placed(x: object) -> bool:
    """Whether a leaf is an array that a placement speaks of."""
    return kind_of(x) in _PLACED


def is_array(x: object, abstract: bool = False) -> bool:
    """Whether transformations and loops treat a leaf as an array; all other leaves are static.
    `jax.ShapeDtypeStruct`s are arrays if `abstract`.
    """
    return kind_of(x) not in (_STATIC if abstract else _STATIC_OR_ABSTRACT)


_STATIC = (Kind.STATIC,)
_STATIC_OR_ABSTRACT = (Kind.STATIC, Kind.ABSTRACT)


def which_are_arrays(types: tuple[type, ...], abstract: bool) -> tuple[bool, ...] | None:
    """Whether each type is an array type, or None if the types don't decide it."""
    kinds = [_kind_of_type.get(t) or _classify(t) for t in types]
    if Kind.HOST in kinds:
        return None  # JAX doesn't support all of NumPy's dtypes
    static = _STATIC if abstract else _STATIC_OR_ABSTRACT
    return tuple([kind not in static for kind in kinds])


def is_of_keys(x: Any) -> bool:
    """Whether an array holds typed keys of `jax.random`."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def is_ref(x: object) -> bool:
    """Whether a traced leaf is a mutable reference (`jax.Ref`), not a value."""
    return isinstance(x, Tracer) and not isinstance(jax.typeof(x), ShapedArray)


class SelfPlaced:
    """A node whose arrays are where it has put them: rules leave them alone."""


@dataclass
class Leaves:
    """A flattened PyTree: all its leaves, and the positions of the arrays. `naming` gives the names
    of its nodes and leaves in errors.
    """

    tree: object
    treedef: Any
    all: list[object]
    positions: list[int]
    arrays: list[Any]
    kinds: list[Kind]
    naming: Callable[[KeyPath], str] = jtu.keystr

    @cached_property
    def paths(self) -> list[KeyPath]:
        """The key path of every array leaf. Costly, so computed only for rules and errors."""
        with_paths, _ = jtu.tree_flatten_with_path(self.tree)
        return [with_paths[i][0] for i in self.positions]

    def name(self, i: int) -> str:
        return self.name_at(self.paths[i])

    def name_at(self, path: KeyPath) -> str:
        """The name of a leaf; `the array` if the tree is a single leaf."""
        return self.naming(path) or _ONLY

    def at(self, i: int, fault: Fault) -> Fault:
        """A fault, as one of this array."""
        return replace(fault, path=self.name(i), shape=tuple(self.arrays[i].shape))

    @cached_property
    def has_others(self) -> bool:
        """Whether some leaves are NumPy arrays that JAX can't hold, such as those of objects."""
        taken = set(self.positions)
        return any(isinstance(x, np.ndarray) for i, x in enumerate(self.all) if i not in taken)

    @cached_property
    def self_placed(self) -> frozenset[int]:
        """The arrays in nodes that are `SelfPlaced`."""
        if not any(issubclass(cls, SelfPlaced) for cls in classes_in(nodes_of(self.treedef))):
            return frozenset()  # at next to no cost: most trees have none
        nodes = jtu.tree_leaves(self.tree, is_leaf=lambda x: isinstance(x, SelfPlaced))
        own = [isinstance(node, SelfPlaced) for node in nodes for _ in jtu.tree_leaves(node)]
        return frozenset(i for i, at in enumerate(self.positions) if own[at])

    @cached_property
    def walker(self) -> Walker:
        return Walker(self.tree)

    def join(self, arrays: Iterable[object], others: Sequence[object] | None = None) -> Any:
        """The same tree with other arrays in it, and maybe other leaves beside them."""
        leaves = list(self.all if others is None else others)
        for position, array in zip(self.positions, arrays, strict=True):
            leaves[position] = array
        return jtu.tree_unflatten(self.treedef, leaves)

    def with_shapes(
        self, arrays: Iterable[jax.Array | np.ndarray | jax.ShapeDtypeStruct]
    ) -> "Leaves":
        """The same leaves with the shapes and dtypes of `arrays`, to decide where `arrays` would
        go. The tree stays as it is: some nodes can't hold shapes.
        """
        shapes = [jax.ShapeDtypeStruct(x.shape, canonical_dtype(x)) for x in arrays]
        return replace(self, arrays=shapes, kinds=[Kind.ABSTRACT] * len(shapes))

    def fill(self, values: Iterable[object]) -> Any:
        """A tree of the same structure with a value for each array leaf, and None for the rest."""
        return self.join(values, [None] * len(self.all))


def split(
    tree: object, naming: Callable[[KeyPath], str] = jtu.keystr, abstract: bool = True
) -> Leaves:
    """Flattens `tree`. `jax.ShapeDtypeStruct`s are arrays if `abstract`."""
    placed = _PLACED if abstract else _PLACED - {Kind.ABSTRACT}
    leaves, treedef = jtu.tree_flatten(tree)
    positions: list[int] = []
    arrays: list[Any] = []
    kinds: list[Kind] = []
    for i, leaf in enumerate(leaves):
        kind = kind_of(leaf)
        if kind in placed:
            positions.append(i)
            arrays.append(leaf)
            kinds.append(kind)
    return Leaves(tree, treedef, leaves, positions, arrays, kinds, naming)


def canonical_dtype(x: Any) -> Any:
    """The dtype that JAX will hold `x` with: 64 bits become 32 unless `jax_enable_x64` is set."""
    if not isinstance(x.dtype, np.dtype):
        return x.dtype
    native = x.dtype if x.dtype.isnative else x.dtype.newbyteorder("=")
    return jax.dtypes.canonicalize_dtype(native)


def natively(x: Any) -> Any:
    """A NumPy array with the bytes of each number in this machine's order, as JAX takes it."""
    is_foreign = isinstance(x, np.ndarray) and not x.dtype.isnative
    return x.astype(x.dtype.newbyteorder("=")) if is_foreign else x


_ONLY = "the array"


def name_of(path: KeyPath) -> str:
    """A path as text, `.layers[0].weight`; `the array` if the tree is a single leaf."""
    return jtu.keystr(path) or _ONLY


def parts_of(path: KeyPath) -> tuple[str, ...]:
    """A path as the texts of its keys: `("layers", "0", "weight")`."""
    return tuple(_KEY_TEXTS.get(type(key), str)(key) for key in path)


_KEY_TEXTS: dict[type, Callable[[Any], str]] = {
    jtu.GetAttrKey: lambda key: key.name,
    jtu.SequenceKey: lambda key: str(key.idx),
    jtu.DictKey: lambda key: str(key.key),
    jtu.FlattenedIndexKey: lambda key: str(key.key),
}


@dataclass(frozen=True)
class Leaf:
    """Describes one array leaf to a rule. It is not an array itself (`equinox.is_array` returns
    False). Rules are called for array leaves only.

    **Attributes:**

    - `path`: the key path from the root of the tree that was passed to the verb.
    - `shape`, `dtype`: those of the leaf; the dtype is the one that JAX will use (`float64` from
        NumPy is `float32` unless `jax_enable_x64` is set).
    - `mesh`: the mesh for a `PartitionSpec` that the rule returns, or None.
    - `name`: the path as text, such as `.layers[0].weight`.
    - `parts`: the path as the texts of its keys, such as `("layers", "0", "weight")`.
    - `ndim`, `size`, `nbytes`: as for an array.
    - `axes`: the dimension names from the leaf's jaxtyping annotation, one entry per dimension
        (None for unnamed ones and for extra ones in front), or None if no annotation fits the leaf.
    - `in_front`: the number of dimensions before the annotated ones, as in layers stacked by
        `vmap`; 0 if no annotation fits the leaf.
    - `owners`: the classes that contain the leaf, from the outermost to the innermost, each with
        the parts of the path from there to the leaf.
    - `holders`: as `owners`, but with the objects themselves, for rules that need a static field,
        such as the number of heads. Their arrays may be traced, abstract or missing. The rows of
        `show` and `explain` have none, as they keep no arrays alive.

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
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @cached_property
    def parts(self) -> tuple[str, ...]:
        return parts_of(self.path)

    @property
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
        return tuple([(type(node), parts) for node, parts in self.holders])

    def alone(self) -> "Leaf":
        """The same without the tree, for results that are kept: it knows its owners by their types
        alone, so that it keeps no arrays alive.
        """
        leaf = Leaf(self.path, self.shape, self.dtype, self.mesh)
        vars(leaf).update(_fit=self._fit, owners=self.owners)
        return leaf

    @property
    def holders(self) -> tuple[tuple[Any, tuple[str, ...]], ...]:
        parts, steps = self.parts, enumerate(self._steps)
        return tuple(
            [(node, parts[at:]) for at, (node, key) in steps if isinstance(key, jtu.GetAttrKey)]
        )

    @cached_property
    def _steps(self) -> Sequence[Step]:
        return () if self._walker is None else self._walker.steps_to(self.path)

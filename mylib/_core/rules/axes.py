"""`by_axes`: chooses placements by dimension names."""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import equinox as eqx
from jax.sharding import PartitionSpec

from ..errors import Fault, because
from ..placement import PASS, axis_names, trimmed
from ..tree import Fit, Leaf, Pattern, joined, name_dimensions
from .rule import Axes, Rule

ClassNames = Mapping[type, Mapping[str, str]]
Names = tuple[str | None, ...]

_LINEAR = {"weight": "out in", "bias": "out"}
_CONV = {"weight": "out in ...", "bias": "out ..."}

EQUINOX_NAMES: ClassNames = {
    eqx.nn.Linear: _LINEAR,
    eqx.nn.Embedding: {"weight": "vocab embed"},
    eqx.nn.MultiheadAttention: {
        "query_proj.weight": "heads in",
        "query_proj.bias": "heads",
        "key_proj.weight": "heads in",
        "key_proj.bias": "heads",
        "value_proj.weight": "heads in",
        "value_proj.bias": "heads",
        "output_proj.weight": "out heads",
    },
    eqx.nn.Conv: _CONV,
    eqx.nn.ConvTranspose: _CONV,
    eqx.nn.GroupNorm: {"weight": "channels", "bias": "channels"},
    eqx.nn.GRUCell: {
        "weight_ih": "gates in",
        "weight_hh": "gates hidden",
        "bias": "gates",
        "bias_n": "hidden",
    },
    eqx.nn.LSTMCell: {"weight_ih": "gates in", "weight_hh": "gates hidden", "bias": "gates"},
    eqx.nn.WeightNorm: {"g": "out ..."},
    eqx.nn.PReLU: {"negative_slope": "..."},
}
"""Dimension names for `eqx.nn`'s layers, whose annotations have none."""


def by_axes(axes: Mapping[str, Axes | None], *, names: ClassNames | None = None) -> Rule:
    """Chooses placements by the dimension names in jaxtyping annotations.

    An annotated Module needs no second description of its sharding:

    ```python
    class MLP(eqx.Module):
        up: Float[Array, "mlp embed"]
        down: Float[Array, "embed mlp"]

    rule = mylib.rules.by_axes({"mlp": "model"})
    ```

    shards `up` by rows and `down` by columns, over the mesh axis "model". The names are also found
    for Modules in lists and dicts, and in an optimiser state. Dimensions whose names are not mapped
    are not sharded, nor are those before the annotated ones (of layers stacked by `vmap`). For
    leaves without names, and for those with fewer dimensions than annotated (factored moments), the
    rule returns PASS, except that leaves of rank 0 are replicated.

    **Arguments:**

    - `axes`: a mapping from dimension names to mesh axes (one, a tuple of several, or None). An
        array uses each mesh axis once: of two names with the same axis the first in `axes` gets it,
        and of two dimensions with the same name the first.
    - `names`: names for classes without annotations: a mapping from classes to mappings from
        fields, or paths inside the class, to names, written as in an annotation. The paths may
        contain `*` and `**` as in `mylib.rules.by_path`. `names` takes precedence over
        annotations, and an outer class over an inner one, so that two `eqx.nn.Linear`s in it can
        have different names:
        `{Block: {"up.weight": "mlp embed", "down.weight": "embed mlp"}}`.

    The layers of `equinox.nn` already have names:

    | layer | names |
    |---|---|
    | `Linear` | `out in` |
    | `Embedding` | `vocab embed` |
    | `MultiheadAttention` | `heads in` for query, key and value, `out heads` for the output |
    | `Conv`, `ConvTranspose` | `out in ...` |
    | `GroupNorm` | `channels` |
    | `GRUCell`, `LSTMCell` | `gates in`, `gates hidden`, `gates`, `hidden` |
    | `BatchNorm` | `input_size`, its own annotation |
    | `LayerNorm`, `RMSNorm`, `PReLU`, `WeightNorm` | none: they are replicated |

    **Returns:**

    A `mylib.rules.Rule`. Using it raises if a name in `axes` is not in any leaf, or if an entry
    of `names` fits no leaf.

    **Raises:**

    `TypeError` if `axes` or `names` is no mapping.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=4, model=2)
        attention = eqx.nn.MultiheadAttention(4, 32, key=jax.random.key(0))
        rule = mylib.rules.by_axes({"heads": "model"})
        attention = mylib.filter_shard(attention, rule, mesh=mesh)
        assert attention.output_proj.weight.sharding.spec == P(None, "model")
        ```
    """
    for what in (axes, names or {}, *(names or {}).values()):
        if not isinstance(what, Mapping):
            raise TypeError(f"by_axes takes mappings, not {what!r}")
    return ByAxes(tuple(axes.items()), Table(names or {}))


@dataclass(frozen=True)
class Entry:
    """Names for the arrays at `pattern` inside a class."""

    cls: type
    pattern: Pattern
    names: str


class Table:
    """The entries of a mapping from classes to names."""

    def __init__(self, names: ClassNames):
        self.entries = [
            Entry(cls, Pattern(path), dims)
            for cls, fields in names.items()
            for path, dims in fields.items()
        ]
        for entry in self.entries:
            if not isinstance(entry.names, str) or "," in entry.names:
                raise ValueError(
                    f"by_axes: write names as in an annotation, 'out in', not {entry.names!r}"
                )
        self._of_class = cache(self._find)
        # The same in all layers of a model.
        self._at = cache(self._find_at)

    def fitting(self, leaf: Leaf) -> Iterator[Entry]:
        """The entries that name the leaf, outermost owner first; for one owner, the most derived
        class first.
        """
        for owner, parts in leaf.owners if self.entries else ():
            if self._of_class(owner):
                yield from self._at(owner, parts)

    def _find(self, owner: type) -> list[Entry]:
        return [entry for cls in owner.__mro__ for entry in self.entries if entry.cls is cls]

    def _find_at(self, owner: type, parts: tuple[str, ...]) -> list[Entry]:
        path = joined(parts)
        return [entry for entry in self._of_class(owner) if entry.pattern.matches(path)]


_EQUINOX = Table(EQUINOX_NAMES)


@dataclass(frozen=True, repr=False)
class ByAxes(Rule):
    axes: tuple[tuple[str, Axes | None], ...]
    table: Table

    def __call__(self, leaf: Leaf) -> Any:
        names = self._names(leaf)
        if names is None:
            return PASS if leaf.ndim else PartitionSpec()
        return PartitionSpec(*trimmed([axes for axes, _ in self._assign(names)]))

    def why(self, leaf: Leaf) -> str:
        names = self._names(leaf)
        if names is None:
            return "no names" if leaf.ndim else "a leaf of rank 0"
        if not any(names):
            return "no axis for its names"
        shown = " ".join("_" if name is None else name for name in names)
        refused = [reason for _, reason in self._assign(names) if reason]
        return "; ".join([f"names {shown!r}", *refused])

    def _unmatched(self, leaves: Sequence[Leaf]) -> Sequence[Fault]:
        in_use: set[str | None] = set()
        used: set[Entry] = set()
        for leaf in leaves:
            entries = tuple(self.table.fitting(leaf))
            in_use.update(_names(entries, leaf) or ())
            used.update(e for e in entries if name_dimensions(e.names, leaf.ndim) is not None)
        names = sorted(name for name in in_use if name is not None)
        unused = [entry for entry in self.table.entries if entry not in used]
        return [*_missing(self.axes, names, len(leaves)), *map(_unused, unused)]

    def _names(self, leaf: Leaf) -> Names | None:
        return _names(self.table.fitting(leaf), leaf)

    def _assign(self, names: Names) -> list[tuple[Any, str]]:
        """The mesh axes of each dimension, and the reason why it doesn't have more."""
        taken: dict[str, str] = {}
        assigned: list[tuple[Any, str]] = [(None, "")] * len(names)
        for name, axes in self.axes:
            for dim in [dim for dim, other in enumerate(names) if other == name]:
                requested = axis_names(axes)
                free = tuple(axis for axis in requested if axis not in taken)
                refused = "; ".join(
                    f"{axis!r} goes to {taken[axis]!r}, not to {name!r}"
                    for axis in requested
                    if axis in taken
                )
                taken |= dict.fromkeys(free, name)
                assigned[dim] = (axes if free == requested else free or None), refused
        return assigned

    def __repr__(self) -> str:
        return f"by_axes({dict(self.axes)!r})"


def _names(entries: Iterable[Entry], leaf: Leaf) -> Names | None:
    entry = next(iter(entries), None)
    fit = next(_fits(leaf), None) if entry is None else name_dimensions(entry.names, leaf.ndim)
    return None if fit is None else fit[1]


def _fits(leaf: Leaf) -> Iterator[Fit]:
    """The number of dimensions in front, and the names of all: by the leaf's annotation, and by
    each of Equinox's layers that it is in, the outermost first.
    """
    if leaf.axes is not None:
        yield leaf.in_front, leaf.axes
    for entry in _EQUINOX.fitting(leaf):
        fit = name_dimensions(entry.names, leaf.ndim)
        if fit is not None:
            yield fit


def namings(leaf: Leaf) -> list[Names]:
    """All names of a leaf's dimensions."""
    return [names for _, names in _fits(leaf)]


def has_names(leaf: Leaf) -> bool:
    """Whether the leaf's annotation, or Equinox, names its dimensions."""
    return next(_fits(leaf), None) is not None


def dimensions_in_front(leaf: Leaf) -> int:
    """The number of dimensions before those that the leaf's annotation, or Equinox, names."""
    return next(_fits(leaf), (0, ()))[0]


def _missing(axes: Sequence[tuple[str, Any]], names: Sequence[str], count: int) -> Iterator[Fault]:
    for name, requested in axes:
        if name not in names:
            fix = "annotate the fields, or give names for their classes in `names=`"
            if names:
                fix = f"the names there are {', '.join(map(repr, names))}"
            if close := difflib.get_close_matches(name, names, 1):
                fix = f"did you mean {close[0]!r}?"
            reason = f"no dimension of the {count} leaves has that name"
            yield because(reason, fix, f"by_axes: {name!r} over {requested!r}")


def _unused(entry: Entry) -> Fault:
    return because(
        "no leaf there has this number of dimensions",
        "write the path from a field of the class to the array, or drop the entry",
        f"by_axes: names {entry.names!r} for {entry.pattern.text!r} of {entry.cls.__qualname__}",
    )

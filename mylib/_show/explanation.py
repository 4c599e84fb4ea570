"""`explain`: shows where every leaf would go, why, and the memory it needs, without moving it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any, Protocol, runtime_checkable

import jax.tree_util as jtu
from jax.sharding import AbstractMesh, AxisType
from jaxtyping import PyTree

from .._errors import Fault, PlacementError, in_words
from .._placement import (
    AnyMesh,
    Placement,
    current_world,
    decide,
    grounded,
    is_rule,
    leaf_at,
    sharding_of,
)
from .._text import counted, show_bytes
from .._tree import Kind, Leaf, name_of, split
from ..rules import as_rule
from .current_places import current_place, present_rows
from .fold import fold
from .rows import Row, Rows, sizes, totals
from .shown import Shown
from .text import RED, Paint

# Leaves of this many bytes or more count as large.
_LARGE = 2**20
# How many of them are listed.
_WASTES = 20


@runtime_checkable
class PlanOfArguments(Protocol):
    """A `mylib.Plan`: where the arguments of a step are, by their names."""

    @property
    def arguments(self) -> Mapping[str, Placement]: ...

    @property
    def axes(self) -> Mapping[str, int]: ...


@runtime_checkable
class Noted(Protocol):
    """A node that has something to report of itself: a state of `mylib.by_matrix`, and a layer of
    `mylib.fully_shard` that sends its weights in 8 bits.
    """

    def notes_of_explain(self) -> list[str]: ...


def explain(
    tree: PyTree[Any],
    placement: "PyTree[Placement] | PlanOfArguments | EllipsisType" = ...,
    /,
    mesh: AnyMesh | None = None,
    *,
    argument: str = "model",
) -> "Explanation":
    """Shows where every array of a tree would go, which rule chose that and why, and how much
    memory each device needs. Moves nothing, needs no devices, and doesn't raise for faulty
    placements: faults are part of the result.

    **Arguments:**

    - `tree`: any PyTree; it may be abstract (`equinox.filter_eval_shape`).
    - `placement`: as in [`mylib.filter_shard`][], or a [`mylib.Plan`][]. Without one, shows where
        everything is; so does [`mylib.show`][], with pictures.
    - `mesh`: the mesh for a `PartitionSpec`; by default the mesh of `jax.set_mesh`. It may be a
        `jax.sharding.AbstractMesh` of any size.
    - `argument`: if the placement is a [`mylib.Plan`][], which argument of the planned step the
        tree is.

    **Returns:**

    A [`mylib.Explanation`][], which prints as a table, and is a page with pictures in a notebook.

    !!! Example

        ```python
        mesh = jax.sharding.AbstractMesh((1024,), ("data",))
        model = eqx.filter_eval_shape(
            eqx.nn.MLP, 4096, 4096, 16384, 8, key=jax.random.key(0)
        )
        explanation = mylib.explain(model, mylib.rules.fsdp("data"), mesh)
        print(explanation)
        assert not explanation.faults
        ```
    """
    leaves, notes = split(tree), _notes_in(tree)
    world = current_world()
    if isinstance(placement, PlanOfArguments):
        axes, placement = placement.axes, placement.arguments[argument]
        # JAX 0.12 would make Explicit axes.
        mesh = AbstractMesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes))
    if placement is ...:
        return Explanation(present_rows(leaves, world), (), notes)
    # Abstract leaves: it isn't checked whether the arrays can be moved to their targets.
    abstract = replace(leaves, kinds=[Kind.ABSTRACT] * len(leaves.kinds))
    decision = decide(abstract, placement, mesh, world)
    # The leaves with faults that a rule itself reports.
    named = {fault.path for fault in decision.faults}
    rows: list[Row] = []
    for i, (entry, target) in enumerate(zip(decision.entries, decision.targets, strict=True)):
        leaf = leaf_at(leaves, i, decision.mesh)
        if i in decision.faulty or name_of(leaf.path) in named:
            rows.append(Row(leaf.alone(), None, None, "", True))
        else:
            place = target or current_place(leaves.arrays[i], leaves.kinds[i])
            place = place and grounded(sharding_of(place), world)
            rows.append(Row(leaf.alone(), target, place, _reason(entry, leaf), False))
    return Explanation(tuple(rows), tuple(decision.faults), notes)


def _notes_in(tree: Any) -> tuple[str, ...]:
    is_noted: Callable[[Any], bool] = lambda x: isinstance(x, Noted)  # noqa: E731
    nodes = filter(is_noted, jtu.tree_leaves(tree, is_leaf=is_noted))
    return tuple(dict.fromkeys(text for node in nodes for text in node.notes_of_explain()))


def _reason(entry: Any, leaf: Leaf) -> str:
    if not is_rule(entry):
        return "" if entry is None else "given as such"
    try:
        why = str(as_rule(entry).why(leaf))
    except Exception as error:
        # A user's rule may raise anything here, and has chosen a placement all the same.
        why = f"why() raises {in_words(error)}"
    # As one line of the table.
    return " ".join(why.split())


@dataclass(frozen=True, repr=False)
class Explanation(Shown, Rows):
    """The result of [`mylib.explain`][]. Prints as a table, in which leaves that differ only by an
    index, such as the layers of a model, share a line; `whole()` is the text with all lines, as of
    [`mylib.Overview`][]. In a notebook it is a page with pictures.

    **Attributes:**

    - `rows`: a [`mylib.Row`][] for each array leaf.
    - `faults`: all faults, each a [`mylib.Fault`][].
    - `nbytes`: the bytes of all leaves, each counted once.
    - `bytes_by_device`: the bytes that each device would hold in its own memory. The devices of an
        abstract mesh are numbered.
    - `most_loaded`: the device that would hold the most bytes, and their number; None if no device
        would hold any.
    - `notes`: what a state of [`mylib.by_matrix`][] reports: how evenly its matrices are given out;
        and layers of [`mylib.fully_shard`][]: which weights are sent in `send_dtype`.
    - `replicated`: the rows of large leaves (1 MiB or more) that would be replicated on all
        devices.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=8)
        model = eqx.nn.MLP(64, 64, 256, 2, key=jax.random.key(0))
        explanation = mylib.explain(model, mylib.rules.fsdp("data"), mesh)
        for row in explanation.rows:
            print(row.leaf.name, row.spec, row.why)
        assert not explanation.faults and not explanation.replicated
        ```
    """

    faults: tuple[Fault, ...]
    notes: tuple[str, ...] = ()

    @property
    def replicated(self) -> tuple[Row, ...]:
        return tuple(
            row
            for row in self.rows
            if row.devices > 1 and row.bytes_per_device == row.nbytes >= _LARGE
        )

    _header = ("array", "shape", "dtype", "spec", "bytes", "per device", "why")

    def _cells(self, label: str, alike: Sequence[Row]) -> tuple[str, ...]:
        row, (nbytes, per_device) = alike[0], sizes(alike)
        shape, dtype = str(row.leaf.shape), str(row.leaf.dtype)
        return label, shape, dtype, row.spec, nbytes, per_device, row.why

    def _notes(self) -> list[str]:
        return [*totals(self), *self.notes, *self._waste()]

    def _notes_of_page(self) -> list[str]:
        return [
            *totals(self),
            *self.notes,
            *self._meshes.lines(),
            *self._waste(),
            *self._unfit(),
        ]

    def _below(self, paint: Paint) -> list[str]:
        return [line for text in self._unfit() for line in ("", paint(text, RED))]

    def _unfit(self) -> list[str]:
        return [str(PlacementError(self.faults))] if self.faults else []

    def _waste(self) -> list[str]:
        groups = fold(self.replicated, _WASTES)
        left = len(self.replicated) - sum(len(rows) for _, rows in groups)
        lines = [_show_waste(label, rows) for label, rows in groups]
        last = f"and {counted(left, 'more array')} {'is' if left == 1 else 'are'} large"
        return [*lines, f"{last} and replicated"] if left else lines


def _show_waste(label: str, rows: Sequence[Row]) -> str:
    wasted = show_bytes(sum(row.wasted for row in rows))
    devices = counted(rows[0].devices, "device")
    return f"large and replicated: {label} on {devices}, {wasted} more than in one copy"

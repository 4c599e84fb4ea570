"""`explain`: shows where every leaf would go, why, and the memory it needs, without moving it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any, Protocol, overload, runtime_checkable

from jax.sharding import AbstractMesh, AxisType
from jaxtyping import PyTree

from ..errors import Fault, PlacementError, folded, in_words
from ..placement import (
    AnyMesh,
    Placement,
    current_world,
    decide,
    grounded,
    is_rule,
    leaf_at,
    sharding_of,
)
from ..rules import as_rule
from ..text import show_bytes, some
from ..tree import Kind, Leaf, name_of, split
from .current_places import current_place, notes_in
from .overview import Overview, show
from .rows import Row, Rows, sizes, totals
from .shown import Shown
from .text import RED, Paint

# Leaves of this many bytes or more count as large.
_LARGE = 2**20


@runtime_checkable
class PlanOfArguments(Protocol):
    """A `mylib.Plan`: where the arguments of a step are, by their names."""

    @property
    def arguments(self) -> Mapping[str, Placement]: ...

    @property
    def axes(self) -> Mapping[str, int]: ...


@overload
def explain(tree: PyTree[Any], /) -> Overview: ...


@overload
def explain(
    tree: PyTree[Any],
    placement: "PyTree[Placement] | PlanOfArguments",
    /,
    mesh: AnyMesh | None = None,
    *,
    argument: str = "model",
) -> "Explanation": ...


def explain(
    tree: PyTree[Any],
    placement: "PyTree[Placement] | PlanOfArguments | EllipsisType" = ...,
    /,
    mesh: AnyMesh | None = None,
    *,
    argument: str = "model",
) -> "Explanation | Overview":
    """Shows where every array of a tree would go, which rule chose that and why, and how much
    memory each device needs. Moves nothing, needs no devices, and doesn't raise for faulty
    placements: faults are part of the result.

    **Arguments:**

    - `tree`: any PyTree; it may be abstract (`equinox.filter_eval_shape`).
    - `placement`: as in `mylib.filter_shard`, or a `mylib.Plan`. Without one this is
        `mylib.show` of the tree.
    - `mesh`: the mesh for a `PartitionSpec`; by default the mesh of `jax.set_mesh`. It may be a
        `jax.sharding.AbstractMesh` of any size.
    - `argument`: if the placement is a `mylib.Plan`, which argument of the planned step the
        tree is.

    **Returns:**

    A `mylib.results.Explanation`, which prints as a table, and is a page with pictures in a
    notebook; without a placement a `mylib.results.Overview`.

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
    if placement is ...:
        return show(tree)
    leaves, world = split(tree), current_world()
    if isinstance(placement, PlanOfArguments):
        axes, placement = placement.axes, placement.arguments[argument]
        # JAX 0.12 would make Explicit axes.
        mesh = AbstractMesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes))
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
    return Explanation(tuple(rows), tuple(decision.faults), notes_in(tree))


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
    """The result of `mylib.explain`. Prints as a table, in which leaves that differ only by an
    index, such as the layers of a model, share a line; `whole()` is the text with all lines, as of
    `mylib.results.Overview`. In a notebook it is a page with pictures.

    **Attributes:**

    - `rows`: a `mylib.results.Row` for each array leaf.
    - `faults`: all faults, each a `mylib.errors.Fault`.
    - `nbytes`: the bytes of all leaves, each counted once.
    - `bytes_by_device`: the bytes that each device would hold in its own memory. The devices of an
        abstract mesh are numbered.
    - `most_loaded`: the device that would hold the most bytes, and their number; None if no device
        would hold any.
    - `notes`: what a state of `mylib.by_matrix` reports: how evenly its matrices are given out.
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

    def _below(self, paint: Paint) -> list[str]:
        return ["", paint(str(PlacementError(self.faults)), RED)] if self.faults else []

    def _waste(self) -> list[str]:
        if not self.replicated:
            return []
        names = some(list(folded([row.leaf.name for row in self.replicated])))
        wasted = show_bytes(sum(row.wasted for row in self.replicated))
        return [f"large and replicated: {names}; {wasted} more than one copy of each"]

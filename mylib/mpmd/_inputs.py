"""Reads the stages and the batches of a pipeline, and finds everything that is wrong with them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.tree_util as jtu
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, Sharding

from .._errors import Fault, PlacementError, because
from .._functions import Key
from .._placement import show, show_mesh
from .._transfer import filter_device_put, same_place
from .._tree import (
    Arrays,
    KeyPath,
    Kind,
    Leaves,
    Outline,
    canonical_dtype,
    first_difference,
    split,
)
from ._schedule import Schedule
from ._stage import Form, Struct
from ._transfer import handle


@dataclass(frozen=True, eq=False)
class Module:
    """A stage as it was first given. Its arrays may change, but not what is `fixed`: everything
    else; nor their shapes, dtypes and shardings.
    """

    number: int
    mesh: Mesh
    form: Form
    fixed: Key

    def arrays_of(self, stage: Any, faults: list[Fault]) -> Arrays:
        """The arrays of the same stage, given again."""
        leaves = _split(stage, f"stages[{self.number}]")
        if _fixed(leaves) != self.fixed:
            faults.append(self._difference(stage))
            return []
        for i, (x, kind, struct) in enumerate(
            zip(leaves.arrays, leaves.kinds, self.form.structs, strict=True)
        ):
            if reason := _changed(x, kind, struct):
                mend = "give each stage as it was given to pipeline; only values may change"
                faults.append(leaves.at(i, because(reason, mend, self.request)))
        return leaves.arrays

    @property
    def request(self) -> str:
        return f"stage {self.number} of a pipeline"

    def _difference(self, stage: Any) -> Fault:
        before = self.form.outline.fill(self.form.structs)
        reason = "its static leaves are others than when the pipeline was made"
        path = ""
        if jtu.tree_structure(before) != jtu.tree_structure(stage):
            path, was, now = first_difference(before, stage)
            reason = f"when the pipeline was made it was {was}, and now it is {now}"
        mend = "make another pipeline for stages of another structure"
        fault = because(reason, mend, self.request)
        return replace(fault, path=f"stages[{self.number}]{path}")


def _changed(x: Any, kind: Kind, struct: Struct) -> str:
    if kind is not Kind.DEVICE:
        return "it is no array on a mesh"
    if x.shape != struct.shape or x.dtype != struct.dtype:
        return f"it was {struct.dtype}{struct.shape} when the pipeline was made"
    assert isinstance(struct.sharding, Sharding)
    if x.sharding is not struct.sharding and not same_place(x.sharding, struct.sharding, x.ndim):
        return f"it was {show(struct.sharding, None)} when the pipeline was made"
    return ""


def _split(tree: Any, name: str) -> Leaves:
    def named(path: KeyPath) -> str:
        return f"{name}{jtu.keystr(path)}"

    return split(tree, naming=named)


def _outline(leaves: Leaves) -> Outline:
    places = set(leaves.positions)
    flags = tuple(i in places for i in range(len(leaves.all)))
    static = tuple(x for i, x in enumerate(leaves.all) if i not in places)
    return Outline(leaves.treedef, flags, static)


def _fixed(leaves: Leaves) -> Key:
    outline = _outline(leaves)
    return Key(leaves.all, outline.treedef, outline.are_arrays, outline.static)


def read_stages(stages: Sequence[Any], schedule: Schedule) -> list[Module]:
    """The stages as they are given first. Raises for everything that is wrong with them."""
    faults: list[Fault] = []
    if len(stages) != schedule.stages:
        reason = f"the schedule {schedule.name!r} is for {schedule.stages}"
        mend = "make the schedule for as many stages as there are"
        faults.append(because(reason, mend, f"a pipeline of {len(stages)} stages"))
    read = [_split(stage, f"stages[{s}]") for s, stage in enumerate(stages)]
    own = [_mesh_of(s, leaves, faults) for s, leaves in enumerate(read)]
    meshes = [
        _shared_mesh(s, own, schedule, faults) for s in range(min(len(own), schedule.stages))
    ]
    for s, stage in enumerate(stages):
        if not callable(stage):
            fault = because("it can't be called", "give a Module or a function", f"stage {s}")
            faults.append(replace(fault, path=f"stages[{s}]"))
    if faults:
        raise PlacementError(faults)
    return [
        Module(s, mesh, Form(_outline(leaves), _structs(leaves)), _fixed(leaves))
        for s, (mesh, leaves) in enumerate(zip(meshes, read, strict=True))
        if mesh is not None
    ]


def _structs(leaves: Leaves) -> tuple[Struct, ...]:
    return tuple(Struct(x.shape, x.dtype, sharding=x.sharding) for x in leaves.arrays)


def _mesh_of(s: int, leaves: Leaves, faults: list[Fault]) -> Mesh | None:
    """The mesh of the first array that is on one. All others must be there, too."""
    first, name = None, ""
    request = f"stage {s} of a pipeline"
    for i, (x, kind) in enumerate(zip(leaves.arrays, leaves.kinds, strict=True)):
        where = getattr(x, "sharding", None) if kind is not Kind.HOST else None
        mesh = where.mesh if isinstance(where, NamedSharding) else None
        if not isinstance(mesh, Mesh):
            there = "a NumPy array" if where is None else f"on {show(where, None)}"
            mend = f"move it first: mylib.filter_device_put(stages[{s}], placement, mesh=...)"
            faults.append(leaves.at(i, because(f"it is {there}, and on no mesh", mend, request)))
        elif first is None:
            first, name = mesh, leaves.name(i)
        elif mesh != first:
            reason = (
                f"it is on the {_with_devices(mesh)}, and {name} on the {_with_devices(first)}"
            )
            mend = "put all arrays of a stage on one mesh"
            faults.append(leaves.at(i, because(reason, mend, request)))
    return first


def _with_devices(mesh: Mesh) -> str:
    ids = [device.id for device in mesh.devices.flat]
    return f"{show_mesh(mesh)} of the devices {ids}"


def _shared_mesh(
    s: int, own: Sequence[Mesh | None], schedule: Schedule, faults: list[Fault]
) -> Mesh | None:
    """The mesh of a stage: that of the first stage which the schedule runs on the same mesh."""
    beside = [i for i in range(len(own)) if schedule.mesh_of(i) == schedule.mesh_of(s)]
    known = [(i, own[i]) for i in beside if own[i] is not None]
    request = f"stage {s} of a pipeline"
    if not known:
        reason = "neither it nor another stage of its mesh has arrays, so its mesh is unknown"
        fault = because(reason, "make it a part of the stage before or after it", request)
        faults.append(replace(fault, path=f"stages[{s}]"))
        return None
    first, mesh = known[0]
    if own[s] is not None and own[s] != mesh:
        reason = (
            f"it is on another mesh than stages[{first}], and the schedule {schedule.name!r} runs "
            "both on one"
        )
        fault = because(reason, "put both on the same mesh", request)
        faults.append(replace(fault, path=f"stages[{s}]"))
    return mesh


@dataclass(frozen=True, eq=False)
class Batch:
    """A tree of arrays with rows, and where they will be."""

    leaves: Leaves
    form: Form
    fixed: Key

    def arrays(self, is_here: bool) -> Arrays:
        """The arrays, moved to their mesh."""
        structs = self.form.structs
        if not is_here:
            return [handle(x.shape, x.dtype, x.sharding) for x in structs]
        return filter_device_put(self.leaves.arrays, [x.sharding for x in structs])


def read_batch(tree: Any, name: str, mesh: Mesh, faults: list[Fault]) -> Batch:
    leaves = _split(tree, name)
    request = f"the {'first' if name == 'x' else 'last'} stage's mesh"
    structs: list[Struct] = []
    for i, (x, kind) in enumerate(zip(leaves.arrays, leaves.kinds, strict=True)):
        sharding: Any = NamedSharding(mesh, P())
        if kind is Kind.DEVICE and x.committed:
            sharding = x.sharding
            if not isinstance(sharding, NamedSharding) or sharding.mesh != mesh:
                reason = f"it is on {show(sharding, None)}"
                mend = f"write mylib.filter_device_put({name}, P(...), mesh=that mesh)"
                faults.append(leaves.at(i, because(reason, mend, request)))
        structs.append(Struct(x.shape, canonical_dtype(x), sharding=sharding))
    return Batch(leaves, Form(_outline(leaves), tuple(structs)), _fixed(leaves))


def check_rows(x: Batch, y: Batch, microbatches: int, faults: list[Fault]) -> int:
    """The number of rows of a batch, which all its arrays must have, in as many microbatches."""
    request = f"{microbatches} microbatches"
    rows: int | None = None
    for batch in (x, y):
        for i, array in enumerate(batch.leaves.arrays):
            fault = _rows_fault(array.shape, rows, microbatches)
            if fault is not None:
                faults.append(batch.leaves.at(i, replace(fault, request=request)))
            elif rows is None:
                rows = array.shape[0]
    if not x.leaves.arrays:
        faults.append(replace(because("it has no arrays", "give a batch", request), path="x"))
    return rows or 0


def _rows_fault(shape: tuple[int, ...], rows: int | None, microbatches: int) -> Fault | None:
    if not shape:
        return because(
            "it is a scalar, and the first dimension of each array is cut into microbatches",
            "give an array with a row for each example",
        )
    if rows is not None and shape[0] != rows:
        return because(
            f"it has {shape[0]} rows, and the arrays before it have {rows}",
            "give all arrays of x and y as many rows",
        )
    if not shape[0] or shape[0] % microbatches:
        return because(
            f"its {shape[0]} rows can't be cut into {microbatches} equal parts",
            "choose a batch size that is a multiple of the microbatches",
        )
    return None


def refuse_tracers(*trees: Any) -> None:
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(trees)):
        raise TypeError(
            "a pipeline runs programs on several meshes, so it can't be called inside jax.jit, "
            "jax.grad or jax.vmap: it returns the loss and the gradients, and compiles itself"
        )


Where = Callable[[Sequence[Any]], Any]


def tied_groups(
    tied: Sequence[tuple[Where, Where]], modules: Sequence[Module]
) -> list[list[tuple[int, int]]]:
    """Arrays that are one parameter: for each group, the stage and the number of each array."""
    faults: list[Fault] = []
    groups: list[list[tuple[int, int]]] = []
    for n, pair in enumerate(tied):
        one, other = (_places(where, modules) for where in pair)
        faults += _tie_faults(f"tied[{n}]", one, other, modules)
        if not faults:
            for places in zip(one, other, strict=True):
                _join(groups, places)
    if faults:
        raise PlacementError(faults)
    return groups


@dataclass(frozen=True)
class _Mark:
    """Stands for an array, to find out which ones `where` takes."""

    stage: int
    number: int


def _places(where: Where, modules: Sequence[Module]) -> list[tuple[int, int]]:
    marked = [
        module.form.outline.fill([_Mark(module.number, i) for i in range(len(module.form.structs))])
        for module in modules
    ]
    found = jax.tree.leaves(where(marked))
    return [(x.stage, x.number) for x in found if isinstance(x, _Mark)]


def _tie_faults(
    name: str, one: list[tuple[int, int]], other: list[tuple[int, int]], modules: Sequence[Module]
) -> Iterator[Fault]:
    def struct(place: tuple[int, int]) -> Struct:
        return modules[place[0]].form.structs[place[1]]

    request = "one parameter in two places"
    mend = "give two functions of the stages, whose arrays have equal shapes and dtypes"
    if len(one) != len(other) or not one:
        reason = f"the first function takes {len(one)} arrays, and the second {len(other)}"
        yield replace(because(reason, mend, request), path=name)
        return
    for x, y in zip(one, other, strict=True):
        a, b = struct(x), struct(y)
        if a.shape != b.shape or a.dtype != b.dtype:
            reason = (
                f"stages[{x[0]}] has {a.dtype}{a.shape}, and stages[{y[0]}] has {b.dtype}{b.shape}"
            )
            yield replace(because(reason, mend, request), path=name)
        if x == y:
            yield replace(because("both are the same array", mend, request), path=name)
        if not jax.numpy.issubdtype(a.dtype, jax.numpy.inexact):
            yield replace(because("integers have no gradient", mend, request), path=name)


def _join(groups: list[list[tuple[int, int]]], places: Sequence[tuple[int, int]]) -> None:
    """Adds places of one parameter to the groups that have one of them, which become one group."""
    touched = [group for group in groups if not set(places).isdisjoint(group)]
    joined = list(dict.fromkeys([*(x for group in touched for x in group), *places]))
    groups[:] = [group for group in groups if group not in touched] + [joined]

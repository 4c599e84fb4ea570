"""Reads the stages of a pipeline, and finds everything that is wrong with them."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.tree_util as jtu
from jax.sharding import Mesh, NamedSharding, Sharding

from ..._core.errors import Fault, PlacementError, because
from ..._core.placement import show, show_mesh
from ..._core.tree import Arrays, Kind, Leaves, first_difference, outline_of
from ..._moving.transfer import same_place
from .schedule import Schedule
from .stage import Form, Struct, split_as, struct_of


@dataclass(frozen=True, eq=False)
class Module:
    """A stage as it was first given. The values of its arrays may change, and nothing else."""

    number: int
    mesh: Mesh
    form: Form

    def arrays_of(self, stage: object, faults: list[Fault]) -> Arrays:
        """The arrays of the same stage, given again."""
        leaves = split_as(stage, f"stages[{self.number}]")
        if outline_of(leaves) != self.form.outline:
            faults.append(self._difference(stage))
            return []
        for i, (x, kind, struct) in enumerate(
            zip(leaves.arrays, leaves.kinds, self.form.structs, strict=True)
        ):
            if reason := _changed(x, kind, struct):
                fix = "give each stage as it was given to pipeline; only values may change"
                faults.append(leaves.at(i, because(reason, fix, self.request)))
        return leaves.arrays

    @property
    def request(self) -> str:
        return f"stage {self.number} of a pipeline"

    def _difference(self, stage: object) -> Fault:
        before = self.form.outline.fill(self.form.structs)
        reason = "its static leaves are others than when the pipeline was made"
        path = ""
        if jtu.tree_structure(before) != jtu.tree_structure(stage):
            path, was, now = first_difference(before, stage)
            reason = f"when the pipeline was made it was {was}, and now it is {now}"
        fix = "make another pipeline for stages of another structure"
        return because(reason, fix, self.request, f"stages[{self.number}]{path}")


def _changed(array: jax.Array, kind: Kind, struct: Struct) -> str:
    if kind is not Kind.DEVICE:
        return "it is no array on a mesh"
    if array.shape != struct.shape or array.dtype != struct.dtype:
        return f"it was {struct.dtype}{struct.shape} when the pipeline was made"
    here, there = array.sharding, struct.sharding
    assert isinstance(there, Sharding)
    if here is not there and not same_place(here, there, array.ndim):
        return f"it was {show(there, None)} when the pipeline was made"
    return ""


def read_stages(stages: Sequence[object], schedule: Schedule) -> list[Module]:
    """The stages as they are given first. Raises for everything that is wrong with them."""
    faults: list[Fault] = []
    if len(stages) != schedule.stages:
        reason = f"the schedule {schedule.name!r} is for {schedule.stages}"
        fix = "make the schedule for as many stages as there are"
        faults.append(because(reason, fix, f"a pipeline of {len(stages)} stages"))
    trees = [split_as(stage, f"stages[{s}]") for s, stage in enumerate(stages)]
    own_meshes = [_mesh_of(s, leaves, faults) for s, leaves in enumerate(trees)]
    count = min(len(stages), schedule.stages)
    meshes = [_shared_mesh(s, own_meshes, schedule, faults) for s in range(count)]
    for s, stage in enumerate(stages):
        if not callable(stage):
            fix = "give a Module or a function"
            faults.append(because("it can't be called", fix, f"stage {s}", f"stages[{s}]"))
    if faults:
        raise PlacementError(faults)
    return [
        Module(s, mesh, Form(outline_of(leaves), tuple(map(struct_of, leaves.arrays))))
        for s, (mesh, leaves) in enumerate(zip(meshes, trees, strict=True))
        if mesh is not None
    ]


def _mesh_of(s: int, leaves: Leaves, faults: list[Fault]) -> Mesh | None:
    """The mesh of the first array that is on one. All others must be there, too."""
    first, name = None, ""
    request = f"stage {s} of a pipeline"
    for i, (x, kind) in enumerate(zip(leaves.arrays, leaves.kinds, strict=True)):
        where = getattr(x, "sharding", None) if kind is not Kind.HOST else None
        mesh = where.mesh if isinstance(where, NamedSharding) else None
        if not isinstance(mesh, Mesh):
            place = "a NumPy array" if kind is Kind.HOST else f"on {where and show(where, None)}"
            fix = f"move it first: mylib.filter_device_put(stages[{s}], placement, mesh=...)"
            faults.append(leaves.at(i, because(f"it is {place}, and on no mesh", fix, request)))
        elif first is None:
            first, name = mesh, leaves.name(i)
        elif mesh != first:
            reason = f"it is on the {_with_devices(mesh)}, and {name} on the {_with_devices(first)}"
            fix = "put all arrays of a stage on one mesh"
            faults.append(leaves.at(i, because(reason, fix, request)))
    return first


def _with_devices(mesh: Mesh) -> str:
    ids = [device.id for device in mesh.devices.flat]
    return f"{show_mesh(mesh)} of the devices {ids}"


def _shared_mesh(
    s: int, own_meshes: Sequence[Mesh | None], schedule: Schedule, faults: list[Fault]
) -> Mesh | None:
    """The mesh of a stage: that of the first stage which the schedule runs on the same mesh."""
    beside = [i for i in range(len(own_meshes)) if schedule.mesh_of(i) == schedule.mesh_of(s)]
    with_mesh = [(i, own_meshes[i]) for i in beside if own_meshes[i] is not None]
    request = f"stage {s} of a pipeline"
    if not with_mesh:
        reason = "neither it nor another stage of its mesh has arrays, so its mesh is unknown"
        fix = "make it a part of the stage before or after it"
        faults.append(because(reason, fix, request, f"stages[{s}]"))
        return None
    first, mesh = with_mesh[0]
    if own_meshes[s] is not None and own_meshes[s] != mesh:
        reason = (
            f"it is on another mesh than stages[{first}], and the schedule {schedule.name!r} runs "
            "both on one"
        )
        faults.append(because(reason, "put both on the same mesh", request, f"stages[{s}]"))
    return mesh

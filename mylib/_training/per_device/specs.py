"""The mesh axes that `filter_shard_map` splits over, and the shardings of its arguments."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NoReturn

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ..._core.compat import sharding_under
from ..._core.errors import Fault, PlacementError, because
from ..._core.placement import (
    AnyMesh,
    Decision,
    Placement,
    Target,
    World,
    axes_in,
    axis_names as names_of,
    decide,
    entries_of,
    is_placement_leaf,
    same_axes,
    show_mesh,
    unfit_rank,
    unfit_shape,
    unusual_memory_kind,
)
from ..._core.tree import Arrays, Kind, Leaves, kind_of
from ..jit import Function, Inputs, Targets


@dataclass(frozen=True)
class ManualMesh:
    """The mesh to split over, with the axis types of the surrounding context, and the names of the
    manual axes.
    """

    mesh: AnyMesh
    names: frozenset[str]

    @cached_property
    def explicit(self) -> frozenset[str]:
        """The manual axes that are Explicit outside: an array's type shows how it is split over
        them.
        """
        return self.names.intersection(self.mesh.explicit_axes)

    def unfit_input(self, target: Target, shape: tuple[int, ...]) -> Iterator[Fault]:
        yield from list(self._unfit(target)) or unfit_shape(target, shape)

    def unfit_output(self, target: Target, shape: tuple[int, ...]) -> Iterator[Fault]:
        faults = list(self._unfit(target))
        for fault in faults or unfit_rank(spec_in(target), shape):
            yield fault if faults or shape else replace(fault, fix=_FOR_NUMBERS)

    def _unfit(self, target: Target) -> Iterator[Fault]:
        if not isinstance(target, NamedSharding):
            yield because("shard_map splits arrays over a mesh", "give a PartitionSpec")
            return
        if not same_axes(target.mesh, self.mesh):
            yield because(
                f"shard_map splits over {show_mesh(self.mesh)} here",
                "give a PartitionSpec over that",
            )
            return
        if unusual_memory_kind(target) is not None:
            yield because(
                "the shards of an array are in the devices' own memory inside shard_map",
                "leave out the memory kind, and use mylib.filter_device_put before or after",
            )
        if PartitionSpec.UNCONSTRAINED in target.spec.partitions:
            yield because("shard_map leaves no choice to the compiler", "write the axes, or None")
        for name in sorted(axes_in(target.spec) - self.names, key=str):
            yield because(
                f"{name!r} is not among the axes that are split over here, "
                f"{tuple(sorted(self.names, key=str))}",
                "leave it out of the spec, or name it in axis_names",
            )

    def spec_of(self, array: jax.Array) -> PartitionSpec | None:
        """How an array is split over the mesh, if known."""
        is_here = kind_of(array) is Kind.DEVICE
        sharding = array.sharding if is_here else jax.typeof(array).sharding
        if not isinstance(sharding, NamedSharding) or not same_axes(sharding.mesh, self.mesh):
            return None
        return sharding.spec if self.explicit.issubset(sharding.mesh.explicit_axes) else None

    def beside(self, target: NamedSharding, spec_now: PartitionSpec) -> NamedSharding:
        """The target of an array, which stays split as it is now over all other axes."""
        spec, taken = target.spec, axes_in(target.spec) | self.names
        pairs = zip(entries_of(spec, len(spec_now)), entries_of(spec_now, len(spec)), strict=True)
        entries = [
            (*names_of(asked), *(name for name in names_of(entry) if name not in taken))
            for asked, entry in pairs
        ]
        return target.update(spec=spec.update(partitions=entries))


_FOR_NUMBERS = (
    "return x[None] if each device has a number of its own; or write P() if all have the same, "
    "after jax.lax.psum or pmean"
)


@dataclass(frozen=True, eq=False)
class Specs(Inputs):
    """How the arguments of a function are split over the axes `manual` (None: all)."""

    function: Function
    manual: frozenset[str] | None

    option = "in_specs"
    otherwise = PartitionSpec()
    # Inside a program the program itself places its arguments. It also reshards arrays that are on
    # the mesh.
    also_staged = False
    decisive = ("sharding",)

    def refuse(self, reason: str, fix: str) -> NoReturn:
        request = f"filter_shard_map of {self.function.name}"
        raise PlacementError([because(reason, fix, request)])

    def region(self, world: World) -> ManualMesh:
        mesh = self._mesh_in(world)
        free = frozenset(mesh.axis_names).difference(mesh.manual_axes)
        names = free if self.manual is None else self.manual
        if not free:
            self.refuse(
                f"the outer filter_shard_map splits over all axes of {show_mesh(mesh)} already",
                f"call {self.function.name} itself, or give the outer filter_shard_map axis_names= "
                "that leave an axis for this one",
            )
        if not names <= free:
            self.refuse(
                f"its axis_names are {tuple(sorted(names, key=str))}, and the axes of "
                f"{show_mesh(mesh)} that are not split over yet are "
                f"{tuple(sorted(free, key=str))}",
                "name some of these in axis_names",
            )
        return ManualMesh(mesh, names)

    def _mesh_in(self, world: World) -> AnyMesh:
        around = world.mesh
        requested = self._requested_mesh
        if around.empty:
            mesh = requested or world.devices
            if mesh is None:
                self.refuse(
                    "there is no mesh here",
                    "pass `mesh=`, or call it under `jax.set_mesh(mesh)`",
                )
            return mesh
        other = "" if requested is None else _difference(requested, world)
        if other:
            self.refuse(
                f"the mesh in force here is {show_mesh(around)}, and `mesh=` is {other}",
                "leave out `mesh=`, or call it outside of `jax.set_mesh`",
            )
        return around if world.staged or world.devices is None else world.devices

    @cached_property
    def _requested_mesh(self) -> AnyMesh | None:
        if self.mesh is not None:
            return self.mesh
        leaves = jax.tree.leaves(self.placement, is_leaf=is_placement_leaf)
        return next((leaf.mesh for leaf in leaves if isinstance(leaf, NamedSharding)), None)

    def elsewhere(self, array: jax.Array, target: Target | None) -> Iterator[Fault]:
        """The fault of an array that should keep its sharding, and is not on the mesh."""
        if target is None and kind_of(array) is Kind.DEVICE and array.committed:
            yield because(
                f"it is elsewhere, at {array.sharding}",
                "move it before, or write a PartitionSpec",
                "None: keep its sharding",
            )

    def decide(self, leaves: Leaves, prefix: PyTree[Placement], world: World) -> Decision:
        region = self.region(world)
        return decide(leaves, prefix, region.mesh, world, fit=region.unfit_input)

    def needed(
        self, leaves: Leaves, targets: Targets, fun_arrays: Arrays, world: World
    ) -> tuple[Targets, Targets]:
        """Moves arrays that are not on the mesh."""
        mesh = self.region(world).mesh
        moves: list[Target | None] = []
        faults: list[Fault] = []
        for i, (array, target) in enumerate(zip(leaves.arrays, targets, strict=True)):
            is_on = _is_on(mesh, array)
            moves.append(None if is_on else target)
            if not is_on:
                faults += [leaves.at(i, fault) for fault in self.elsewhere(array, target)]
        if faults:
            raise PlacementError(faults)
        whole = NamedSharding(mesh, PartitionSpec())
        return moves, [None if _is_on(mesh, array) else whole for array in fun_arrays]


def _difference(mesh: AnyMesh, world: World) -> str:
    """The difference between `mesh` and the one in force, if there is one. Inside of a program the
    types of axes are those of the program.
    """
    around, devices = world.mesh, world.devices
    if not same_axes(mesh, around):
        return f"another, {show_mesh(mesh)}"
    if isinstance(mesh, Mesh) and devices is not None:
        if list(mesh.devices.flat) != list(devices.devices.flat):
            return "over other devices, or over the same in another order"
    return (
        "of other axis types" if not world.staged and mesh.axis_types != around.axis_types else ""
    )


def spec_in(target: Target) -> PartitionSpec:
    """The spec of a target that fits a `ManualMesh`."""
    assert isinstance(target, NamedSharding)
    return target.spec


def _is_on(mesh: AnyMesh, array: jax.Array) -> bool:
    """Whether an array is on this mesh, with any spec."""
    sharding = array.sharding if kind_of(array) is Kind.DEVICE else sharding_under(array)
    if not isinstance(sharding, NamedSharding) or sharding.mesh != mesh:
        return False
    return unusual_memory_kind(sharding) is None

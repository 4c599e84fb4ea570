"""The mesh axes that `filter_shard_map` splits over, and the shardings of its arguments."""

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NoReturn

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._compat import sharding_under
from .._errors import Fault, PlacementError, because
from .._jit import Function, Inputs, Targets
from .._placement import (
    AnyMesh,
    Decision,
    Target,
    World,
    axes_in,
    axis_names as names_of,
    decide,
    default_memory_kind,
    entries_of,
    is_placement_leaf,
    same_axes,
    show_mesh,
    unfit_rank,
    unfit_shape,
    unusual_memory_kind,
)
from .._text import show_spec
from .._tree import Arrays, Kind, Leaves, kind_of


@dataclass(frozen=True)
class ManualMesh:
    """The mesh to split over, with the axis types of the surrounding context, and the names of the
    manual axes.
    """

    mesh: AnyMesh
    names: frozenset[Any]

    @cached_property
    def explicit(self) -> frozenset[Any]:
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

    def spec_of(self, x: Any) -> PartitionSpec | None:
        """How an array is split over the mesh, if known."""
        sharding = x.sharding if kind_of(x) is Kind.DEVICE else jax.typeof(x).sharding
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
    manual: frozenset[Any] | None
    reshard: bool

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
        devices = world.devices
        other = "" if requested is None else _difference(requested, around, devices)
        if other:
            self.refuse(
                f"the mesh in force here is {show_mesh(around)}, and `mesh=` is {other}",
                "leave out `mesh=`, or call it outside of `jax.set_mesh`",
            )
        if world.staged:
            return around  # axis types can't change inside a program
        if requested is not None and requested.axis_types != around.axis_types:
            if not (world.clean and isinstance(requested, Mesh)):
                self.refuse(
                    f"`mesh=` has axes of the types {_show_types(requested)}, and those of the "
                    f"mesh in force here are {_show_types(around)}",
                    "leave out `mesh=`, or call it outside of `jax.set_mesh`, or in `jax.jit`, "
                    "where the types in force count",
                )
            return requested
        return around if devices is None else devices

    def in_force(self, world: World) -> AbstractContextManager[None]:
        """Sets the given mesh if the current one differs only in its axis types: an explicit
        `mesh=` takes precedence, as in `filter_shard`.
        """
        around = world.mesh
        requested = None if around.empty or not world.clean else self._requested_mesh
        if isinstance(requested, Mesh) and same_axes(requested, around):
            if requested.axis_types != around.axis_types:
                return jax.set_mesh(requested)
        return nullcontext()

    @cached_property
    def _requested_mesh(self) -> AnyMesh | None:
        if self.mesh is not None:
            return self.mesh
        leaves = jax.tree.leaves(self.placement, is_leaf=is_placement_leaf)
        return next((x.mesh for x in leaves if isinstance(x, NamedSharding)), None)

    def unmovable(self, x: Any, target: Target | None) -> Iterator[Fault]:
        """The fault of an array that is not on the mesh and must not be moved."""
        if (
            kind_of(x) is not Kind.DEVICE
            or not x.committed
            or (target is not None and self.reshard)
        ):
            return
        reason = f"it is elsewhere, at {x.sharding}"
        if target is None:
            request, fix = "None: keep its sharding", "write a PartitionSpec"
        else:
            request, fix = show_spec(spec_in(target)), "leave out reshard=False"
            reason += ", and reshard=False"
        yield because(reason, f"move it before, or {fix}", request)

    def decide(self, leaves: Leaves, prefix: Any, world: World) -> Decision:
        region = self.region(world)
        return decide(leaves, prefix, region.mesh, world, fit=region.unfit_input)

    def needed(
        self, leaves: Leaves, targets: Targets, fun_arrays: Arrays, world: World
    ) -> tuple[Targets, Targets]:
        """Moves arrays that are not on the mesh."""
        mesh = self.region(world).mesh
        elsewhere = [not _is_on(mesh, x) for x in leaves.arrays]
        faults = [
            leaves.at(i, fault)
            for i, (x, target) in enumerate(zip(leaves.arrays, targets, strict=True))
            if elsewhere[i]
            for fault in self.unmovable(x, target)
        ]
        if faults:
            raise PlacementError(faults)
        whole = NamedSharding(mesh, PartitionSpec())
        return (
            [to if away else None for to, away in zip(targets, elsewhere, strict=True)],
            [None if _is_on(mesh, x) else whole for x in fun_arrays],
        )


def _difference(mesh: AnyMesh, around: AnyMesh, devices: Mesh | None) -> str:
    """The difference between `mesh` and the mesh around it; empty if only the axis types differ."""
    if not same_axes(mesh, around):
        return f"another, {show_mesh(mesh)}"
    if isinstance(mesh, Mesh) and devices is not None:
        if list(mesh.devices.flat) != list(devices.devices.flat):
            return "over other devices, or over the same in another order"
    return ""


def _show_types(mesh: AnyMesh) -> str:
    return "(" + ", ".join(kind.name for kind in mesh.axis_types) + ")"


def spec_in(target: Any) -> PartitionSpec:
    """The spec of a target that fits a `ManualMesh`."""
    return target.spec


def _is_on(mesh: AnyMesh, x: Any) -> bool:
    """Whether an array is on this mesh, with any spec."""
    sharding = x.sharding if kind_of(x) is Kind.DEVICE else sharding_under(x)
    if not isinstance(sharding, NamedSharding) or sharding.mesh != mesh:
        return False
    return sharding.memory_kind in (None, _memory_of(mesh))


@functools.lru_cache(maxsize=64)
def _memory_of(mesh: AnyMesh) -> str:
    return default_memory_kind(NamedSharding(mesh, PartitionSpec()))

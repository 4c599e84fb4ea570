"""Checks whether a target fits an array, a mesh, and the surrounding code. The caller fills in
`path` and `request` of the faults.
"""

import difflib
import inspect
import math
from collections.abc import Iterator
from itertools import combinations
from typing import Any

from jax.experimental.layout import Layout
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from ..errors import Fault, because
from ..text import counted, show_spec
from ..tree import is_of_keys
from .context import World
from .shardings import (
    AnyMesh,
    Target,
    axes_in,
    axis_names,
    axis_types,
    mesh_in_force,
    same_axes,
    sharding_of,
)

_NO_AXIS = "has no axis"


def lacks_axis(fault: Fault) -> bool:
    """Whether a fault is that the mesh doesn't have an axis."""
    return _NO_AXIS in fault.reason


def unfit_spec(spec: PartitionSpec, mesh: AnyMesh) -> Iterator[Fault]:
    names = [name for entry in spec.partitions for name in axis_names(entry)]
    for name in dict.fromkeys([*names, *spec.unreduced, *spec.reduced]):
        if name not in mesh.axis_names:
            close = difflib.get_close_matches(str(name), [str(n) for n in mesh.axis_names], 1)
            yield because(
                f"{show_mesh(mesh)} {_NO_AXIS} {name!r}",
                f"did you mean {close[0]!r}?" if close else f"use one of {mesh.axis_names}",
            )
        elif names.count(name) > 1:
            yield because(
                f"the axis {name!r} is used {names.count(name)} times", "use each axis once"
            )
    yield from unfit_partial_sums(spec, mesh)
    if PartitionSpec.UNCONSTRAINED in spec.partitions and not mesh.auto_axes:
        yield because(
            f"{show_mesh(mesh)} has no Auto axis, so the compiler chooses for no dimension",
            "write the axes, or None, in place of UNCONSTRAINED",
        )


def unfit_partial_sums(spec: PartitionSpec, mesh: AnyMesh) -> Iterator[Fault]:
    """Checks whether this mesh allows the axes that `spec` names as unreduced or reduced."""
    for role, names in (("unreduced", spec.unreduced), ("reduced", spec.reduced)):
        types = axis_types(mesh) if names else {}
        # JAX reshards to these only if all axes of the mesh are Explicit.
        others = sorted(name for name in types if types[name] != AxisType.Explicit)
        if others:
            kinds = ", ".join(f"{name!r} is {types[name].name}" for name in others)
            yield because(
                f"an array can be {role} only over a mesh whose axes are all Explicit, and of "
                f"{show_mesh(mesh)} {kinds}",
                f"make the mesh with axis_types=(AxisType.Explicit,) * {len(types)}, or leave out "
                f"{role}=",
            )


def unfit_shape(target: Target, shape: tuple[int, ...]) -> Iterator[Fault]:
    sharding = sharding_of(target)
    if not isinstance(sharding, NamedSharding):
        try:
            sharding.shard_shape(shape)
        except ValueError as error:
            yield because(f"the sharding does not fit: {error}", "give a sharding for this shape")
        return
    if len(sharding.spec) > len(shape):
        yield from unfit_rank(sharding.spec, shape)
        return
    for dim, entry in enumerate(sharding.spec.partitions):
        parts = math.prod(map(sharding.mesh.shape.__getitem__, axis_names(entry)))
        # Symbolic sizes, as in `jax.export`, are checked when the exported program is called.
        if isinstance(shape[dim], int) and shape[dim] % parts:
            yield because(
                f"dimension {dim} of size {shape[dim]} does not divide into the {parts} parts of "
                f"{entry!r}",
                f"pad it to {-(-shape[dim] // parts) * parts}"
                + ("" if dim else " (a batch: mylib.data.prefetch(..., tail='pad'))")
                + ", shard another dimension, or write None for this one",
            )


def unfit_rank(spec: PartitionSpec, shape: tuple[int, ...]) -> Iterator[Fault]:
    if len(spec) > len(shape):
        fix = f"give at most {len(shape)}; for a whole model, pass a rule (mylib.rules)"
        if not shape and len(spec) == 1:
            fix = (
                "write P(); for a batch with numbers in it pass "
                f"rules.batch({spec.partitions[0]!r}), which copies them, and for a whole model "
                "another rule (mylib.rules)"
            )
        entries = counted(len(spec), "entry", "entries")
        yield because(f"the spec has {entries}, for an array of rank {len(shape)}", fix)


def unfit_layout(layout: object, x: Any) -> Iterator[Fault]:
    if is_of_keys(x):
        yield because("the layout of typed keys can't be chosen", "give the sharding alone")
    elif not isinstance(layout, Layout):
        yield because(
            "the layout is AUTO, and the compiler has nothing here to choose by",
            "write a Layout, or give the sharding alone",
        )
    elif sorted(layout.major_to_minor) != list(range(len(x.shape))):
        yield because(
            f"the layout orders the dimensions {layout.major_to_minor} and the array has "
            f"{tuple(range(len(x.shape)))}",
            "name each dimension once, from the major to the minor one",
        )


def _unfit_mesh(mesh: AnyMesh, world: World, size: int | None) -> Iterator[Fault]:
    if size is None and isinstance(mesh, AbstractMesh):
        yield because(
            "an abstract mesh has no devices, and the devices of this code are unknown here",
            "pass a `jax.sharding.Mesh`, or call this under `jax.set_mesh(mesh)`",
        )
    elif size is not None and size != mesh.size:
        yield because(
            f"this code runs on {size} devices and {show_mesh(mesh)} has {mesh.size}",
            "constrain to the mesh of the computation, or move the array outside of it",
        )
    elif (
        isinstance(mesh, Mesh)
        and world.devices is not None
        and tuple(mesh.devices.flat) != tuple(world.devices.devices.flat)
    ):
        yield because(
            f"{show_mesh(mesh)} is over other devices, or in another order, than the mesh in "
            "force here",
            "constrain to the mesh of `jax.set_mesh`, or move the array outside of this function",
        )
    if world.mesh.are_all_axes_explicit and mesh.auto_axes and not same_axes(mesh, world.mesh):
        yield because(
            f"{show_mesh(mesh)} has Auto axes, and the mesh in force here has only Explicit ones",
            f"constrain to {show_mesh(world.mesh)}, which is in force",
        )


def unfit_staged(sharding: Sharding, world: World, size: int | None) -> Iterator[Fault]:
    if not isinstance(sharding, NamedSharding):
        if world.manual_axes or (size is not None and size != len(sharding.device_set)):
            yield because(
                "a placement without mesh axes can't be used inside a program over "
                f"{size or 'several'} devices",
                "move the array before or after the transformed function, or name mesh axes",
            )
        return
    spec = sharding.spec.partitions
    for axis in [n for entry in spec for n in axis_names(entry) if n in world.manual_axes]:
        yield because(
            f"inside shard_map the axis {axis!r} is Manual: arrays are already split over it",
            "leave it out of the spec; shard over it by `in_specs` and `out_specs`",
        )
    yield from _unfit_mesh(sharding.mesh, world, size)
    mesh = mesh_in_force(sharding.mesh, world)
    yield from unfit_partial_sums(sharding.spec, mesh)
    explicit = set(mesh.explicit_axes)
    for name in sorted(explicit & world.spmd_axes):
        yield because(
            f"spmd_axis_name={name!r} is an Explicit axis, and JAX drops it when resharding",
            "split the batch over it outside of vmap, or make the axis Auto",
        )
    for name in sorted(explicit & world.batch_axes & axes_in(sharding.spec)):
        yield because(
            f"the batch of a surrounding vmap is split over {name!r} already",
            "leave that axis out of the spec, or place the batch otherwise outside of vmap",
        )


def unfit_order(sharding: Sharding, world: World) -> Iterator[Fault]:
    """The faults of dimensions that a program can't be constrained to: shard_map can split them."""
    if not isinstance(sharding, NamedSharding):
        return
    types = axis_types(mesh_in_force(sharding.mesh, world))
    for entry in sharding.spec.partitions:
        kinds = [types[name] for name in axis_names(entry)]
        if (AxisType.Auto, AxisType.Explicit) in combinations(kinds, 2):
            yield because(
                f"{entry!r} nests an Explicit axis inside an Auto one",
                "put the Explicit axes first in that dimension",
            )


def show(entry: object, mesh: AnyMesh | None) -> str:
    if isinstance(entry, PartitionSpec):
        text = show_spec(entry)
        return text if mesh is None else f"{text} over {show_mesh(mesh)}"
    if isinstance(entry, NamedSharding):
        kind = "" if entry.memory_kind is None else f" in {entry.memory_kind} memory"
        return f"{show_spec(entry.spec)} over {show_mesh(entry.mesh)}{kind}"
    return entry.__qualname__ if inspect.isfunction(entry) else repr(entry)


def show_mesh(mesh: AnyMesh) -> str:
    return "mesh (" + ", ".join(f"{n!r}: {s}" for n, s in mesh.shape.items()) + ")"

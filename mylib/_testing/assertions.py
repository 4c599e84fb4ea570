"""Assertions about the placement of arrays."""

from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, Sharding
from jaxtyping import PyTree

from .._core.compat import sharding_under
from .._core.errors import listed
from .._core.placement import (
    AnyMesh,
    Placement,
    Target,
    World,
    current_world,
    memory_space,
    mesh_in_force,
    resolve_leaves,
    same_axes,
    sharding_of,
)
from .._core.text import counted
from .._core.tree import Kind, Leaves, split
from .._moving.transfer import is_there, same_place, same_type


def assert_placed(
    tree: PyTree[Any], placement: PyTree[Placement], /, mesh: AnyMesh | None = None
) -> None:
    """Asserts that the arrays of a tree are where `mylib.filter_shard` would put them, so that
    it would move nothing. A replicated array fails if a sharded one is expected.

    Inside `jax.jit` shardings are known if all axes of the mesh are Explicit. Otherwise the
    compiler decides later, and the assertion fails: check the results of the function instead.

    **Arguments:**

    - `tree`, `placement`: as in `mylib.filter_shard`.
    - `mesh`: the mesh for a `PartitionSpec`; by default the mesh of `jax.set_mesh`, or else the
        mesh of the arrays, if they are all on one.

    **Raises:**

    `AssertionError` that lists the leaves that are elsewhere.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=8)
        batch = mylib.filter_shard({"x": np.zeros((16, 4))}, P("data"), mesh=mesh)
        mylib.testing.assert_placed(batch, P("data"), mesh=mesh)
        ```
    """
    __tracebackhide__ = True
    leaves, world = split(tree), current_world()
    if mesh is None and world.mesh.empty and world.devices is None:
        mesh = _mesh_of(leaves, world)
    targets = resolve_leaves(leaves, placement, mesh, world)
    wrong: dict[tuple[str, ...], list[str]] = {}
    for i, (x, kind, target) in enumerate(zip(leaves.arrays, leaves.kinds, targets, strict=True)):
        if target is not None and not _is_there(x, kind, target, world):
            texts = f"is at: {_shown_location(x, world)}", f"wanted: {sharding_of(target)}"
            wrong.setdefault(texts, []).append(f"{leaves.name(i)} {tuple(x.shape)}")
    if wrong:
        count = sum(map(len, wrong.values()))
        (there, wanted), (name, *_) = next(iter(wrong.items()))
        first = f"{counted(count, 'leaf', 'leaves')} not where expected; the first: {name} {there}"
        lines = listed(wrong, f"{count} leaves in all")
        raise AssertionError("\n".join([f"{first}, {wanted}", *lines]))


def _mesh_of(leaves: Leaves, world: World) -> AnyMesh | None:
    """The mesh of the arrays, if they are all on one."""
    places = (_known_sharding(x, world) for x in leaves.arrays)
    meshes = {place.mesh for place in places if isinstance(place, NamedSharding)}
    return meshes.pop() if len(meshes) == 1 else None


def _known_sharding(x: Any, world: World) -> Sharding | None:
    if not isinstance(x, Tracer):
        return getattr(x, "sharding", None)
    if world.staged:
        sharding = jax.typeof(x).sharding
        return sharding if sharding.mesh.are_all_axes_explicit else None
    sharding = sharding_under(x)
    return sharding if isinstance(sharding, Sharding) else None


def _is_there(x: Any, kind: Kind, target: Target, world: World) -> bool:
    if kind is Kind.DEVICE:
        return is_there(x, kind, target)
    sharding, expected = _known_sharding(x, world), sharding_of(target)
    if kind is not Kind.TRACED or sharding is None:
        return False
    if not world.staged:
        return same_place(sharding, expected, x.ndim)
    if not (isinstance(sharding, NamedSharding) and isinstance(expected, NamedSharding)):
        return False
    mesh = mesh_in_force(expected.mesh, world)
    return (
        same_axes(mesh, sharding.mesh)
        and mesh.axis_types == sharding.mesh.axis_types
        and same_type(sharding, expected.update(mesh=sharding.mesh), x.ndim)
        and jax.typeof(x).memory_space == memory_space(expected)
    )


def _shown_location(x: Any, world: World) -> str:
    match x:
        case np.ndarray() | np.generic():
            return "no device: it is a NumPy array"
        case Tracer():
            sharding = _known_sharding(x, world)
            advice = "check the results of the function"
            return f"unknown: it is traced; {advice}" if sharding is None else str(sharding)
        case jax.ShapeDtypeStruct():
            return "no device: it has no values"
        case _:
            return f"{x.sharding}{'' if x.committed else ' (uncommitted)'}"

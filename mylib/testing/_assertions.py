"""Assertions about the placement of arrays, and about equal data in all processes."""

from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, Sharding
from jaxtyping import PyTree

from .._compat import sharding_under
from .._errors import listed
from .._links import is_handle
from .._placement import (
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
from .._processes import (
    check_replicas,
    checksum,
    everybody,
    everybodys_faults,
    meeting,
    named,
    owners,
)
from .._transfer import is_there, same_place, same_type
from .._tree import Kind, Leaves, is_of_keys, name_of, split


def assert_placed(
    tree: PyTree[Any], placement: PyTree[Placement], /, mesh: AnyMesh | None = None
) -> None:
    """Asserts that the arrays of a tree are where [`mylib.filter_shard`][] would put them, so that
    it would move nothing. A replicated array fails if a sharded one is expected.

    Inside `jax.jit` shardings are known if all axes of the mesh are Explicit. Otherwise the
    compiler decides later, and the assertion fails: check the results of the function instead.

    **Arguments:**

    - `tree`, `placement`: as in [`mylib.filter_shard`][].
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
        lines = listed(wrong, f"{sum(map(len, wrong.values()))} leaves in all")
        raise AssertionError("\n".join(["not where they should be:", *lines]))


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


def assert_same_everywhere(tree: PyTree[Any], /) -> None:
    """Asserts that all processes hold the same structure, shapes, dtypes and numbers, bit for bit;
    if not, it fails in all of them.

    **Arguments:**

    - `tree`: any PyTree. Local arrays are compared with those of the other processes, arrays over
        several processes by [`mylib.check_replicas`][]. One that only some processes hold fails:
        compare what [`mylib.mpmd.fetch`][] returns. Numbers, strings and None are compared by
        value, other static leaves by type. All processes must call this.

    **Raises:**

    `AssertionError` if the trees differ, [`mylib.ReplicaError`][] if copies of an array do.

    !!! Example

        ```python
        mylib.testing.assert_same_everywhere({"step": 3, "weight": jnp.ones(4)})
        ```
    """
    all_of_them = everybody()
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    facts = {name_of(path): _fact_of(x) for path, x in paths}
    meet = meeting("assert_same_everywhere", all_of_them)
    faults = everybodys_faults(meet, [], {all_of_them: facts})
    if faults:
        raise AssertionError("\n".join(f"{fault.path}: {fault.reason}" for fault in faults))
    check_replicas(tree)


def _fact_of(x: Any) -> str:
    kind = split(x).kinds
    if not kind or isinstance(x, jax.ShapeDtypeStruct):
        return repr(x) if x is None or isinstance(x, int | float | complex | str) else str(type(x))
    if is_handle(x):
        holders = named(owners(x.sharding))
        return f"{x.dtype}{list(x.shape)} on {holders} (compare what mylib.mpmd.fetch brings here)"
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return f"{x.dtype}{list(x.shape)} at {x.sharding}"
    if isinstance(x, jax.Array) and is_of_keys(x):
        return f"keys of {jax.random.key_impl(x)}, {_fact_of(jax.random.key_data(x))}"
    return f"{x.dtype}{list(x.shape)}, checksum {checksum([np.asarray(x)], x.dtype)}"

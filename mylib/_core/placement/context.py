"""The context of a call: eager or staged, and the mesh in force."""

import functools
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh

from ..compat import mesh_with_devices, trace_kind, vmapped_axes

# The axis of the mesh of one device on which steps are traced before they have a plan.
PLANNING = "_"


@dataclass(frozen=True)
class World:
    """The context of a call.

    `mesh` has the axis names, sizes and types in force (empty outside any mesh); `devices` is the
    same mesh with its devices, if they are known.
    """

    staged: bool
    mesh: AbstractMesh
    devices: Mesh | None
    # Whether the call is outside all transformations, also eager ones: only then does JAX allow
    # `jax.set_mesh`.
    clean: bool = False
    # The mesh axes that a surrounding `vmap` splits its batch over: Explicit axes of the batch
    # itself, and `spmd_axis_name`.
    batch_axes: frozenset[str] = frozenset()
    spmd_axes: frozenset[str] = frozenset()

    @property
    def manual_axes(self) -> frozenset[str]:
        """The axes that a surrounding `shard_map` has already split the arrays over."""
        return frozenset(self.mesh.manual_axes)

    def size_at(self, x: jax.Array) -> int | None:
        """The number of devices of the program that computes `x`, if known. It is unknown for
        constants, which are copied into any program that uses them.
        """
        mesh = self.mesh
        if mesh.empty and isinstance(x, Tracer):
            mesh = jax.typeof(x).sharding.mesh
        if not mesh.empty:
            return mesh.size
        return None if self.devices is None else self.devices.size


def current_world() -> World:
    mesh, concrete, kind = jax.sharding.get_abstract_mesh(), mesh_with_devices(), trace_kind()
    if kind == "eager":
        return _eager_world(mesh, concrete)
    batches = list(vmapped_axes())
    return World(
        staged=kind == "staged",
        batch_axes=_named(batch.explicit_mesh_axis for batch in batches),
        spmd_axes=_named(batch.spmd_name for batch in batches),
        mesh=mesh,
        devices=None if concrete.empty else concrete,
    )


@contextmanager
def no_mesh() -> Iterator[None]:
    """Puts the mesh in force aside. A program that is being traced stays on its mesh, as JAX
    demands.
    """
    world = current_world()
    with ExitStack() as stack:
        if world.clean and not (world.mesh.empty and world.devices is None):
            stack.enter_context(jax.set_mesh(None))
            # That of `with mesh:`, which JAX keeps elsewhere.
            if not mesh_with_devices().empty:
                stack.enter_context(Mesh(np.empty((), object), ()))
        yield


def planning_mesh() -> Mesh:
    # One device is enough for constraints that say where weights are gathered.
    return Mesh(np.array(jax.devices()[:1]), (PLANNING,), axis_types=(AxisType.Auto,))


@functools.lru_cache(maxsize=64)
def _eager_world(mesh: AbstractMesh, concrete: Mesh) -> World:
    """The world of calls outside all transformations, which are the most common."""
    return World(staged=False, mesh=mesh, devices=None if concrete.empty else concrete, clean=True)


def _named(axes: Iterable[Any]) -> frozenset[str]:
    names = [axis if isinstance(axis, tuple | list) else (axis,) for axis in axes]
    return frozenset(name for group in names for name in group if name is not None)

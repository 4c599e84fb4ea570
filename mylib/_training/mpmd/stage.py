"""One stage of a pipeline: what it receives, computes and sends."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from ..._core.placement import axis_names, is_described
from ..._core.tree import Arrays, Leaves, Made, Outline, Rest, outlined, split

Struct = jax.ShapeDtypeStruct


@dataclass(frozen=True)
class Form:
    """A tree of arrays whose shapes, dtypes and shardings are all that is known."""

    outline: Outline
    structs: tuple[Struct, ...]


def split_as(tree: Any, name: str) -> Leaves:
    return split(tree, naming=lambda path: f"{name}{jtu.keystr(path)}")


@dataclass(frozen=True, eq=False)
class Boundary:
    """What goes from a stage to the next one. Each array has a sharding on both meshes. Of a batch,
    which no stage sends, nothing `returns`.
    """

    outline: Outline
    sent: tuple[Struct, ...]
    received: tuple[Struct, ...]
    returns: bool = True

    @cached_property
    def floating(self) -> tuple[bool, ...]:
        """The arrays whose cotangents go back."""
        return tuple(self.returns and is_floating(x) for x in self.received)


@dataclass(frozen=True, eq=False)
class Stage:
    """A stage, without its arrays.

    The first one gets the whole batch, and takes microbatches of it. The last one computes the
    `loss` with microbatches of `targets`, and has no `after`.
    """

    number: int
    mesh: Mesh
    module: Form
    microbatches: int
    before: Boundary
    after: Boundary | None = None
    targets: Form | None = None
    loss: Callable[..., Any] | None = None
    # The type of the loss.
    value: Struct | None = None

    @cached_property
    def is_here(self) -> bool:
        """Whether this process has devices of its mesh. Those of a machine that you don't have are
        as good: programs can be compiled for them.
        """
        process = jax.process_index()
        return is_described(self.mesh) or any(
            device.process_index == process for device in self.mesh.devices.flat
        )

    @property
    def floating(self) -> tuple[bool, ...]:
        """The arrays of the module that have a gradient."""
        return tuple(is_floating(x) for x in self.module.structs)

    @property
    def params(self) -> list[Struct]:
        return chosen(self.module.structs, self.floating)

    @property
    def microbatch(self) -> list[Struct]:
        """The type of the microbatch's number, where it is needed."""
        if self.number and self.targets is None:
            return []
        return [Struct((), np.int32, sharding=NamedSharding(self.mesh, P()))]

    @property
    def arguments(self) -> tuple[list[Struct], list[Struct], list[Struct], list[Struct]]:
        """The types of the arguments of `compute`."""
        targets = list(self.targets.structs) if self.targets else []
        received = list(self.before.received)
        return list(self.module.structs), received, targets, self.microbatch

    def compute(
        self, module: Arrays, received: Arrays, targets: Arrays, microbatch: Arrays
    ) -> tuple[Arrays, Outline]:
        """The arrays that the user's function returns, or the last stage's loss, and the tree that
        they are in.
        """
        fun: Any = self.module.outline.fill(module)
        arrays = received if self.number else self._parts(received, microbatch)
        result = fun(self.before.outline.fill(arrays))
        if self.loss is not None:
            assert self.targets is not None
            result = self.loss(result, self.targets.outline.fill(self._parts(targets, microbatch)))
        return outlined(result)

    def _parts(self, arrays: Arrays, microbatch: Arrays) -> Arrays:
        """A microbatch: every n-th row, so that devices that hold a part of the rows find all of
        their part of each microbatch there.
        """
        n = self.microbatches
        rows = [x.reshape(x.shape[0] // n, n, *x.shape[1:]) for x in arrays]
        take = jax.lax.dynamic_index_in_dim
        return [take(x, microbatch[0], 1, keepdims=False) for x in rows]


def struct_of(array: jax.Array) -> Struct:
    return Struct(array.shape, array.dtype, sharding=array.sharding)


def is_floating(struct: Struct) -> bool:
    return jnp.issubdtype(struct.dtype, jnp.inexact)


T = TypeVar("T")
U = TypeVar("U")


def chosen(values: Sequence[T], flags: Iterable[bool]) -> list[T]:
    return [value for value, flag in zip(values, flags, strict=True) if flag]


def parted(values: Sequence[T], flags: Sequence[bool]) -> tuple[list[T], list[T]]:
    """The values where a flag is set, and those elsewhere."""
    return chosen(values, flags), chosen(values, [not flag for flag in flags])


def merged(flags: Iterable[bool], first: Iterable[T], second: Iterable[U]) -> list[T | U]:
    """The values of `first` where a flag is set, and those of `second` elsewhere."""
    yes, no = iter(first), iter(second)
    return [next(yes if flag else no) for flag in flags]


def shape_of_result(stage: Stage) -> tuple[list[Struct], Outline]:
    """The shapes of a stage's results."""

    def result(*args: Arrays) -> Made:
        arrays, outline = stage.compute(*args)
        return Made([jnp.asarray(x) for x in arrays], Rest(outline))

    with jax.set_mesh(stage.mesh):
        shapes = jax.eval_shape(result, *stage.arguments)
    return shapes.arrays, shapes.rest.outline


def boundary(
    structs: Sequence[Struct], outline: Outline, source: Mesh, target: Mesh, rows: int, axes: Any
) -> Boundary:
    """How the results of a stage are placed: arrays that have the rows of the microbatch as first
    dimension are split over `axes`, as the batch is; all others are on every device.
    """

    def placed(x: Struct, mesh: Mesh) -> Struct:
        named = tuple(name for name in axis_names(axes) if name in mesh.axis_names)
        parts = math.prod(mesh.shape[name] for name in named)
        splits = x.ndim > 0 and x.shape[0] == rows and rows % parts == 0 and bool(named)
        spec = P(named) if splits else P()
        return Struct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    sent, received = (tuple(placed(x, mesh) for x in structs) for mesh in (source, target))
    return Boundary(outline, sent, received)

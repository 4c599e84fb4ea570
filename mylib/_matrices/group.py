"""Matrices of one shape that are updated alike: which device owns which, and how they travel.

Each leaf is a stack of matrices (of one, if it has two dimensions). The stacks of a group are
joined to one. Of `n` devices over which they are sharded each gets `1/n` of the matrices whole, by
one all-to-all, and gives back its part of each update, by another one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from .._placement import AnyMesh, axis_names, in_own_dtypes
from .matrices import MatrixDims


@dataclass(frozen=True)
class MatrixGroup:
    """`numbers` are those of the leaves. `start` is the first owner: each group begins with the
    device behind the last one of the group before, so that all get equally many matrices.
    """

    numbers: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec
    dims: MatrixDims
    over: tuple[str, ...]
    mesh: AnyMesh
    start: int
    travels_as: Any

    def _axes(self, dim: int) -> tuple[str, ...]:
        entries = self.spec.partitions
        return axis_names(entries[dim]) if dim < len(entries) else ()

    def _size(self, axes: Sequence[str]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)

    @cached_property
    def owned(self) -> tuple[str, ...]:
        """The axes over which the stack itself is sharded: its matrices don't travel over them."""
        return sum((self._axes(d) for d in self.dims.batch), ())

    @cached_property
    def cut(self) -> tuple[str, ...]:
        """The axes over which matrices are cut into parts."""
        return sum((self._axes(d) for d in self.dims.rows + self.dims.columns), ())

    @cached_property
    def copied(self) -> tuple[str, ...]:
        """The axes of `over` along which every device has the same parts: each updates a share."""
        return tuple(a for a in self.over if a not in self.owned + self.cut)

    @cached_property
    def owners(self) -> int:
        """The number of devices that share a stack."""
        return self._size(self.copied + self.cut)

    @property
    def state_spec(self) -> PartitionSpec:
        return PartitionSpec(self.owned + self.copied + self.cut)

    @cached_property
    def matrix(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.dims.of_matrix(self.shape), self.dtype)

    @cached_property
    def stacks(self) -> int:
        """In how many parts the stack is sharded, each over devices of its own."""
        return self._size(self.owned)

    @cached_property
    def of_leaf(self) -> int:
        """The number of matrices in a leaf, on devices that share a stack."""
        return math.prod(self.shape[d] for d in self.dims.batch) // self.stacks

    @cached_property
    def count(self) -> int:
        return self.of_leaf * len(self.numbers)

    @cached_property
    def slots(self) -> int:
        """The most matrices that a device owns."""
        return -(-self.count // self.owners)

    @cached_property
    def stacked(self) -> int:
        """The length of the state's arrays, over all devices."""
        return self.slots * self.owners * self.stacks

    @cached_property
    def loads(self) -> np.ndarray:
        """How many matrices each owner has."""
        return shares(self.count, self.owners, self.start)

    @cached_property
    def slot_of(self) -> np.ndarray:
        """The slot of each matrix: those of the first owner come first, then the second's."""
        slots = [d * self.slots + j for d, n in enumerate(self.loads) for j in range(n)]
        return np.array(slots, dtype=np.int32)

    @cached_property
    def matrix_in(self) -> np.ndarray:
        """The matrix in each slot. A slot without one gets a copy of another matrix, as zeros would
        make NaNs in some optimisers.
        """
        found = np.arange(self.owners * self.slots, dtype=np.int32) % self.count
        found[self.slot_of] = np.arange(self.count)
        return found

    def sent(self, times: int) -> list[tuple[str, tuple[str, ...], int]]:
        """The collectives of an update that sends `times` matrices for each: their kind, over which
        axes, and of how many bytes.
        """
        size = math.prod(self.matrix.shape) * np.dtype(self.travels_as or self.dtype).itemsize
        both = [("all-to-all", self.cut, self.slots * size)] * (times if self.cut else 0)
        gathered = self.slots * self._size(self.copied) * math.prod(self.matrix.shape)
        whole = [("all-gather", self.copied, gathered * np.dtype(self.dtype).itemsize)]
        return both + (whole if self.copied else [])

    def per_device(self, fun: Any, in_specs: Any, out_specs: Any) -> Any:
        """A function that runs on each device, with its parts."""
        return jax.shard_map(
            fun, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    # --- over all devices: arrays of the state that have other shapes than the matrices -----------

    def stacked_from(self, members: Sequence[Any]) -> Any:
        """The state's array, from one for each leaf, whose first dimensions are its stack's."""
        k = len(self.dims.batch)
        inner = members[0].shape[k:]
        order = [*range(0, 2 * k, 2), *range(1, 2 * k, 2), *range(2 * k, 2 * k + len(inner))]
        stacks = [
            jnp.transpose(x.reshape(*self._halves, *inner), order).reshape(-1, self.of_leaf, *inner)
            for x in members
        ]
        return jnp.concatenate(stacks, axis=1)[:, self.matrix_in].reshape(-1, *inner)

    def members_of(self, x: Any) -> list[Any]:
        """The reverse."""
        k, inner = len(self.dims.batch), x.shape[1:]
        x = x.reshape(-1, self.owners * self.slots, *inner)[:, self.slot_of]
        back = [i for d in range(k) for i in (d, k + d)] + [2 * k + i for i in range(len(inner))]
        halves = self._halves[::2] + self._halves[1::2]
        batch = [self.shape[d] for d in self.dims.batch]
        return [
            jnp.transpose(y.reshape(*halves, *inner), back).reshape(*batch, *inner)
            for y in jnp.split(x, len(self.numbers), axis=1)
        ]

    @property
    def _halves(self) -> list[int]:
        """For each dimension of the stack, over how many devices it is sharded, and its part."""
        return [n for d in self.dims.batch for n in (self._size(self._axes(d)), self._local(d))]

    # --- inside of `shard_map` --------------------------------------------------------------------

    def whole(self, parts: Sequence[Any]) -> Any:
        """The matrices that this device owns, from its parts of the leaves."""
        x = jnp.concatenate([self._as_stack(x) for x in parts])
        x = _taken(x, self.matrix_in)
        if self.copied:
            length = x.shape[0] // self._size(self.copied)
            x = lax.dynamic_slice_in_dim(x, lax.axis_index(self.copied) * length, length)
        if self.cut:
            x = self._sent(x)
            x = self._joined(x)
        return x.reshape(x.shape[0], *self.matrix.shape)

    def parts(self, x: Any) -> list[Any]:
        """The parts of the leaves, from matrices that this device owns."""
        x = x.reshape(x.shape[0], *(self.shape[d] for d in self._inner))
        if self.cut:
            x = self._sent(self._apart(x))
        if self.copied:
            x = lax.all_gather(x, self.copied, tiled=True)
        x = _taken(x, self.slot_of)
        return [self._as_leaf(y) for y in jnp.split(x, len(self.numbers))]

    def load(self) -> Any:
        """The number of matrices that this device owns."""
        return jnp.asarray(self.loads)[lax.axis_index(self.copied + self.cut)]

    def _sent(self, x: Any) -> Any:
        dtype = x.dtype
        own = self.travels_as is None or in_own_dtypes.value
        x = x if own else x.astype(self.travels_as)
        return lax.all_to_all(x, self.cut, 0, 0, tiled=True).astype(dtype)

    @property
    def _inner(self) -> tuple[int, ...]:
        return self.dims.rows + self.dims.columns

    def _local(self, dim: int) -> int:
        return self.shape[dim] // self._size(self._axes(dim))

    def _as_stack(self, x: Any) -> Any:
        x = jnp.transpose(x, self.dims.order)
        return x.reshape(self.of_leaf, *(self._local(d) for d in self._inner))

    def _as_leaf(self, x: Any) -> Any:
        x = x.reshape([self._local(d) for d in self.dims.order])
        return jnp.transpose(x, np.argsort(self.dims.order).tolist())

    def _joined(self, x: Any) -> Any:
        """Matrices, from the parts that the devices have sent, one behind the other."""
        cuts = [self._size(self._axes(d)) for d in self._inner]
        k = len(cuts)
        x = x.reshape(*cuts, self.slots, *x.shape[1:])
        order = [k, *(i for d in range(k) for i in (d, k + 1 + d))]
        return jnp.transpose(x, order).reshape(self.slots, *(self.shape[d] for d in self._inner))

    def _apart(self, x: Any) -> Any:
        """The reverse: the parts for each device, one behind the other."""
        cuts = [self._size(self._axes(d)) for d in self._inner]
        local = [self._local(d) for d in self._inner]
        k = len(cuts)
        pairs = [size for pair in zip(cuts, local, strict=True) for size in pair]
        x = x.reshape(self.slots, *pairs)
        order = [*range(1, 2 * k, 2), 0, *range(2, 2 * k + 1, 2)]
        return jnp.transpose(x, order).reshape(-1, *local)


def shares(count: int, owners: int, start: int) -> np.ndarray:
    """How many of `count` matrices each owner has, if those left over go to owners from `start`."""
    loads = np.full(owners, count // owners)
    loads[(start + np.arange(count % owners)) % owners] += 1
    return loads


def _taken(x: Any, index: np.ndarray) -> Any:
    if len(index) == x.shape[0] and (index == np.arange(len(index))).all():
        return x
    return x[index]

"""Matrices of one shape that are updated alike: which device owns which, and how they travel.

Each leaf is a stack of matrices (of one, if it has two dimensions). The stacks of a group are
joined to one. Of `n` devices over which they are sharded each gets `1/n` of the matrices whole, by
one all-to-all, and gives back its part of each update, by another one.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from ..._core.contexts import in_own_dtypes
from ..._core.placement import AnyMesh, axis_names
from .matrices import MatrixDims

T = TypeVar("T")


@dataclass(frozen=True)
class MatrixGroup:
    """`numbers` are those of the leaves. `start` is the first owner: each group begins with the
    device behind the last one of the group before, so that all get equally many matrices.
    """

    numbers: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    spec: PartitionSpec
    dims: MatrixDims
    over: tuple[str, ...]
    mesh: AnyMesh
    start: int
    travels_as: DTypeLike | None

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
    def sharers(self) -> int:
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
        return -(-self.count // self.sharers)

    @cached_property
    def stacked(self) -> int:
        """The length of the state's arrays, over all devices."""
        return self.slots * self.sharers * self.stacks

    @cached_property
    def loads(self) -> np.ndarray:
        """How many matrices each owner has; those left over go to devices from `start`."""
        loads = np.full(self.sharers, self.count // self.sharers)
        loads[(self.start + np.arange(self.count % self.sharers)) % self.sharers] += 1
        return loads

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
        found = np.arange(self.sharers * self.slots, dtype=np.int32) % max(self.count, 1)
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

    def per_device(
        self, fun: Callable[..., T], in_specs: object, out_specs: object
    ) -> Callable[..., T]:
        """A function that runs on each device, with its parts."""
        return jax.shard_map(
            fun, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def holding(self, shape: tuple[int, ...]) -> "MatrixGroup":
        """The same group, with an array of this shape in the place of each matrix: it is not cut.
        So are arrays of the state that have other shapes than the matrices.
        """
        if shape == self.matrix.shape:
            return self
        batch = self.dims.batch
        stacked = range(len(batch))
        return replace(
            self,
            shape=(*(self.shape[d] for d in batch), *shape),
            spec=PartitionSpec(*(self._axes(d) or None for d in batch)),
            dims=MatrixDims(tuple(stacked), tuple(len(batch) + d for d in range(len(shape))), ()),
            over=self.copied + self.cut,
        )

    # --- inside of `shard_map` --------------------------------------------------------------------

    def whole(self, parts: Sequence[jax.Array]) -> jax.Array:
        """The matrices that this device owns, from its parts of the leaves."""
        if not math.prod(self.shape):  # nothing to send, which XLA would refuse to
            return jnp.zeros((self.slots, *self.matrix.shape), jnp.result_type(*parts))
        stack = jnp.concatenate([self._as_stack(part) for part in parts])  # matrices, *parts
        stack = _taken(stack, self.matrix_in)  # sharers * slots, *parts
        if self.copied:
            length = stack.shape[0] // self._size(self.copied)
            start = lax.axis_index(self.copied) * length
            stack = lax.dynamic_slice_in_dim(stack, start, length)
        if self.cut:
            stack = self._joined(self._sent(stack))  # slots, *inner
        return stack.reshape(self.slots, *self.matrix.shape)

    def parts(self, matrices: jax.Array) -> list[jax.Array]:
        """The parts of the leaves, from matrices that this device owns."""
        if not matrices.size:
            nothing = jnp.zeros([self._local(d) for d in range(len(self.shape))], matrices.dtype)
            return [nothing] * len(self.numbers)
        stack = matrices.reshape(self.slots, *(self.shape[d] for d in self._inner))
        if self.cut:
            stack = self._sent(self._apart(stack))  # devices of cut * slots, *parts
        if self.copied:
            stack = lax.all_gather(stack, self.copied, tiled=True)  # sharers * slots, *parts
        stack = _taken(stack, self.slot_of)  # matrices, *parts
        return [self._as_leaf(part) for part in jnp.split(stack, len(self.numbers))]

    def load(self) -> jax.Array:
        """The number of matrices that this device owns."""
        return jnp.asarray(self.loads)[lax.axis_index(self.copied + self.cut)]

    def _sent(self, stack: jax.Array) -> jax.Array:
        own = self.travels_as is None or in_own_dtypes.value
        sent = stack if own else stack.astype(self.travels_as)
        return lax.all_to_all(sent, self.cut, 0, 0, tiled=True).astype(stack.dtype)

    @property
    def _inner(self) -> tuple[int, ...]:
        return self.dims.rows + self.dims.columns

    def _local(self, dim: int) -> int:
        return self.shape[dim] // self._size(self._axes(dim))

    def _as_stack(self, leaf: jax.Array) -> jax.Array:
        leaf = jnp.transpose(leaf, self.dims.order)  # *batch, *parts
        return leaf.reshape(self.of_leaf, *(self._local(d) for d in self._inner))

    def _as_leaf(self, stack: jax.Array) -> jax.Array:
        stack = stack.reshape([self._local(d) for d in self.dims.order])  # *batch, *parts
        return jnp.transpose(stack, np.argsort(self.dims.order).tolist())

    # `_joined` and `_apart` write each inner dimension as how often it is cut, and its part.

    def _joined(self, x: jax.Array) -> jax.Array:
        """Matrices, from the parts that the devices have sent, one behind the other."""
        cuts, k = [self._size(self._axes(d)) for d in self._inner], len(self._inner)
        x = x.reshape(*cuts, self.slots, *x.shape[1:])  # cut 1, ..., cut k, slots, part 1, ...
        order = [k, *(i for d in range(k) for i in (d, k + 1 + d))]
        x = jnp.transpose(x, order)  # slots, cut 1, part 1, ..., cut k, part k
        return x.reshape(self.slots, *(self.shape[d] for d in self._inner))

    def _apart(self, x: jax.Array) -> jax.Array:
        """The reverse: the parts for each device, one behind the other."""
        sizes, k = (
            [(self._size(self._axes(d)), self._local(d)) for d in self._inner],
            len(self._inner),
        )
        x = x.reshape(self.slots, *chain(*sizes))  # slots, cut 1, part 1, ..., cut k, part k
        order = [*range(1, 2 * k, 2), 0, *range(2, 2 * k + 1, 2)]
        x = jnp.transpose(x, order)  # cut 1, ..., cut k, slots, part 1, ..., part k
        return x.reshape(-1, *(part for _, part in sizes))


def _taken(stack: jax.Array, index: np.ndarray) -> jax.Array:
    return stack if np.array_equal(index, np.arange(len(stack))) else stack[index]

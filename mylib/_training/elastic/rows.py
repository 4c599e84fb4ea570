"""Which rows of a batch each process reads, and the batch made of them."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..._core.placement import axis_names, parts_of

# Takes the number of a step, and the numbers of rows.
Reader = Callable[[int, np.ndarray], object]


class BatchRows:
    """The rows of the whole batch, and where they go."""

    def __init__(self, count: int, spec: PartitionSpec):
        self.count, self.spec = count, spec

    def parts(self, mesh: Mesh) -> int:
        """Into how many parts the rows are divided."""
        return math.prod(mesh.shape[name] for entry in self.spec[:1] for name in axis_names(entry))

    def check(self, mesh_of: Callable[[int], Mesh], fewest: int, most: int) -> None:
        """Raises if the rows don't divide for each number of replicas."""
        parts = {n: self.parts(mesh_of(n)) for n in range(fewest, most + 1)}
        wrong = [f"{p} parts with {n} replicas" for n, p in parts.items() if self.count % p]
        if wrong:
            fits = math.lcm(*parts.values())
            low = self.count // fits * fits
            would = f"rows={low} or {low + fits}" if low else f"rows={fits}"
            raise ValueError(
                f"write {would}: rows={self.count} must divide for each number of replicas from "
                f"{fewest} (at_least) to {most}, and doesn't for {', '.join(wrong)}"
            )

    def pieces(self, now: int, first: int) -> int:
        """In how many pieces a device takes its rows, so that none has more than at first. `now`
        and `first` are numbers of parts.
        """
        each = self.count // now
        return next(pieces for pieces in range(-(-first // now), each + 1) if each % pieces == 0)

    def read(self, read: Reader, n: int, mesh: Mesh) -> object:
        """The batch of step `n`, from what `read` returns for this process's rows."""
        numbers = _rows_here(self.count, NamedSharding(mesh, PartitionSpec(*self.spec[:1])))
        # A copy, because the reader may change them.
        paths, tree = jtu.tree_flatten_with_path(read(n, numbers.copy()))
        return tree.unflatten(
            self._place(jtu.keystr(path), leaf, numbers, mesh) for path, leaf in paths
        )

    def _place(self, path: str, leaf: object, numbers: np.ndarray, mesh: Mesh) -> jax.Array:
        if not isinstance(leaf, np.ndarray) or leaf.shape[:1] != numbers.shape:
            is_array = isinstance(leaf, np.ndarray)
            what = f"has the shape {leaf.shape}" if is_array else f"is {type(leaf)}"
            raise ValueError(
                f"return NumPy arrays with the {len(numbers)} rows that read is asked for: "
                f"read(...){path} {what}"
            )
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)

        def part(index: Any) -> np.ndarray:
            begin, end = np.searchsorted(numbers, index[0].indices(self.count)[:2])
            return leaf[(slice(begin, end), *index[1:])].astype(dtype, copy=False)

        shape, place = (self.count, *leaf.shape[1:]), NamedSharding(mesh, self.spec)
        return jax.make_array_from_callback(shape, place, part, dtype=dtype)


@functools.lru_cache(maxsize=8)
def _rows_here(count: int, place: NamedSharding) -> np.ndarray:
    """The numbers of the rows that this process's devices hold, in order."""
    parts = parts_of(place, (count,))
    spans = {parts[device][0] for device in place.addressable_devices}
    return np.concatenate([np.arange(*span, dtype=np.int64) for span in sorted(spans)])

"""Where the elements of an array are in memory, and what a bitcast makes of them."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from numpy import ndarray

from ..._core.errors import AuditError
from ..audit import Array, Computation
from ..elementwise import wide

# An array of all devices' values, the devices first; or a tuple of these.
Value = Any


class Interpreting(Protocol):
    """What rules ask of the interpreter."""

    @property
    def devices(self) -> int: ...

    @property
    def of_pairs(self) -> "Interpreting": ...

    def run(self, computation: Computation, args: Sequence[Value]) -> Value: ...


def cannot(what: str) -> AuditError:
    """A program has something that can't be computed here."""
    return AuditError(f"{what} is not known how to compute here")


def dtype_in_memory(array: Array) -> np.dtype:
    try:
        return jnp.dtype(array.jax_dtype)
    except TypeError as error:
        raise cannot(f"the type {array.dtype}") from error


def dtype_of(array: Array) -> np.dtype:
    """With which numbers it is computed."""
    return wide(dtype_in_memory(array))


# Types of which a byte holds several numbers.
_PACKED = {"s1", "u1", "s2", "u2", "s4", "u4", "f4e2m1fn"}


@lru_cache(maxsize=1000)
def addresses(array: Array) -> ndarray:
    """The address of each element, in the elements' logical order, in units of an element."""
    dims = array.order
    tiles = re.match(r"[\d,]*:T((?:\([\d,*]+\))*)", array.layout)
    sizes = [array.shape[d] for d in dims]
    index = list(np.indices(sizes).reshape(len(sizes), -1)) if sizes else [np.zeros(1, int)]
    sizes = sizes or [1]
    for tile in re.findall(r"\(([^)]*)\)", tiles[1]) if tiles else ():
        index, sizes = _in_tiles(index, sizes, [int(n) for n in tile.split(",")])
    address = np.zeros_like(index[0])
    for i, n in zip(index, sizes, strict=True):
        address = address * n + i
    physical = address.reshape([array.shape[d] for d in dims])
    return physical.transpose(np.argsort(dims)).reshape(-1) if dims else physical.reshape(-1)


def _in_tiles(
    index: list[ndarray], sizes: list[int], tile: list[int]
) -> tuple[list[ndarray], list[int]]:
    """The last dimensions become those of tiles, and those inside a tile."""
    missing = max(len(tile) - len(sizes), 0)
    index, sizes = [np.zeros_like(index[0])] * missing + index, [1] * missing + sizes
    first = len(sizes) - len(tile)
    tiled = list(zip(index[first:], sizes[first:], tile, strict=True))
    index = [*index[:first], *(i // t for i, _, t in tiled), *(i % t for i, _, t in tiled)]
    sizes = [*sizes[:first], *(-(-n // t) for _, n, t in tiled), *tile]
    return index, sizes


def bitcast(value: ndarray, source: Array, target: Array) -> ndarray:
    """The same memory, as another array. `value` has the devices in front."""
    if source.dtype != target.dtype:
        if dtype_in_memory(source).itemsize != dtype_in_memory(target).itemsize:
            raise cannot(f"a bitcast of {source.dtype} to {target.dtype}")
        value = reinterpreted(value, source, target)
    there, wanted = addresses(source), addresses(target)
    if not np.array_equal(there, wanted):
        element_at = np.full(max(there.max(), wanted.max()) + 1, -1)
        element_at[there] = np.arange(there.size)
        picked = element_at[wanted]
        if (picked < 0).any():
            raise cannot(f"a bitcast of {source} to {target}, which reads padding")
        value = value.reshape(len(value), -1)[:, picked]
    return value.reshape(len(value), *target.shape)


def reinterpreted(value: ndarray, source: Array, target: Array) -> ndarray:
    """The bits of numbers as numbers of another type."""
    if not _PACKED.isdisjoint((source.dtype, target.dtype)):
        raise cannot(f"a bitcast of {source.dtype} to {target.dtype}")
    old, new = dtype_in_memory(source), dtype_in_memory(target)
    bits = np.ascontiguousarray(value.astype(old))
    if old.itemsize == new.itemsize:
        return bits.view(new)
    if old.itemsize > new.itemsize:
        return bits.view(new).reshape(*value.shape, old.itemsize // new.itemsize)
    return bits.view(new).reshape(value.shape[:-1])

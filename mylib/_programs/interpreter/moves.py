"""Operations that move elements, on the values of all devices."""

from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax import lax
from numpy import ndarray

from ..audit import Instruction
from .layouts import Interpreting, bitcast, dtype_of, reinterpreted


def _broadcast(run: Interpreting, x: Instruction, a: ndarray) -> ndarray:
    (array,), dims = x.arrays, x.dims()
    order = np.argsort(dims)
    a = a.transpose(0, *(1 + i for i in order))
    sizes = [1] * len(array.shape)
    for d, n in zip(sorted(dims), a.shape[1:], strict=True):
        sizes[d] = n
    return np.broadcast_to(a.reshape(len(a), *sizes), (len(a), *array.shape))


def _reshape(run: Interpreting, x: Instruction, a: ndarray) -> ndarray:
    return a.reshape(len(a), *x.arrays[0].shape)


def _transpose(run: Interpreting, x: Instruction, a: ndarray) -> ndarray:
    return a.transpose(0, *(1 + d for d in x.dims()))


def _bitcast(run: Interpreting, x: Instruction, a: ndarray) -> ndarray:
    return bitcast(a, x.operand(0).arrays[0], x.arrays[0])


def _bitcast_convert(run: Interpreting, x: Instruction, a: ndarray) -> ndarray:
    return reinterpreted(a, x.operand(0).arrays[0], x.arrays[0])


def _iota(run: Interpreting, x: Instruction) -> ndarray:
    (array,) = x.arrays
    (d,) = x.dims("iota_dimension")
    sizes = [array.shape[d] if i == d else 1 for i in range(len(array.shape))]
    line = np.arange(array.shape[d]).astype(dtype_of(array)).reshape(sizes)
    return np.broadcast_to(line, (run.devices, *array.shape))


def _slice(run: Interpreting, x: Instruction, a: ndarray) -> ndarray:
    return a[(slice(None), *(slice(part.start, part.stop, part.step) for part in x.slices))]


def _concatenate(run: Interpreting, x: Instruction, *parts: ndarray) -> ndarray:
    return np.concatenate(parts, 1 + x.dims()[0])


def _reverse(run: Interpreting, x: Instruction, a: ndarray) -> ndarray:
    return np.flip(a, tuple(1 + d for d in x.dims()))


def _pad(run: Interpreting, x: Instruction, a: ndarray, value: ndarray) -> ndarray:
    # For each dimension how much comes before, after, and between.
    parts = x.attribute("padding").split("x") if a.ndim > 1 else []
    padded = ([*map(int, part.split("_")), 0] for part in parts)
    widths = [(low, high, between) for low, high, between, *_ in padded]
    pad = lambda a, value: lax.pad(a, value, widths)  # noqa: E731
    return np.asarray(jax.vmap(pad)(a, value))


def _parts(
    a: ndarray, starts: Sequence[ndarray], sizes: Sequence[int]
) -> Iterator[tuple[int | slice, ...]]:
    """The part of each device's array from there on, moved so that it is inside."""
    for device in range(len(a)):
        firsts = [
            min(max(int(start[device]), 0), whole - n)
            for start, n, whole in zip(starts, sizes, a.shape[1:], strict=True)
        ]
        cuts = (slice(first, first + n) for first, n in zip(firsts, sizes, strict=True))
        yield (device, *cuts)


def _dynamic_slice(run: Interpreting, x: Instruction, a: ndarray, *starts: ndarray) -> ndarray:
    sizes = x.dims("dynamic_slice_sizes")
    return np.stack([a[part] for part in _parts(a, starts, sizes)])


def _dynamic_update_slice(
    run: Interpreting, x: Instruction, a: ndarray, new: ndarray, *starts: ndarray
) -> ndarray:
    a = a.copy()
    for device, part in enumerate(_parts(a, starts, new.shape[1:])):
        a[part] = new[device]
    return a


def gathered(
    x: Instruction,
    names: Sequence[str],
    a: ndarray,
    indices: ndarray,
    sizes: Sequence[int],
    mode: str,
) -> ndarray:
    """Slices of each device's array, or of one that all have. The attributes of these names tell
    where they are, as for a gather.
    """
    dims = lax.GatherDimensionNumbers(*(tuple(x.dims_if_any(name)) for name in names))
    dim = int(x.attribute("index_vector_dim"))
    is_left_out = dim == indices.ndim - 1
    indices = indices[..., None] if is_left_out else np.moveaxis(indices, 1 + dim, -1)
    pick = lambda a, i: lax.gather(a, i, dims, sizes, mode=mode, fill_value=-1)  # noqa: E731
    return np.asarray(jax.vmap(pick)(np.broadcast_to(a, (len(indices), *a.shape[1:])), indices))


def _gather(run: Interpreting, x: Instruction, a: ndarray, indices: ndarray) -> ndarray:
    return gathered(x, _GATHERED, a, indices, x.dims("slice_sizes"), "clip")


_GATHERED = (
    "offset_dims", "collapsed_slice_dims", "start_index_map", "operand_batching_dims",
    "start_indices_batching_dims",
)  # fmt: skip
RULES = {
    "broadcast": _broadcast, "reshape": _reshape, "transpose": _transpose, "bitcast": _bitcast,
    "bitcast-convert": _bitcast_convert, "iota": _iota, "slice": _slice,
    "concatenate": _concatenate, "reverse": _reverse, "pad": _pad,
    "dynamic-slice": _dynamic_slice, "dynamic-update-slice": _dynamic_update_slice,
    "gather": _gather,
}  # fmt: skip

"""Operations that move elements, on the values of all devices."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from .._audit import Computation, Instruction
from .layouts import bitcast, cannot, dtype_of, reinterpreted


def _broadcast(run: Any, x: Instruction, a: Any) -> Any:
    (array,), dims = x.arrays, x.dims()
    order = np.argsort(dims)
    a = a.transpose(0, *(1 + i for i in order))
    sizes = [1] * len(array.shape)
    for d, n in zip(sorted(dims), a.shape[1:], strict=True):
        sizes[d] = n
    return np.broadcast_to(a.reshape(len(a), *sizes), (len(a), *array.shape))


def _reshape(run: Any, x: Instruction, a: Any) -> Any:
    return a.reshape(len(a), *x.arrays[0].shape)


def _transpose(run: Any, x: Instruction, a: Any) -> Any:
    return a.transpose(0, *(1 + d for d in x.dims()))


def _bitcast(run: Any, x: Instruction, a: Any) -> Any:
    return bitcast(a, x.operand(0).arrays[0], x.arrays[0])


def _bitcast_convert(run: Any, x: Instruction, a: Any) -> Any:
    return reinterpreted(a, x.operand(0).arrays[0], x.arrays[0])


def _iota(run: Any, x: Instruction) -> Any:
    (array,) = x.arrays
    (d,) = x.dims("iota_dimension")
    sizes = [array.shape[d] if i == d else 1 for i in range(len(array.shape))]
    line = np.arange(array.shape[d]).astype(dtype_of(array)).reshape(sizes)
    return np.broadcast_to(line, (run.devices, *array.shape))


def _slice(run: Any, x: Instruction, a: Any) -> Any:
    return a[(slice(None), *(slice(part.start, part.stop, part.step) for part in x.slices))]


def _concatenate(run: Any, x: Instruction, *parts: Any) -> Any:
    return np.concatenate(parts, 1 + x.dims()[0])


def _reverse(run: Any, x: Instruction, a: Any) -> Any:
    return np.flip(a, tuple(1 + d for d in x.dims()))


def _pad(run: Any, x: Instruction, a: Any, value: Any) -> Any:
    # For each dimension how much comes before, after, and between.
    parts = x.attribute("padding").split("x") if a.ndim > 1 else []
    widths: list[Any] = [(*map(int, part.split("_")), 0)[:3] for part in parts]
    pad = lambda a, value: lax.pad(a, value, widths)  # noqa: E731
    return np.asarray(jax.vmap(pad)(a, value))


def _parts(a: Any, starts: Sequence[Any], sizes: Sequence[int]) -> Iterator[Any]:
    """The part of each device's array from there on, moved so that it is inside."""
    for device in range(len(a)):
        firsts = [
            min(max(int(start[device]), 0), whole - n)
            for start, n, whole in zip(starts, sizes, a.shape[1:], strict=True)
        ]
        cuts = (slice(first, first + n) for first, n in zip(firsts, sizes, strict=True))
        yield (device, *cuts)


def _dynamic_slice(run: Any, x: Instruction, a: Any, *starts: Any) -> Any:
    sizes = x.dims("dynamic_slice_sizes")
    return np.stack([a[part] for part in _parts(a, starts, sizes)])


def _dynamic_update_slice(run: Any, x: Instruction, a: Any, new: Any, *starts: Any) -> Any:
    a = a.copy()
    for device, part in enumerate(_parts(a, starts, new.shape[1:])):
        a[part] = new[device]
    return a


def _index_last(indices: Any, x: Instruction) -> Any:
    dim = int(x.attribute("index_vector_dim"))
    return indices[..., None] if dim == indices.ndim - 1 else np.moveaxis(indices, 1 + dim, -1)


def _gather(run: Any, x: Instruction, a: Any, indices: Any) -> Any:
    names = (
        "offset_dims", "collapsed_slice_dims", "start_index_map", "operand_batching_dims",
        "start_indices_batching_dims",
    )  # fmt: skip
    dims = lax.GatherDimensionNumbers(*(tuple(x.dims_if_any(name)) for name in names))
    sizes = x.dims("slice_sizes")
    of_device = lambda a, i: lax.gather(a, i, dims, sizes, mode="clip")  # noqa: E731
    return np.asarray(jax.vmap(of_device)(a, _index_last(indices, x)))


_SCATTERS = {
    "add": lax.scatter_add, "multiply": lax.scatter_mul, "minimum": lax.scatter_min,
    "maximum": lax.scatter_max,
}  # fmt: skip


def _scatter(run: Any, x: Instruction, a: Any, indices: Any, *new: Any) -> Any:
    if len(new) != 1:
        raise cannot("scatter of several arrays")
    names = (
        "update_window_dims", "inserted_window_dims", "scatter_dims_to_operand_dims",
        "input_batching_dims", "scatter_indices_batching_dims",
    )  # fmt: skip
    dims = lax.ScatterDimensionNumbers(*(tuple(x.dims_if_any(name)) for name in names))
    result = operation(x.called)
    if result.opcode == "parameter" and int(result.rest) == 1:
        scatter = lax.scatter
    elif result.opcode in _SCATTERS:
        scatter = _SCATTERS[result.opcode]
    else:
        raise cannot(f"scatter by {result.opcode}")
    of_device = lambda a, i, new: scatter(a, i, new, dims, mode="drop")  # noqa: E731
    return np.asarray(jax.vmap(of_device)(a, _index_last(indices, x), new[0].astype(a.dtype)))


def operation(computation: Computation) -> Instruction:
    """What a computation of two numbers does, without conversions."""
    result = computation.result
    while result.opcode in ("convert", "bitcast", "copy"):
        result = result.operand(0)
    return result


RULES = {
    "broadcast": _broadcast, "reshape": _reshape, "transpose": _transpose, "bitcast": _bitcast,
    "bitcast-convert": _bitcast_convert, "iota": _iota, "slice": _slice,
    "concatenate": _concatenate, "reverse": _reverse, "pad": _pad,
    "dynamic-slice": _dynamic_slice, "dynamic-update-slice": _dynamic_update_slice,
    "gather": _gather, "scatter": _scatter,
}  # fmt: skip

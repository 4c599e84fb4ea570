"""Operations that move elements, on the values of all devices."""

import re

import jax
import numpy as np
from hlo_layouts import UnknownError, bitcast, dtype_of, reinterpreted
from jax import lax


def numbers(text):
    return [int(n) for n in re.findall(r"-?\d+", text or "")]


def _dims(x, name="dimensions"):
    return numbers(x.attributes.get(name))


def _broadcast(run, x, a):
    (array,), dims = x.arrays, _dims(x)
    order = np.argsort(dims)
    a = a.transpose(0, *(1 + i for i in order))
    sizes = [1] * len(array.shape)
    for d, n in zip(sorted(dims), a.shape[1:], strict=True):
        sizes[d] = n
    return np.broadcast_to(a.reshape(len(a), *sizes), (len(a), *array.shape))


def _reshape(run, x, a):
    return a.reshape(len(a), *x.arrays[0].shape)


def _transpose(run, x, a):
    return a.transpose(0, *(1 + d for d in _dims(x)))


def _bitcast(run, x, a):
    return bitcast(a, x.operand(0).arrays[0], x.arrays[0])


def _bitcast_convert(run, x, a):
    return reinterpreted(a, x.operand(0).arrays[0], x.arrays[0])


def _iota(run, x):
    (array,) = x.arrays
    (d,) = numbers(x.attribute("iota_dimension"))
    sizes = [array.shape[d] if i == d else 1 for i in range(len(array.shape))]
    line = np.arange(array.shape[d]).astype(dtype_of(array)).reshape(sizes)
    return np.broadcast_to(line, (run.devices, *array.shape))


def _slice(run, x, a):
    parts = re.findall(r"[\d:]+", x.attribute("slice"))
    return a[(slice(None), *(slice(*map(int, part.split(":"))) for part in parts))]


def _concatenate(run, x, *parts):
    return np.concatenate(parts, 1 + _dims(x)[0])


def _reverse(run, x, a):
    return np.flip(a, [1 + d for d in _dims(x)])


def padding(text, rank):
    """For each dimension how much comes before, after, and between."""
    parts = text.split("x") if rank else []
    return [(*map(int, part.split("_")), 0)[:3] for part in parts]


def _pad(run, x, a, value):
    widths = padding(x.attribute("padding"), a.ndim - 1)
    pad = lambda a, value: lax.pad(a, value, widths)  # noqa: E731
    return np.asarray(jax.vmap(pad)(a, value))


def _parts(a, starts, sizes):
    """The part of each device's array from there on, moved so that it is inside."""
    for device in range(len(a)):
        firsts = [
            min(max(int(start[device]), 0), whole - n)
            for start, n, whole in zip(starts, sizes, a.shape[1:], strict=True)
        ]
        cuts = (slice(first, first + n) for first, n in zip(firsts, sizes, strict=True))
        yield (device, *cuts)


def _dynamic_slice(run, x, a, *starts):
    sizes = numbers(x.attribute("dynamic_slice_sizes"))
    return np.stack([a[part] for part in _parts(a, starts, sizes)])


def _dynamic_update_slice(run, x, a, new, *starts):
    a = a.copy()
    for device, part in enumerate(_parts(a, starts, new.shape[1:])):
        a[part] = new[device]
    return a


def _index_last(indices, x):
    dim = int(x.attribute("index_vector_dim"))
    return indices[..., None] if dim == indices.ndim - 1 else np.moveaxis(indices, 1 + dim, -1)


def _gather(run, x, a, indices):
    names = (
        "offset_dims", "collapsed_slice_dims", "start_index_map", "operand_batching_dims",
        "start_indices_batching_dims",
    )  # fmt: skip
    dims = lax.GatherDimensionNumbers(*(tuple(_dims(x, name)) for name in names))
    sizes = numbers(x.attribute("slice_sizes"))
    of_device = lambda a, i: lax.gather(a, i, dims, sizes, mode="clip")  # noqa: E731
    return np.asarray(jax.vmap(of_device)(a, _index_last(indices, x)))


_SCATTERS = {
    "add": lax.scatter_add, "multiply": lax.scatter_mul, "minimum": lax.scatter_min,
    "maximum": lax.scatter_max,
}  # fmt: skip


def _scatter(run, x, a, indices, *new):
    if len(new) != 1:
        raise UnknownError("scatter of several arrays")
    names = (
        "update_window_dims", "inserted_window_dims", "scatter_dims_to_operand_dims",
        "input_batching_dims", "scatter_indices_batching_dims",
    )  # fmt: skip
    dims = lax.ScatterDimensionNumbers(*(tuple(_dims(x, name)) for name in names))
    result = operation(x.called)
    if result.opcode == "parameter" and int(result.rest) == 1:
        scatter = lax.scatter
    elif result.opcode in _SCATTERS:
        scatter = _SCATTERS[result.opcode]
    else:
        raise UnknownError(f"scatter by {result.opcode}")
    of_device = lambda a, i, new: scatter(a, i, new, dims, mode="drop")  # noqa: E731
    return np.asarray(jax.vmap(of_device)(a, _index_last(indices, x), new[0].astype(a.dtype)))


def operation(computation):
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

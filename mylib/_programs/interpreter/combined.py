"""Operations that combine elements by a computation of the program."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from jax import lax
from numpy import ndarray

from ..audit import Computation, Instruction, window_of
from ..elementwise import fitting
from .layouts import Interpreting, Value
from .moves import gathered


def each(value: Value) -> tuple[ndarray, ...]:
    return value if isinstance(value, tuple) else (value,)


def _one_or_all(x: Instruction, results: Sequence[ndarray]) -> Value:
    return tuple(results) if x.type.startswith("(") else results[0]


def reduced(
    run: Interpreting,
    computation: Computation,
    values: Sequence[ndarray],
    axis: int,
    start: Sequence[ndarray] = (),
) -> list[ndarray]:
    """Arrays reduced along an axis by a computation of pairs of elements."""
    if not values[0].shape[axis]:
        empty = [v.sum(axis) for v in values]
        return [np.broadcast_to(fitting(s, v), v.shape) for s, v in zip(start, empty, strict=True)]
    while values[0].shape[axis] > 1:
        n = values[0].shape[axis]
        halves = [np.split(v, (n // 2, n // 2 * 2), axis) for v in values]
        pairs = [part[0] for part in halves] + [part[1] for part in halves]
        joined = each(run.of_pairs.run(computation, pairs))
        values = [
            np.concatenate([np.broadcast_to(v, part[0].shape), part[2]], axis)
            for v, part in zip(joined, halves, strict=True)
        ]
    values = [v.squeeze(axis) for v in values]
    if start:
        first = [fitting(s, v) for s, v in zip(start, values, strict=True)]
        joined = each(run.of_pairs.run(computation, [*first, *values]))
        values = [np.broadcast_to(a, v.shape) for a, v in zip(joined, values, strict=True)]
    return values


def _reduce(run: Interpreting, x: Instruction, *operands: ndarray) -> Value:
    half = len(operands) // 2
    values, start = operands[:half], operands[half:]
    gone = [1 + d for d in x.dims()]
    kept = [d for d in range(values[0].ndim) if d not in gone]
    size = math.prod(values[0].shape[d] for d in gone)
    flat = [v.transpose(*kept, *gone).reshape(*(v.shape[d] for d in kept), size) for v in values]
    return _one_or_all(x, reduced(run, x.called, flat, len(kept), start))


def _sort(run: Interpreting, x: Instruction, *values: ndarray) -> Value:
    (dim,) = x.dims()
    moved = [np.moveaxis(v, 1 + dim, -1) for v in values]
    n = moved[0].shape[-1]
    pairs = [part for v in moved for part in (v[..., :, None], v[..., None, :])]
    before = np.broadcast_to(run.of_pairs.run(x.called, pairs), (*moved[0].shape, n))
    equal = ~before & ~np.swapaxes(before, -1, -2)
    stays = equal & (np.arange(n)[:, None] < np.arange(n))
    order = np.argsort(np.sum(before | stays, -2), -1)
    results = [np.moveaxis(np.take_along_axis(v, order, -1), -1, 1 + dim) for v in moved]
    return _one_or_all(x, results)


def _map(run: Interpreting, x: Instruction, *values: ndarray) -> ndarray:
    return np.broadcast_to(run.of_pairs.run(x.called, values), values[0].shape)


def _put(
    run: Interpreting,
    x: Computation,
    into: Sequence[ndarray],
    places: ndarray,
    new: Sequence[ndarray],
) -> list[ndarray]:
    """Combines each update with the element at its place in its device's array, those of one place
    one after another. Those without a place are left out.
    """
    into = [v.copy() for v in into]
    flat = [v.reshape(-1) for v in into]
    firsts = np.arange(len(places)).reshape(-1, *(1 for _ in places.shape[1:]))
    inside, at = places >= 0, places + into[0][0].size * firsts
    updates, at = [v[inside] for v in new], at[inside]
    order = np.argsort(at, kind="stable")
    _, first, counts = np.unique(at[order], return_index=True, return_counts=True)
    for turn in range(max(counts, default=0)):
        now = order[first[counts > turn] + turn]
        results = run.of_pairs.run(x, [*(v[at[now]] for v in flat), *(v[now] for v in updates)])
        for v, result in zip(flat, each(results), strict=True):
            v[at[now]] = result
    return into


def _scatter(run: Interpreting, x: Instruction, *operands: ndarray) -> Value:
    n = len(operands) // 2
    arrays, indices, new = operands[:n], operands[n], operands[n + 1 :]
    shape = arrays[0].shape[1:]
    names = "update_window_dims", "inserted_window_dims", "input_batching_dims"
    window, inserted, batch = map(x.dims_if_any, names)
    sizes = [1] * len(shape)
    kept = [d for d in range(len(shape)) if d not in (*inserted, *batch)]
    for d, i in zip(kept, window, strict=True):
        sizes[d] = new[0].shape[1 + i]
    # They are where a gather would read. What would reach over an end is left out.
    places = gathered(x, _SCATTERED, _numbers(shape)[None], indices, sizes, "fill")
    return _one_or_all(x, _put(run, x.called, arrays, places, new))


def _numbers(shape: tuple[int, ...]) -> ndarray:
    return np.arange(math.prod(shape)).reshape(shape)


def _in_windows(
    x: Instruction, shape: tuple[int, ...], windows: tuple[int, ...]
) -> Iterator[ndarray]:
    """For each element of a window, where those of all windows are in an array; -1 beside it."""
    w = window_of(x, len(shape))
    pads = [(*pad, hole - 1) for pad, hole in zip(w.pads, w.holes, strict=True)]
    places = np.asarray(lax.pad(_numbers(shape), -1, pads))
    for element in np.ndindex(*w.size):
        steps = zip(element, w.dilation, w.stride, windows, strict=True)
        yield places[tuple(slice(i * d, i * d + s * (n - 1) + 1, s) for i, d, s, n in steps)]


def _reduce_window(run: Interpreting, x: Instruction, *operands: ndarray) -> Value:
    half = len(operands) // 2
    windows = x.arrays[0].shape
    arrays = [a.reshape(len(a), -1) for a in operands[:half]]
    results = [
        np.broadcast_to(v.reshape(-1, *(1 for _ in windows)), (len(v), *windows))
        for v in operands[half:]
    ]
    for places in _in_windows(x, operands[0].shape[1:], windows):
        joined = each(run.of_pairs.run(x.called, [*results, *(a[:, places] for a in arrays)]))
        results = [np.where(places >= 0, a, b) for a, b in zip(joined, results, strict=True)]
    return _one_or_all(x, results)


def _select_and_scatter(
    run: Interpreting, x: Instruction, a: ndarray, source: ndarray, start: ndarray
) -> ndarray:
    select, scatter = x.calls
    flat = a.reshape(len(a), -1)
    chosen, places = np.zeros_like(source), np.full(source.shape, -1)
    for here in _in_windows(x, a.shape[1:], source.shape[1:]):
        stays = run.of_pairs.run(select, [chosen, flat[:, here]]) & (places >= 0)
        new = (here >= 0) & ~stays
        chosen, places = np.where(new, flat[:, here], chosen), np.where(new, here, places)
    into = np.broadcast_to(fitting(start, a), a.shape)
    return _put(run, scatter, [into], places, [source])[0]


_SCATTERED = (
    "update_window_dims", "inserted_window_dims", "scatter_dims_to_operand_dims",
    "input_batching_dims", "scatter_indices_batching_dims",
)  # fmt: skip
RULES = {
    "reduce": _reduce, "sort": _sort, "map": _map,
    "scatter": _scatter, "reduce-window": _reduce_window, "select-and-scatter": _select_and_scatter,
}  # fmt: skip

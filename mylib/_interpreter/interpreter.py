"""Runs a compiled program of many devices on one CPU, in float64.

The program is what XLA has made for the machine: optimised, divided over the devices, scheduled.
Each value is an array of all devices' values, the devices first. A loop runs as long as any device
goes on.
"""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from .._audit import (
    OPCODES,
    TARGETS,
    Computation,
    HloModule,
    Instruction,
    Likeness,
    Meaning,
    arrays_of,
    elements_of,
)
from .._errors import AuditError
from . import collectives, elementwise, moves, products
from .elementwise import fitting
from .layouts import cannot, dtype_in_memory, dtype_of, reinterpreted


class _InFlight(NamedTuple):
    """What `-start` gives to `-done`: the collective's result."""

    result: Any


class Interpreter:
    """A program. It runs for arrays with the devices first: one for each of its arguments."""

    def __init__(self, text: str):
        self.module = HloModule(text)
        self.entry, self.devices = self.module.entry, self.module.devices

    def __call__(self, *args: Any) -> Any:
        """The results, each with the devices first, as the arguments."""
        with jax.enable_x64(True), np.errstate(all="ignore"):
            result = self.run(self.entry, args)
        return result if isinstance(result, tuple) else (result,)

    def run(self, computation: Computation, args: Any, of_elements: bool = False) -> Any:
        """The result of a computation. `of_elements`: of one for pairs of elements, whose
        arguments are whole arrays.
        """
        values = {}
        for x in computation.instructions:
            try:
                if x.does == "custom-call" and x.row.window:
                    value = _of_window(x, values)
                else:
                    operands = [values[name] for name in x.operands]
                    value = self.value(x, operands, args, of_elements)
                values[x.name] = self._checked(x, value, of_elements)
            except Exception as error:
                if not getattr(error, "__notes__", None):
                    error.add_note(f"{x}")
                raise
        return values[computation.result.name]

    def value(self, x: Instruction, operands: Any, args: Any, of_elements: bool) -> Any:
        if x.waits:
            started = operands[0]
            if x.form == "update":
                return started
            return _each(started.result) if x.type.startswith("(") else started.result
        if x.does == "parameter":
            return args[int(x.rest)]
        if x.does == "constant":
            value = _constant(x)
            return value if of_elements else np.broadcast_to(value, (self.devices, *value.shape))
        if of_elements and x.does in ("broadcast", "reshape", "bitcast"):
            (source,), (target,) = x.operand(0).arrays, x.arrays
            same = source.dtype == target.dtype
            return operands[0] if same else reinterpreted(operands[0], source, target)
        rule = RULES.get(x.target or x.does)
        if rule is None:
            raise cannot(f"the custom call {x.target}" if x.target else f"the opcode {x.opcode}")
        value = rule(self, x, *operands)
        return _InFlight(value) if x.form == "start" else value

    def _checked(self, x: Instruction, value: Any, of_elements: bool) -> Any:
        if isinstance(value, _InFlight) or "token" in x.type:
            return value
        return self._typed(x.type, value, of_elements, x)

    def _typed(self, text: str, value: Any, of_elements: bool, x: Instruction) -> Any:
        if text.startswith("("):
            return tuple(
                self._typed(part.strip(), v, of_elements, x)
                for part, v in zip(elements_of(text), value, strict=True)
            )
        (array,) = arrays_of(text)
        value = np.asarray(value)
        if not of_elements and value.shape != (self.devices, *array.shape):
            raise AssertionError(f"{x} has the shape {value.shape[1:]}")
        return value.astype(dtype_of(array), copy=False)

    def reduced(self, computation: Computation, values: Any, axis: Any, start: Any = None) -> Any:
        """Arrays reduced along an axis by a computation of pairs of elements."""
        if not values[0].shape[axis]:
            empty = [v.sum(axis) for v in values]
            return [
                np.broadcast_to(fitting(s, v), v.shape) for s, v in zip(start, empty, strict=True)
            ]
        while values[0].shape[axis] > 1:
            n = values[0].shape[axis]
            halves = [np.split(v, (n // 2, n // 2 * 2), axis) for v in values]
            pairs = [part[0] for part in halves] + [part[1] for part in halves]
            joined = _each(self.run(computation, pairs, True))
            values = [
                np.concatenate([np.broadcast_to(v, part[0].shape), part[2]], axis)
                for v, part in zip(joined, halves, strict=True)
            ]
        values = [v.squeeze(axis) for v in values]
        if start is not None:
            first = [fitting(s, v) for s, v in zip(start, values, strict=True)]
            joined = _each(self.run(computation, [*first, *values], True))
            values = [np.broadcast_to(a, v.shape) for a, v in zip(joined, values, strict=True)]
        return values


def _each(value: Any) -> Any:
    return value if isinstance(value, tuple) else (value,)


def _of_window(x: Instruction, values: Any) -> Any:
    """A part of a collective that the compiler for TPUs has taken apart."""
    if x.row.window == "end":
        return next(values[y.name] for y in x.inputs() if y.does != "parameter")
    collective = x.operand(0)
    result = values[collective.name]
    rest = [np.zeros((len(result), *array.shape)) for array in x.arrays[2:]]
    return values[collective.operands[0]], result, *rest


def _constant(x: Instruction) -> np.ndarray:
    (array,) = x.arrays
    if "..." in x.rest:
        raise AuditError(f"{x} is printed without its numbers")
    words = re.sub(r"/\*.*?\*/|[{}(),]", " ", x.rest).split()
    numbers: list[Any]
    if array.dtype == "pred":
        numbers = [word in ("true", "1") for word in words]
    elif array.dtype.startswith("c"):
        numbers = [complex(*map(float, pair)) for pair in zip(words[::2], words[1::2], strict=True)]
    elif array.dtype[0] in "su":
        numbers = list(map(int, words))
    else:
        numbers = [float(word.replace("-nan", "nan")) for word in words]
    # As it is rounded in the program.
    in_memory = np.array(numbers).astype(dtype_in_memory(array))
    return in_memory.astype(dtype_of(array)).reshape(array.shape)


def _collective(run: Any, x: Instruction, *operands: Any) -> Any:
    values = [v for operand in operands for v in _each(operand)]
    results = collectives.sent(run, x, values)
    is_tuple = len(results) > 1 or (x.type.startswith("(") and x.form != "start")
    return tuple(results) if is_tuple else results[0]


def _called(run: Any, x: Instruction, *operands: Any) -> Any:
    return run.run(x.called, operands)


def _loop(run: Any, x: Instruction, carry: Any) -> Any:
    condition, body = x.calls
    while True:
        goes_on = run.run(condition, [carry])
        if not goes_on.any():
            return carry
        carry = _chosen(goes_on, run.run(body, [carry]), carry)


def _chosen(which: Any, these: Any, those: Any) -> Any:
    """On each device these values or those."""
    return jax.tree.map(lambda a, b: np.where(fitting(which, a), a, b), these, those)


def _branch(run: Any, x: Instruction, which: Any, *operands: Any) -> Any:
    which = np.where(which, 0, 1) if which.dtype == np.bool_ else which
    last = len(x.calls) - 1
    which = np.where((which < 0) | (which > last), last, which)
    results = None
    for i in sorted({*which.tolist()}):
        result = run.run(x.calls[i], [operands[i]])
        results = result if results is None else _chosen(which == i, result, results)
    return results


def _reduce(run: Any, x: Instruction, *operands: Any) -> Any:
    half = len(operands) // 2
    values, start = operands[:half], operands[half:]
    gone = [1 + d for d in x.dims()]
    kept = [d for d in range(values[0].ndim) if d not in gone]
    size = math.prod(values[0].shape[d] for d in gone)
    flat = [v.transpose(*kept, *gone).reshape(*(v.shape[d] for d in kept), size) for v in values]
    results = run.reduced(x.called, flat, len(kept), start)
    return tuple(results) if x.type.startswith("(") else results[0]


def _sort(run: Any, x: Instruction, *values: Any) -> Any:
    (dim,) = x.dims()
    moved = [np.moveaxis(v, 1 + dim, -1) for v in values]
    n = moved[0].shape[-1]
    pairs = [part for v in moved for part in (v[..., :, None], v[..., None, :])]
    before = np.broadcast_to(run.run(x.called, pairs, True), (*moved[0].shape, n))
    equal = ~before & ~np.swapaxes(before, -1, -2)
    stays = equal & (np.arange(n)[:, None] < np.arange(n))
    order = np.argsort(np.sum(before | stays, -2), -1)
    results = [np.moveaxis(np.take_along_axis(v, order, -1), -1, 1 + dim) for v in moved]
    return tuple(results) if len(results) > 1 else results[0]


def _map(run: Any, x: Instruction, *values: Any) -> Any:
    return np.broadcast_to(run.run(x.called, values, True), values[0].shape)


def _number(run: Any, x: Instruction) -> Any:
    several = run.module.partitions if x.does == "partition-id" else run.module.replicas
    return np.arange(run.devices, dtype=np.uint32) * np.uint32(several > 1)


_NAMED: dict[str, Callable[..., Any]] = {
    **elementwise.RULES, **moves.RULES, **products.RULES,
    **dict.fromkeys(collectives.KINDS, _collective),
    "reduce": _reduce, "sort": _sort, "map": _map,
    "tuple": lambda run, x, *operands: operands,
    "get-tuple-element": lambda run, x, a: a[x.index],
    "after-all": lambda run, x, *operands: (),
}  # fmt: skip
_CALLED = {"run": _called, "loop": _loop, "branch": _branch}


def _by_row(row: Meaning) -> Callable[..., Any] | None:
    """How to compute what a row of the tables says all of."""
    if row.of_device:
        return _number
    if row.reserves:
        return products.room
    if row.like >= Likeness.VALUE:
        return products.first
    return _CALLED.get(row.calls)


# By opcodes, and by the targets of custom calls.
RULES: dict[str, Callable[..., Any]] = {
    name: rule
    for name, row in {**OPCODES, **TARGETS}.items()
    if (rule := _NAMED.get(name) or _by_row(row)) is not None
}

"""Runs a compiled program of many devices on one CPU, in float64.

The program is what XLA has made for the machine: optimised, divided over the devices, scheduled.
Each value is an array of all devices' values, the devices first. A loop runs as long as any device
goes on.
"""

from collections.abc import Callable, Sequence
from copy import copy
from functools import cached_property
from typing import NamedTuple

import jax
import numpy as np
from numpy import ndarray

from ..._core.errors import AuditError
from ..._core.status import StatusLine
from ..audit import (
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
from ..elementwise import ELEMENTWISE, constant, elementwise, fitting, held
from . import collectives, combined, moves, products
from .combined import each
from .layouts import Interpreting, Value, cannot, dtype_in_memory, reinterpreted


class _InFlight(NamedTuple):
    """What `-start` gives to `-done`: the collective's result."""

    result: Value


class Interpreter:
    """A program. It runs for arrays with the devices first: one for each of its arguments."""

    of_elements = False

    def __init__(self, text: str):
        self.module = HloModule(text)
        self.entry, self.devices = self.module.entry, self.module.devices

    @cached_property
    def of_pairs(self) -> "Interpreter":
        """Runs computations of pairs of elements, whose arguments are whole arrays."""
        run = copy(self)
        run.of_elements = True
        return run

    def __call__(self, *args: ndarray) -> tuple[ndarray, ...]:
        """The results, each with the devices first, as the arguments."""
        self.progress = StatusLine("computing")
        with self.progress, jax.enable_x64(True), np.errstate(all="ignore"):
            result = self.run(self.entry, args)
        return result if isinstance(result, tuple) else (result,)

    def run(self, computation: Computation, args: Sequence[Value]) -> Value:
        """The result of a computation."""
        values, count = {}, len(computation.instructions)
        for i, x in enumerate(computation.instructions, 1):
            if computation is self.entry:
                self.progress.write(f"computing instruction {i} of {count}: {x.opcode}")
            try:
                if x.does == "custom-call" and x.row.window:
                    value = _of_window(x, values)
                else:
                    operands = [values[name] for name in x.operands]
                    value = self.value(x, operands, args)
                values[x.name] = self._checked(x, value)
            except Exception as error:
                if not getattr(error, "__notes__", None):
                    error.add_note(f"{x}")
                raise
        return values[computation.result.name]

    def value(self, x: Instruction, operands: list[Value], args: Sequence[Value]) -> Value:
        if x.waits:
            started = operands[0]
            if x.form == "update":
                return started
            return each(started.result) if x.type.startswith("(") else started.result
        if x.does == "parameter":
            return args[int(x.rest)]
        if x.does == "constant":
            return self._constant(x)
        if self.of_elements and x.does in ("broadcast", "reshape", "bitcast"):
            (source,), (target,) = x.operand(0).arrays, x.arrays
            same = source.dtype == target.dtype
            return operands[0] if same else reinterpreted(operands[0], source, target)
        rule = RULES.get(x.target or x.does)
        if rule is None:
            raise cannot(f"the custom call {x.target}" if x.target else f"the opcode {x.opcode}")
        value = rule(self, x, *operands)
        return _InFlight(value) if x.form == "start" else value

    def _checked(self, x: Instruction, value: Value) -> Value:
        if isinstance(value, _InFlight) or "token" in x.type:
            return value
        return self._typed(x.type, value, x)

    def _typed(self, text: str, value: Value, x: Instruction) -> Value:
        if text.startswith("("):
            return tuple(
                self._typed(part, v, x) for part, v in zip(elements_of(text), value, strict=True)
            )
        (array,) = arrays_of(text)
        value = np.asarray(value)
        if not self.of_elements and value.shape != (self.devices, *array.shape):
            raise AssertionError(f"{x} has the shape {value.shape[1:]}")
        return held(value, dtype_in_memory(array))

    def _constant(self, x: Instruction) -> ndarray:
        (array,) = x.arrays
        if "..." in x.rest:
            raise AuditError(f"{x} is printed without its numbers")
        value = constant(x.rest, dtype_in_memory(array)).reshape(array.shape)
        return value if self.of_elements else np.broadcast_to(value, (self.devices, *array.shape))


def _of_window(x: Instruction, values: dict[str, Value]) -> Value:
    """A part of a collective that the compiler for TPUs has taken apart."""
    if x.row.window == "end":
        return next(values[y.name] for y in x.inputs() if y.does != "parameter")
    collective = x.operand(0)
    result = values[collective.name]
    rest = [np.zeros((len(result), *array.shape)) for array in x.arrays[2:]]
    return values[collective.operands[0]], result, *rest


def _collective(run: Interpreting, x: Instruction, *operands: Value) -> Value:
    values = [v for operand in operands for v in each(operand)]
    results = collectives.sent(run, x, values)
    is_tuple = len(results) > 1 or (x.type.startswith("(") and x.form != "start")
    return tuple(results) if is_tuple else results[0]


def _called(run: Interpreting, x: Instruction, *operands: Value) -> Value:
    return run.run(x.called, operands)


def _loop(run: Interpreting, x: Instruction, carry: Value) -> Value:
    condition, body = x.calls
    while True:
        goes_on = run.run(condition, [carry])
        if not goes_on.any():
            return carry
        carry = _chosen(goes_on, run.run(body, [carry]), carry)


def _chosen(which: ndarray, these: Value, those: Value) -> Value:
    """On each device these values or those."""
    return jax.tree.map(lambda a, b: np.where(fitting(which, a), a, b), these, those)


def _branch(run: Interpreting, x: Instruction, which: ndarray, *operands: Value) -> Value:
    which = np.where(which, 0, 1) if which.dtype == np.bool_ else which
    last = len(x.calls) - 1
    which = np.where((which < 0) | (which > last), last, which)
    results = None
    for i in sorted({*which.tolist()}):
        result = run.run(x.calls[i], [operands[i]])
        results = result if results is None else _chosen(which == i, result, results)
    return results


def _elementwise(run: Interpreting, x: Instruction, *operands: Value) -> Value:
    return elementwise(x.opcode, operands, dtype_in_memory(x.arrays[0]), x.attributes)


def _number(run: Interpreter, x: Instruction) -> Value:
    several = run.module.partitions if x.does == "partition-id" else run.module.replicas
    return np.arange(run.devices, dtype=np.uint32) * np.uint32(several > 1)


_NAMED: dict[str, Callable[..., Value]] = {
    **moves.RULES, **products.RULES, **combined.RULES, **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(collectives.KINDS, _collective),
    "tuple": lambda run, x, *operands: operands,
    "get-tuple-element": lambda run, x, a: a[x.index],
    "after-all": lambda run, x, *operands: (),
}  # fmt: skip
_CALLED = {"run": _called, "loop": _loop, "branch": _branch}


def _by_row(row: Meaning) -> Callable[..., Value] | None:
    """How to compute what a row of the tables says all of."""
    if row.of_device:
        return _number
    if row.reserves:
        return products.room
    if row.like >= Likeness.VALUE:
        return products.first
    return _CALLED.get(row.calls)


# By opcodes, and by the targets of custom calls.
RULES: dict[str, Callable[..., Value]] = {
    name: rule
    for name, row in {**OPCODES, **TARGETS}.items()
    if (rule := _NAMED.get(name) or _by_row(row)) is not None
}

"""Whole numbers that depend on the device: computed for each, so that it is known which part of an
array a device takes.
"""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from .hlo import Instruction
from .values import Value, computed


def _divided(a: Any, b: Any) -> Any:
    """As in HLO, towards zero. What is divided by 0 has no meaning."""
    b = np.where(b == 0, 1, b)
    return (a - np.fmod(a, b)) // b


_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "clamp": lambda low, x, high: np.clip(x, low, high),
    "and": np.bitwise_and,
    "divide": _divided,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "multiply": np.multiply,
    "negate": np.negative,
    "or": np.bitwise_or,
    "remainder": lambda a, b: a - b * _divided(a, b),
    "select": lambda which, a, b: np.where(which != 0, a, b),
    "shift-left": np.left_shift,
    "shift-right-arithmetic": np.right_shift,
    "shift-right-logical": np.right_shift,
    "subtract": np.subtract,
    "xor": np.bitwise_xor,
}
COMPARED = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}
_WORDS = {"true": 1, "false": 0}
# The longest chain of operations that is followed. A guess; what is longer is unknown.
_DEEP = 60


def positions(x: Instruction, devices: int) -> np.ndarray | None:
    """The elements of a small array of whole numbers, a row for each device; None if they depend on
    anything but the device.
    """
    return _Numbers(devices).of(x, _DEEP)


class _Numbers:
    def __init__(self, devices: int):
        self.devices = devices
        self.of = cache(self._of)

    def _of(self, x: Instruction, deep: int) -> np.ndarray | None:
        value = computed(Value(x))
        x = value.made_by
        # A table has a row for each device, of a few numbers; larger arrays are no places.
        if value.path or not deep or len(x.arrays) != 1 or x.arrays[0].size > 8 * self.devices:
            return None
        if x.row.of_device:
            module = x.computation.module
            several = module.partitions if x.opcode == "partition-id" else module.replicas
            # Of one replica of several partitions, each device is replica 0.
            return np.arange(self.devices)[:, None] * (several > 1)
        if x.opcode == "constant":
            return self._constant(x)
        if x.opcode not in (*_ELEMENTWISE, *_OTHERS):
            return None
        operands = [self.of(y, deep - 1) for y in x.inputs()]
        known_operands = [numbers for numbers in operands if numbers is not None]
        return self._result(x, known_operands) if len(known_operands) == len(operands) else None

    def _constant(self, x: Instruction) -> np.ndarray | None:
        if not re.fullmatch(r"[su]\d+|pred", x.arrays[0].dtype):
            return None
        written = re.findall(r"-?\d+|true|false", x.rest)
        numbers = [_WORDS[text] if text in _WORDS else int(text) for text in written]
        if len(numbers) != x.arrays[0].size:  # XLA leaves out those of large arrays: `{...}`
            return None
        return np.tile(np.array(numbers), (self.devices, 1))

    def _result(self, x: Instruction, operands: list[np.ndarray]) -> np.ndarray | None:
        match x.opcode:
            case "compare":
                compared = COMPARED.get(x.attribute("direction"))
                return None if compared is None else compared(*operands).astype(int)
            case "broadcast":
                size = x.arrays[0].size
                return np.repeat(operands[0], size, 1) if operands[0].shape[1] == 1 else None
            case "slice" | "dynamic-slice":
                return self._slice(x, operands)
        return _ELEMENTWISE[x.opcode](*operands)

    def _slice(self, x: Instruction, operands: list[np.ndarray]) -> np.ndarray | None:
        size = x.arrays[0].size
        if len(x.operand(0).arrays[0].shape) != 1:
            return None
        if x.opcode == "slice":
            return operands[0][:, x.slices[0]]
        # As HLO defines it: a slice that would reach over the end begins earlier.
        starts = np.clip(operands[1], 0, operands[0].shape[1] - size)
        return np.take_along_axis(operands[0], starts + np.arange(size), 1)


_OTHERS = ("broadcast", "compare", "dynamic-slice", "slice")

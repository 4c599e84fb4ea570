"""Whole numbers that depend on the device: computed for each, so that it is known which part of an
array a device takes.
"""

import re
from functools import cache

import jax.numpy as jnp
import numpy as np

from ..elementwise import ELEMENTWISE, constant, elementwise, held
from .hlo import Array, Instruction
from .values import Value, computed

# The longest chain of operations that is followed. A guess; what is longer is unknown.
_DEEP = 60


def positions(x: Instruction, devices: int) -> np.ndarray | None:
    """The elements of a small array of whole numbers, a row for each device; None if they depend on
    anything but the device.
    """
    numbers = _Numbers(devices).of(x, _DEEP)
    return None if numbers is None else numbers.astype(int)


class _Numbers:
    def __init__(self, devices: int):
        self.devices = devices
        self.of = cache(self._of)

    def _of(self, x: Instruction, deep: int) -> np.ndarray | None:
        value, (array, *others) = computed(Value(x)), x.arrays
        of, dtype = value.made_by, jnp.dtype(array.jax_dtype)
        # A table has a row for each device, of a few numbers; larger arrays are no places.
        is_small = len(of.arrays) == 1 and of.arrays[0].size <= 8 * self.devices
        if others or value.path or not deep or not is_small or not _is_whole(of.arrays[0]):
            return None
        numbers = self._computed(of, deep)
        return None if numbers is None else held(numbers, dtype)

    def _computed(self, x: Instruction, deep: int) -> np.ndarray | None:
        if x.row.of_device:
            module = x.computation.module
            several = module.partitions if x.opcode == "partition-id" else module.replicas
            # Of one replica of several partitions, each device is replica 0.
            return np.arange(self.devices)[:, None] * (several > 1)
        if x.opcode == "constant":
            if "..." in x.rest:  # XLA leaves out those of large arrays
                return None
            return np.tile(constant(x.rest, jnp.dtype(x.arrays[0].jax_dtype)), (self.devices, 1))
        if x.opcode not in (*ELEMENTWISE, *_OTHERS):
            return None
        operands = [self.of(y, deep - 1) for y in x.inputs()]
        known_operands = [numbers for numbers in operands if numbers is not None]
        return self._result(x, known_operands) if len(known_operands) == len(operands) else None

    def _result(self, x: Instruction, operands: list[np.ndarray]) -> np.ndarray | None:
        match x.opcode:
            case "broadcast":
                size = x.arrays[0].size
                return np.repeat(operands[0], size, 1) if operands[0].shape[1] == 1 else None
            case "slice" | "dynamic-slice":
                return self._slice(x, operands)
        return elementwise(x.opcode, operands, jnp.dtype(x.arrays[0].jax_dtype), x.attributes)

    def _slice(self, x: Instruction, operands: list[np.ndarray]) -> np.ndarray | None:
        size = x.arrays[0].size
        if len(x.operand(0).arrays[0].shape) != 1:
            return None
        if x.opcode == "slice":
            return operands[0][:, x.slices[0]]
        # As HLO defines it: a slice that would reach over the end begins earlier.
        starts = np.clip(operands[1].astype(int), 0, operands[0].shape[1] - size)
        return np.take_along_axis(operands[0], starts + np.arange(size), 1)


def _is_whole(array: Array) -> bool:
    return re.fullmatch(r"[su]\d+|pred", array.dtype) is not None


_OTHERS = ("broadcast", "dynamic-slice", "slice")

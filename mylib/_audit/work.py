"""Counts what a program computes, and what it reads from memory and writes there."""

import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from .flow import done_of, target_of, trips
from .hlo import Array, Computation, Instruction, Module, calls_of
from .opcodes import KINDS, opcode_of
from .products import dtype_of, products_of

# Instructions that move nothing themselves.
_FREE = frozenset(
    """
    parameter constant tuple get-tuple-element bitcast after-all optimization-barrier partition-id
    replica-id add-dependency domain opt-barrier recv
    """.split()
)
# Those that read only a part of their first operand, and those that write only a part of it.
_TAKES = frozenset({"dynamic-slice", "slice", "gather"})
_PUTS = frozenset({"dynamic-update-slice", "scatter"})
# A library's workspace comes after its results.
_WORKSPACE = ("s8", "u8")


class Operation(NamedTuple):
    """Operations that cost the same.

    **Attributes:**

    - `times`: how many there are in a call, on each device.
    - `flops`: what one of them computes, as pairs of a dtype and a number.
    - `bytes`: what one of them reads from memory and writes there.
    """

    times: int
    flops: tuple[tuple[str, int], ...]
    bytes: int


@dataclass(frozen=True)
class Work:
    """The operations and the memory traffic of one device in a call. Of the branches of a condition
    only the one that costs most is counted.

    **Attributes:**

    - `flops`: of matrix products and convolutions, by the dtype of their operands. Everything else
        is bound by memory.
    - `traffic`: bytes that the operations read from memory and write there, without collectives. Of
        a slice that is the slice, not the whole array.
    - `unknown`: how many operations could not be counted: custom kernels, and loops whose length
        depends on data, which count as one step.
    - `operations`: the operations one by one, equal ones together.
    """

    flops: Mapping[str, int]
    traffic: int
    unknown: int
    operations: tuple[Operation, ...] = field(default=(), repr=False)


def work_of(module: Module) -> Work:
    counted = _computation(module.entry, {})
    flops: Counter[str] = Counter()
    for operation, times in counted.operations.items():
        for dtype, number in operation[0]:
            flops[dtype] += times * number
    traffic = sum(size * times for (_, size), times in counted.operations.items())
    several = (Operation(times, *one) for one, times in counted.operations.items())
    return Work(dict(flops), traffic, counted.unknown, tuple(several))


class _Counted(NamedTuple):
    """What a computation costs: how often each kind of operation runs."""

    operations: Counter[tuple[tuple[tuple[str, int], ...], int]]
    unknown: int

    @property
    def weight(self) -> float:
        """For comparing branches: in bytes, at 300 operations a byte, as GPUs and TPUs have."""
        return sum(
            times * max(size, sum(n for _, n in flops) / 300)
            for (flops, size), times in self.operations.items()
        )


def _computation(computation: Computation, known: dict[str, _Counted]) -> _Counted:
    if computation.name in known:
        return known[computation.name]
    operations: Counter[tuple[tuple[tuple[str, int], ...], int]] = Counter()
    unknown = 0
    for x in computation.instructions:
        parts, uncounted = _called(x, known)
        unknown += uncounted
        for part, times in parts:
            unknown += part.unknown
            for one, count in part.operations.items():
                operations[one] += count * times
    return known.setdefault(computation.name, _Counted(operations, unknown))


def _called(x: Instruction, known: dict[str, _Counted]) -> tuple[list[tuple[_Counted, int]], int]:
    """What one instruction costs, as parts that run several times; and how much isn't known."""
    called = [(role, x.computation.module.computations[name]) for role, name in calls_of(x)]
    match opcode_of(x):
        case "while":
            turns = trips(x)
            each = 1 if turns is None else turns
            more = {"condition": each + 1, "body": each}
            return [(_computation(y, known), more[role]) for role, y in called], turns is None
        case "conditional":
            parts = [_computation(y, known) for _, y in called]
            return [(max(parts, key=lambda part: part.weight), 1)], 0
        case "call" | "async":
            return [(_computation(y, known), 1) for _, y in called], 0
        case opcode if (
            opcode in _FREE or opcode in KINDS or x.opcode.endswith(("-done", "-update"))
        ):
            return [], 0
    flops: Counter[str] = Counter()
    unknown = 0
    for y in _fused(x):
        products = products_of(y)
        unknown += products is None
        if products:
            flops[dtype_of(y)] += 2 * products
    one = tuple(sorted(flops.items())), _read(x) + _written(x)
    return [(_Counted(Counter({one: 1}), 0), 1)], unknown


def _fused(x: Instruction) -> Iterator[Instruction]:
    """The instruction, and those in the fusions that it calls."""
    yield x
    if opcode_of(x) == "fusion":
        for _, name in calls_of(x):
            for y in x.computation.module.computations[name].instructions:
                yield from _fused(y)


def _body(x: Instruction) -> Computation:
    return x.computation.module.computations[dict(calls_of(x))["calls"]]


def _read(x: Instruction) -> int:
    return sum(
        min(sum(map(_bytes, y.arrays)), _read_of_operand(x, i)) for i, y in enumerate(x.inputs())
    )


def _read_of_operand(x: Instruction, index: int) -> int:
    """The bytes that an instruction reads of one operand, if all of it is in memory."""
    opcode = opcode_of(x)
    if index == 0 and opcode in _TAKES:
        return sum(array.padded_bytes for array in done_of(x).arrays)
    if index == 0 and opcode in _PUTS:
        return 0
    if opcode == "fusion":
        return _uses(_body(x).parameters[index])
    return sum(array.padded_bytes for array in x.operand(index).arrays)


def _uses(x: Instruction) -> int:
    """The bytes of a value that the rest of a fused computation reads."""
    if x.is_root:
        return sum(array.padded_bytes for array in x.arrays)
    total = 0
    for user in x.computation.users[x.name]:
        if user.opcode == "bitcast":
            total += _uses(user)
        else:
            places = [i for i, name in enumerate(user.operands) if name == x.name]
            total += max(_read_of_operand(user, i) for i in places)
    return total


def _written(x: Instruction) -> int:
    arrays = done_of(x).arrays
    last = _body(x).result if opcode_of(x) == "fusion" else x
    each = last.inputs() if last.opcode == "tuple" else [last]
    if len(each) == len(arrays):
        return sum(min(_bytes(array), _put(y)) for array, y in zip(arrays, each, strict=True))
    if last.opcode == "custom-call" and target_of(last).startswith(("__cublas", "__cudnn")):
        arrays = [array for array in arrays if array.dtype not in _WORKSPACE]
    return sum(map(_bytes, arrays))


def _put(x: Instruction) -> int:
    """The bytes that an instruction writes, if its result is in memory."""
    while x.opcode == "bitcast":
        x = x.operand(0)
    if x.opcode in _PUTS:
        update = x.operand(1 if x.opcode == "dynamic-update-slice" else len(x.operands) - 1)
        return sum(array.padded_bytes for array in update.arrays)
    if x.opcode == "fusion":
        return _put(_body(x).result)
    return sum(array.padded_bytes for array in done_of(x).arrays)


@functools.lru_cache(maxsize=10_000)
def _bytes(array: Array) -> int:
    """The bytes of an array in the device's memory: 0 in a TPU's on-chip memory, or on a host."""
    on_chip = "T(" in array.layout and "S(" in array.layout
    return 0 if on_chip or array.on_host else array.padded_bytes

"""Counts what a program computes, and what it reads from memory and writes there, in order."""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .collectives import Transfer
from .hlo import Array, Computation, HloModule, Instruction
from .moments import Begin, End, Moments, moments_of
from .products import dtype_of, products_of_instruction
from .values import done_of, trips


class Operation(NamedTuple):
    """Operations that cost the same.

    **Attributes:**

    - `times`: how many there are in a call, on each device.
    - `flops`: what one of them computes, as pairs of a dtype and a number.
    - `bytes`: what one of them reads from memory and writes there.
    - `is_kernel`: whether it is a kernel of its own, such as attention, and no plain product.
    - `host`: the bytes that one of them copies to the host's memory or back, beside operations.
    """

    times: int
    flops: tuple[tuple[str, int], ...]
    bytes: int
    is_kernel: bool = False
    host: int = 0


class Loop(NamedTuple):
    """Steps that run several times."""

    times: int
    steps: "tuple[Step, ...]"


Step = Operation | Begin | End | Loop


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
    - `schedule`: the operations and loops in the order in which they run, and where in between
        collectives begin and must have ended.

    !!! Example

        ```python
        work = mylib.audit(lambda x: x @ x, jnp.ones((8, 8))).work
        assert sum(work.flops.values()) == 2 * 8**3
        ```
    """

    flops: Mapping[str, int]
    traffic: int
    unknown: int
    schedule: tuple[Step, ...] = field(default=(), repr=False)

    @property
    def operations(self) -> tuple[Operation, ...]:
        """The operations without their order, equal ones together."""
        counts = _counted(self.schedule)
        return tuple(operation._replace(times=times) for operation, times in counts.items())


def work_of(module: HloModule, sent: Sequence[Transfer]) -> Work:
    """`sent` are all collectives of the program, to which the schedule refers by their number."""
    reader = _ScheduleReader(*moments_of(module, sent))
    steps, unknown = reader.read(module.entry)
    counts = _counted(steps)
    flops: Counter[str] = Counter()
    for operation, times in counts.items():
        for dtype, number in operation.flops:
            flops[dtype] += times * number
    traffic = sum(times * operation.bytes for operation, times in counts.items())
    return Work(dict(flops), traffic, unknown, steps)


def _counted(steps: Iterable[Step], times: int = 1) -> Counter[Operation]:
    """How often each kind of operation runs, as if its `times` were 1."""
    counts: Counter[Operation] = Counter()
    for step in steps:
        if isinstance(step, Operation):
            counts[step._replace(times=1)] += times * step.times
        elif isinstance(step, Loop):
            counts.update(_counted(step.steps, times * step.times))
    return counts


def _weight(steps: tuple[Step, ...]) -> float:
    """For comparing branches: in bytes, at 300 operations a byte, as GPUs and TPUs have."""
    return sum(
        times * max(operation.bytes, sum(n for _, n in operation.flops) / 300)
        for operation, times in _counted(steps).items()
    )


class _ScheduleReader:
    def __init__(self, begins: Moments[Begin], ends: Moments[End]) -> None:
        self._begins = begins
        self._ends = ends
        self._steps: dict[str, tuple[tuple[Step, ...], int]] = {}

    def read(self, computation: Computation) -> tuple[tuple[Step, ...], int]:
        """What a computation does; and how much of it isn't known."""
        if computation.name not in self._steps:
            steps: list[Step] = []
            unknown = 0
            for x in computation.instructions:
                steps_of_x, uncounted = self._steps_of(x)
                steps += [*self._begins.get(id(x), ()), *steps_of_x, *self._ends.get(id(x), ())]
                unknown += uncounted
            self._steps[computation.name] = tuple(steps), unknown
        return self._steps[computation.name]

    def _steps_of(self, x: Instruction) -> tuple[Sequence[Step], int]:
        if x.waits or x.sends or x.row.free or x.row.reserves:
            return [], 0
        if x.row.calls in ("", "each") or x.does == "fusion":
            operation, unknown = operation_of(x)
            return [operation], unknown
        called = [self.read(computation) for computation in x.calls]
        parts = [steps for steps, _ in called]
        # Of all branches: one that can't be counted costs too little to be chosen.
        unknown = sum(each for _, each in called)
        if x.row.calls == "branch":
            return max(parts, key=_weight), unknown
        steps = [step for steps in parts for step in steps]
        if x.row.calls == "run":
            return self._beside(x, steps), unknown
        # Of a loop whose length is unknown one turn is counted, and that it is unknown.
        turns = trips(x)
        return [Loop(1 if turns is None else turns, tuple(steps))], unknown + (turns is None)

    def _beside(self, x: Instruction, steps: list[Step]) -> list[Step]:
        """The steps of a computation; if it runs beside others, its collectives end later."""
        if done_of(x) is x:
            return steps
        self._ends[id(done_of(x))] = [step for step in steps if isinstance(step, End)]
        return [step for step in steps if not isinstance(step, End)]


def operation_of(x: Instruction) -> tuple[Operation, int]:
    """What an instruction does, and how much of that isn't known."""
    flops: Counter[str] = Counter()
    unknown = 0
    is_kernel = False
    for y in _fused(x):
        products = products_of_instruction(y)
        unknown += products is None
        is_kernel = is_kernel or y.row.kernel
        if products:
            flops[dtype_of(y)] += 2 * products
    moved, copied = (_read(x, size) + _written(x, size) for size in (_bytes, _bytes_on_host))
    return Operation(1, tuple(sorted(flops.items())), moved, is_kernel, copied), unknown


def _fused(x: Instruction) -> Iterator[Instruction]:
    """The instruction, and those in the fusions that it calls."""
    yield x
    if x.does == "fusion":
        for y in x.called.instructions:
            yield from _fused(y)


def _read(x: Instruction, size: Callable[[Array], int]) -> int:
    return sum(
        min(sum(map(size, y.arrays)), _read_of_operand(x, i)) for i, y in enumerate(x.inputs())
    )


def _read_of_operand(x: Instruction, index: int) -> int:
    """The bytes that an instruction reads of one operand, if all of it is in memory."""
    if index == 0 and x.row.takes:
        return sum(array.padded_bytes for array in done_of(x).arrays)
    if index == 0 and x.row.puts is not None:
        return 0  # an update is written in place
    if x.does == "fusion":
        return _uses(x.called.parameters[index])
    return sum(array.padded_bytes for array in x.operand(index).arrays)


def _uses(x: Instruction) -> int:
    """The bytes of a value that the rest of a fused computation reads."""
    if x.is_root:
        return sum(array.padded_bytes for array in x.arrays)
    total = 0
    for user in x.users:
        if user.row.lazy:
            total += _uses(user)
        elif not _sends(user) and user.opcode != "tuple":
            # One that takes a value twice reads it once.
            places = [i for i, name in enumerate(user.operands) if name == x.name]
            total += max(_read_of_operand(user, i) for i in places)
    return total


def _written(x: Instruction, size: Callable[[Array], int]) -> int:
    arrays = done_of(x).arrays
    last = x.called.result if x.does == "fusion" else x
    if _sends(last):
        return 0
    # A fusion with several results ends in a tuple of them.
    each = last.inputs() if last.opcode == "tuple" else [last]
    if len(each) == len(arrays):
        return sum(min(size(array), _put(y)) for array, y in zip(arrays, each, strict=True))
    if last.row.workspace:  # after the results
        arrays = [array for array in arrays if array.dtype not in ("s8", "u8")]
    return sum(map(size, arrays))


def _put(x: Instruction) -> int:
    """The bytes that an instruction writes, if its result is in memory."""
    while x.opcode == "bitcast":  # an update behind it is in place all the same
        x = x.operand(0)
    if x.opcode == "parameter" or _sends(x):
        return 0
    if x.row.puts is not None:
        return sum(array.padded_bytes for array in x.operand(x.row.puts).arrays)
    if x.opcode == "fusion":
        return _put(x.called.result)
    return sum(array.padded_bytes for array in done_of(x).arrays)


def _sends(x: Instruction) -> bool:
    """Whether a part of a fusion belongs to a collective. The TPU's compiler goes on with one in
    each fusion that runs in the meantime, whose results are its buffers as well.
    """
    return bool(x.sends or x.row.window)


@functools.lru_cache(maxsize=10_000)
def _bytes(array: Array) -> int:
    """The bytes of an array in the device's memory: 0 in a TPU's on-chip memory, or on a host."""
    # Only the TPU's layouts have tiles. On GPUs `S(1)` is a part of the same memory.
    on_chip = "T(" in array.layout and "S(" in array.layout
    return 0 if on_chip or array.on_host else array.padded_bytes


def _bytes_on_host(array: Array) -> int:
    return array.padded_bytes if array.on_host else 0

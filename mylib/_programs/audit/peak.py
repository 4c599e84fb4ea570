"""Finds the arrays that are alive at the peak, by the order in which a program runs.

Three answers about the peak, each to its own question: XLA counts how much a compiled program needs
(`memory.py`), this module names the arrays that it is made of, and `plan/lifetimes.py` predicts
how much a program will need, from its jaxpr, before any compiler has ordered and fused it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise, takewhile

from ..._core.errors import AuditError
from .hlo import Array, Computation, HloModule, Instruction, arrays_of, elements_of
from .opcodes import Likeness
from .values import Value, unchanged

_NEAR = re.compile(r"S\(([12346])\)")  # not the device's main memory


@dataclass(eq=False)
class Buffer:
    """A piece of memory, and the instruction that first writes to it."""

    bytes: int
    made_by: Instruction


@dataclass
class Peak:
    """The most memory that is used at one time, without that of the caller."""

    bytes: int
    alive: list[Buffer]


def peak_of(module: HloModule) -> Peak:
    """The peak memory of a program, without its arguments and constants. Results that are not in
    donated memory are allocated before it starts.

    **Raises:**

    `AuditError` if the program's instructions are not in the order in which they run.
    """
    if module.attributes.get("is_scheduled") != "true":
        raise AuditError("the program's instructions are not in the order in which they run")
    entry = module.entry
    arguments = {x.name: [Buffer(0, x) for _ in x.arrays] for x in entry.parameters.values()}
    return _Lifetimes(entry, arguments, results=set(module.donated)).peak()


class _Lifetimes:
    """One run of a computation with these parameters. The results are in memory of its
    caller, or only those with the numbers `results`: the others are then allocated before it runs.
    """

    def __init__(
        self,
        computation: Computation,
        parameters: dict[str, list[Buffer]],
        results: set[int] | None = None,
    ):
        self.computation = computation
        self.held: dict[str, list[Buffer]] = dict(parameters)
        self.inner: dict[str, Peak] = {}
        self.outside = {id(b) for buffers in parameters.values() for b in buffers}
        for x in computation.instructions:
            if x.name not in self.held:
                self.held[x.name] = self._hold(x)
        of_result = self.held[computation.result.name]
        self.outside |= {id(b) for i, b in enumerate(of_result) if results is None or i in results}
        self.results = {id(b): b for b in of_result if id(b) not in self.outside}

    def _hold(self, x: Instruction) -> list[Buffer]:
        """The memory of each array of the result."""
        operands = [self.held[name] for name in x.operands]
        sizes = [_size(array) for array in x.arrays]
        match x.opcode:
            case "tuple":
                return [b for buffers in operands for b in buffers]
            case "get-tuple-element":
                start, end = _bounds(x.operand(0).type)[x.index]
                return operands[0][start:end]
            case "constant":
                return [Buffer(0, x) for _ in sizes]  # it is part of the program
            case "while" | "call" | "conditional":
                arguments = operands[1:] if x.opcode == "conditional" else operands
                for called in x.calls:
                    self._enter(x, called, arguments)
                if x.opcode == "while":  # XLA lets each turn write over what it was given
                    return operands[0]
            case _ if x.row.like == Likeness.MEMORY and operands:
                return operands[0]
            case _ if x.form == "done":
                return self._of_done(x, operands[0])
            case _ if x.form == "start":
                return self._of_start(x, operands)
        return [self._in_place(x, i) or Buffer(size, x) for i, size in enumerate(sizes)]

    def _enter(
        self, x: Instruction, called: Computation, arguments: Sequence[list[Buffer]]
    ) -> None:
        arguments = arguments if len(called.parameters) == len(arguments) else [[], *arguments]
        held = {
            parameter.name: arguments[number] if number < len(arguments) else []
            for number, parameter in called.parameters.items()
        }
        # Where it isn't told which operand is whose, as in branches, they hold nothing of it.
        if any(len(held[p.name]) != len(p.arrays) for p in called.parameters.values()):
            held = {p.name: [Buffer(0, p) for _ in p.arrays] for p in called.parameters.values()}
        peak = _Lifetimes(called, held).peak()
        if x.name not in self.inner or peak.bytes > self.inner[x.name].bytes:
            self.inner[x.name] = peak

    def _of_start(self, x: Instruction, operands: list[list[Buffer]]) -> list[Buffer]:
        """Its result contains the operands, followed by the memory that it writes to; for a copy
        it is the other way round.
        """
        flat = [b for buffers in operands for b in buffers]
        arrays = x.arrays
        if x.opcode == "copy-start":
            return [Buffer(_size(arrays[0]), x), *flat, *(Buffer(0, x) for _ in arrays[2:])]
        # Calls and several operands come before the results; one collective may have only these.
        if x.type.startswith("((") or len(arrays) > len(flat) + 1:
            new = [Buffer(_size(array), x) for array in arrays[len(flat) :]]
            return [*flat, *new]
        return [Buffer(_size(array), x) for array in arrays]

    def _of_done(self, x: Instruction, started: list[Buffer]) -> list[Buffer]:
        if x.operand(0).opcode == "copy-start":
            return started[:1]
        outputs = [b for b in started if b.made_by is x.operand(0) and b.bytes]
        count = len(x.arrays)
        return outputs[:count] if len(outputs) >= count else started[:count]

    def _in_place(self, x: Instruction, index: int) -> Buffer | None:
        """The memory of the operand that an update is written into."""
        if x.opcode == "fusion":
            path = (index,) if len(x.arrays) > 1 else ()
            update = _computed_here(Value(x.called.result, path))
            if update.opcode != "dynamic-update-slice":
                return None
            target = _computed_here(Value(update.operand(0)))
            if target.opcode != "parameter":
                return None
            return self.held[x.operands[int(target.rest)]][0]
        if x.opcode == "dynamic-update-slice":
            return self.held[x.operands[0]][0]
        return None

    def peak(self) -> Peak:
        order = self.computation.instructions
        last = self._last_uses()
        first = {id(b): i for i, x in reversed([*enumerate(order)]) for b in self.held[x.name]}
        heap = _Heap(self.results, first)
        dying: dict[int, list[Buffer]] = {}
        best = Peak(0, [])
        for i, x in enumerate(order):
            new = [b for b in self.held[x.name] if first[id(b)] == i and b not in heap]
            new = [b for b in new if id(b) not in self.outside]
            # XLA writes a result over an operand of its size that nothing needs any more.
            if _may_share(x):
                sizes = {b.bytes for b in new}
                for b in [b for b in dying.get(i, ()) if b.bytes in sizes][:1]:
                    heap.free(b)
            for b in new:
                heap.allocate(b, last[id(b)])
                dying.setdefault(last[id(b)], []).append(b)
            # A computation's own memory is there only while it runs.
            inner = self.inner.get(x.name, Peak(0, []))
            if heap.bytes + inner.bytes > best.bytes:
                best = Peak(heap.bytes + inner.bytes, [*heap.alive.values(), *inner.alive])
            for b in dying.get(i, ()):
                heap.free(b)
        return best

    def _last_uses(self) -> dict[int, int]:
        """The position of the last instruction that needs each buffer."""
        order = self.computation.instructions
        last: dict[int, int] = {}
        for i, x in enumerate(order):
            # An element of a tuple uses no other element.
            operands = x.operands if x.opcode != "get-tuple-element" else []
            for name in (x.name, *operands):
                last.update((id(b), i) for b in self.held[name])
        # Results are needed until the end.
        last.update((id(b), len(order)) for b in self.held[self.computation.result.name])
        return last


@lru_cache(maxsize=1000)
def _bounds(type_: str) -> list[tuple[int, int]]:
    """The range of a tuple's arrays that belongs to each of its elements."""
    return list(pairwise([0, *accumulate(len(arrays_of(x)) for x in elements_of(type_))]))


class _Heap:
    """The buffers that are alive. The memory of a result, which is there from the start, is lent to
    buffers of its size that are dead before it is written, as XLA does.
    """

    def __init__(self, results: dict[int, Buffer], written: dict[int, int]):
        self.alive = dict(results)
        self.bytes = sum(b.bytes for b in results.values())
        self._results = results
        self._written = written
        self._places = {key: key for key in results}
        self._lendable: dict[int, list[int]] = {}
        for key, b in results.items():
            self._lendable.setdefault(b.bytes, []).append(key)

    def __contains__(self, buffer: Buffer) -> bool:
        return id(buffer) in self._places

    def allocate(self, buffer: Buffer, until: int) -> None:
        # Until the result itself is written, its memory may hold something else.
        lendable = self._lendable.get(buffer.bytes, [])
        place = next((key for key in lendable if until < self._written[key]), None)
        if place is None:
            place = id(buffer)
            self.bytes += buffer.bytes
        else:
            lendable.remove(place)
        self.alive[place] = buffer
        self._places[id(buffer)] = place

    def free(self, buffer: Buffer) -> None:
        place = self._places.pop(id(buffer), None)
        if place in self._results:
            self.alive[place] = self._results[place]
            self._lendable[buffer.bytes].append(place)
        elif place is not None:
            del self.alive[place]
            self.bytes -= buffer.bytes


def _computed_here(value: Value) -> Instruction:
    """What computes a value, or brings it into its computation."""
    here = value.made_by.computation
    *_, last = takewhile(lambda copy: copy.made_by.computation is here, unchanged(value))
    return last.made_by


def _may_share(x: Instruction) -> bool:
    """Whether the result may reuse the memory of an operand that isn't needed any more."""
    # These read each element once, before they write it.
    is_loop = x.does == "fusion" and x.attributes.get("kind") == "kLoop"
    return is_loop or x.opcode in ("all-reduce", "add", "multiply", "convert")


def _size(array: Array) -> int:
    return 0 if _NEAR.search(array.layout) or array.on_host else array.padded_bytes

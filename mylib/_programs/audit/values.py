"""Follows values backwards and forwards, through tuples, fusions, loops and copies."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from .hlo import Computation, HloModule, Instruction
from .opcodes import Likeness

_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class Value(NamedTuple):
    """The result of an instruction, or an element of it if it is a tuple."""

    made_by: Instruction
    path: tuple[int, ...] = ()


@dataclass(frozen=True)
class Execution:
    """A way in which a computation runs: how often in a call of the program (None if unknown),
    only in which branches of conditions, and in which loops.
    """

    times: int | None
    branches: tuple[tuple[str, int], ...] = ()
    loops: tuple[Instruction, ...] = ()
    asynchronous: bool = False


def runs_of(module: HloModule) -> dict[str, list[Execution]]:
    """All the ways in which each reachable computation runs."""
    runs: dict[str, list[Execution]] = {}

    def enter(computation: Computation, run: Execution) -> None:
        runs.setdefault(computation.name, []).append(run)
        for x in computation.instructions:
            match x.row.calls if x.calls else "":
                case "loop":
                    inside, times = (*run.loops, x), trips(x)
                    for called, more in zip(x.calls, (1, 0), strict=True):  # one test more
                        product = _times(run.times, None if times is None else times + more)
                        enter(called, replace(run, times=product, loops=inside))
                case "branch":
                    for number, called in enumerate(x.calls):
                        enter(called, replace(run, branches=(*run.branches, (x.name, number))))
                case "run":
                    late = run.asynchronous or x.form == "start"
                    enter(x.called, replace(run, asynchronous=late))

    enter(module.entry, Execution(1))
    return runs


def _times(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a * b


def trips(loop: Instruction) -> int | None:
    """How often the body of a loop runs, or None if that can't be read from the program."""
    # The compilers for CPUs and GPUs state it. That for TPUs doesn't.
    stated = _TRIPS.search(loop.attributes.get("backend_config", ""))
    if stated is not None:
        return int(stated[1])
    condition, body = loop.calls
    test = computed(Value(condition.result)).made_by
    if test.opcode != "compare":
        return None
    left, right = (Value(x) for x in test.inputs())
    direction = test.attribute("direction")
    limit = constant(right)
    if limit is None:  # the constant may be on the left
        left, right, limit = right, left, constant(left)
        direction = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(direction, "")
    counter = _carried(left, condition)
    if limit is None or counter is None:
        return None
    start = constant(Value(loop.operand(0), counter))
    step = _step(body, counter)
    if start is None or not step:
        return None
    ends = {"LT": limit, "LE": limit + 1} if step > 0 else {"GT": limit, "GE": limit - 1}
    return len(range(start, ends[direction], step)) if direction in ends else None


def _carried(value: Value, within: Computation) -> tuple[int, ...] | None:
    """The index in a loop's carry of a value in the loop's condition or body."""
    for made_by, path in unchanged(value):
        if made_by.opcode == "parameter" and made_by.computation is within:
            return path
    return None


def _step(body: Computation, counter: tuple[int, ...]) -> int | None:
    """By how much an element of the carry grows in each step of a loop."""
    after = computed(Value(body.result, counter))
    if after.made_by.opcode not in ("add", "subtract"):
        return None
    left, right = (Value(x) for x in after.made_by.inputs())
    if after.made_by.opcode == "add" and constant(left) is not None:
        left, right = right, left
    # The counter must be the one that the condition asks for.
    step = constant(right)
    if step is None or _carried(left, body) != counter:
        return None
    return step if after.made_by.opcode == "add" else -step


def constant(value: Value) -> int | None:
    """The value as an integer if it is constant, else None."""
    x = computed(value).made_by
    if x.opcode == "constant" and re.fullmatch(r"-?\d+", x.rest):
        return int(x.rest)
    return None


def unchanged(value: Value) -> Iterator[Value]:
    """The value, and all values that it is only a copy of, back to the one that is computed."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    current: Value | None = value
    while current is not None and (id(current.made_by), current.path) not in seen:
        seen.add((id(current.made_by), current.path))
        yield current
        current = before(current)


def before(value: Value) -> Value | None:
    """The same value one instruction earlier, or None where it is computed."""
    x, path = value
    match x.opcode:
        case "get-tuple-element":
            return Value(x.operand(0), (x.index, *path))
        case "tuple" if path:
            return Value(x.operand(path[0]), path[1:])
        case "copy-done":
            return Value(x.operand(0), (0,))
        case "copy-start" if path[:1] in ((0,), (1,)):
            return Value(x.operand(0), path[1:])
        case "parameter":
            return _argument(x, path)
        case "while" if is_invariant(x, path):
            return Value(x.operand(0), path)
    # The first result of such a start is the operand of the collective that it goes on with.
    if x.row.window == "start" and path == (0,):
        return Value(x.operand(0).operand(0))
    # Of a call or a fusion the result is computed inside, also if another instruction waits for it.
    if x.row.calls == "run" and x.form != "update":
        return Value(start_of(x).called.result, path)
    if x.row.like >= Likeness.VALUE and x.operands and not x.form and not x.target:
        return Value(x.operand(0), path)
    return None


def _argument(x: Instruction, path: tuple[int, ...]) -> Value | None:
    """The argument that a computation's parameter stands for where the computation is called."""
    # Called from several places, it stands for several arguments.
    callers = x.computation.callers
    if len(callers) != 1:
        return None
    (caller,) = callers
    number = int(x.rest)
    if caller.opcode == "while":
        return Value(caller.operand(0), path) if is_invariant(caller, path) else None
    if caller.opcode == "conditional":
        return Value(caller.operand(1 + caller.calls.index(x.computation)), path)
    return Value(operands_of_call(caller)[number], path) if caller.row.calls == "run" else None


def operands_of_call(x: Instruction) -> list[Instruction]:
    """The operands of the computation that an instruction calls."""
    # The SparseCores of a TPU are started before they have operands; an update brings those.
    updates = () if x.operands else x.users
    return next((y.inputs()[1:] for y in updates if y.form == "update"), x.inputs())


def start_of(x: Instruction) -> Instruction:
    """The instruction that starts what an instruction waits for; itself if it waits for nothing."""
    while x.waits:
        x = x.operand(0)
    return x


def done_of(x: Instruction) -> Instruction:
    """The instruction that waits for one that starts an operation; itself if it does both."""
    if x.form != "start":
        return x
    return next((user for user in _waiting(x) if user.form == "done"), x)


def _waiting(x: Instruction) -> Iterator[Instruction]:
    for user in x.users:
        if user.waits and user.operand(0) is x:
            yield user
            yield from _waiting(user)


def is_invariant(loop: Instruction, path: tuple[int, ...]) -> bool:
    """Whether a loop leaves an element of its carry unchanged."""
    _, body = loop.calls
    # Loops in loops ask this of each other, so that it could take long.
    for made_by, source in islice(unchanged(Value(body.result, path)), 100):
        if made_by.opcode == "parameter" and made_by.computation is body:
            return source == path
        if made_by.opcode == "parameter" and made_by.computation.callers[:1] == [loop]:
            return False
    return False


def uses_in(fusion: Instruction, x: Instruction) -> list[Instruction]:
    """The parameters of a fusion's computation that stand for an operand."""
    parameters = fusion.called.parameters
    return [parameters[i] for i, name in enumerate(fusion.operands) if name == x.name]


def behind(
    operands: Iterable[Instruction], inputs_of: Callable[[Instruction], Iterable[Instruction]]
) -> Iterator[Instruction]:
    """What these values are copies of, where they are computed, and what is behind the inputs of
    that; the nearest first.
    """
    queue = [Value(x) for x in operands]
    seen: set[int] = set()
    for value in queue:
        *copies, (made_by, _) = unchanged(value)
        yield from (copy.made_by for copy in copies)
        if id(made_by) not in seen:
            seen.add(id(made_by))
            yield made_by
            queue += map(Value, inputs_of(made_by))


def inputs_here(x: Instruction) -> list[Instruction]:
    """What an instruction computes its result from, unless other computations do."""
    return [] if x.row.calls in ("loop", "branch") else x.inputs()


def computed(value: Value) -> Value:
    """The value that this one is a copy of, where it is computed."""
    *_, last = unchanged(value)
    return last

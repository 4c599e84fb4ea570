"""Finds the arguments whose gradients a collective sums: those that its result then updates."""

import re
from collections.abc import Iterable, Iterator

from .attribution import Names, argument_of
from .flow import MOVES, Value, done_of, start_of
from .hlo import Instruction, calls_of

_ELEMENTWISE = MOVES | frozenset(
    """
    abs add add-dependency and clamp compare cbrt ceil concatenate cosine divide
    dynamic-update-slice erf exponential exponential-minus-one floor is-finite log log-plus-one
    logistic maximum minimum multiply negate not or power round-nearest-afz round-nearest-even
    rsqrt select sign sine sqrt subtract tan tanh xor
    """.split()
)
# The number of operands that are data; the others are positions.
_DATA = {"dynamic-slice": 1, "dynamic-update-slice": 2, "pad": 1}
_PAIRS = re.compile(r"(all-reduce|all-gather|collective-permute|copy|slice)(-start|-done)?")
_CALLS = ("fusion", "call", "while")
_FAR = 2000  # the most values that are looked at


def gradients_of(results: Iterable[Instruction], names: Names) -> tuple[str, ...]:
    """The paths of the arguments that these arrays update, without those of an optimiser's state,
    whose paths end like those of the model.
    """
    paths = list(dict.fromkeys(names(own) for x in results for own in _updated(x)))
    return tuple(p for p in paths if not any(_is_state_of(p, other) for other in paths))


def _is_state_of(path: str, other: str) -> bool:
    inner = re.sub(r"^\w+", "", other)
    return len(path) > len(other) and path.endswith(inner) and _keys(path) > _keys(other)


def _keys(path: str) -> int:
    return len(re.findall(r"[.\[]", path))


def _updated(start: Instruction) -> list[str]:
    """The arguments that are combined with a value before it becomes a result of the program, in
    their order.
    """
    queue = [Value(start)]
    before: dict[Value, list[Value]] = {queue[0]: []}
    returned: list[Value] = []
    for value in queue:
        if len(queue) > _FAR:
            return []
        if value.made_by.is_root and not value.made_by.computation.callers:
            returned.append(value)
        for after in _after(value):
            if after not in before:
                before[after] = []
                queue.append(after)
            before[after].append(value)
    met: dict[int, str] = {}
    seen = set(returned)
    for value in returned:
        met |= _arguments(value.made_by)
        new = [x for x in dict.fromkeys(before[value]) if x not in seen]
        seen.update(new)
        returned += new
    return [met[number] for number in sorted(met)]


def _arguments(x: Instruction) -> dict[int, str]:
    """The program's arguments that an operation combines element by element."""
    found = map(argument_of, x.inputs()) if x.opcode in _ELEMENTWISE else ()
    return {int(y.rest): (y.op_names or [y.name])[0] for y in found if y is not None}


def _after(value: Value) -> Iterator[Value]:
    """The values that are computed from a value element by element."""
    x, path = value
    module = x.computation.module
    for user in x.computation.users[x.name]:
        for number, name in enumerate(user.operands):
            if name != x.name:
                continue
            if number and user.opcode.endswith("-update"):  # the operands of what it has started
                user, number = start_of(user), number - 1
            match user.opcode:
                case "get-tuple-element":
                    if path[:1] == (user.integer("index"),):
                        yield Value(user, path[1:])
                case "tuple":
                    yield Value(user, (number, *path))
                case "optimization-barrier":
                    yield Value(user, path)
                case opcode if opcode in _CALLS or (opcode.endswith("-start") and calls_of(user)):
                    for role, called in calls_of(user):
                        if role != "condition":
                            yield Value(module.computations[called].parameters[number], path)
                case opcode if _PAIRS.fullmatch(opcode):
                    yield Value(user)
                case opcode if opcode in _ELEMENTWISE and number < _DATA.get(opcode, 9):
                    yield Value(user)
    if x.is_root:
        for caller in x.computation.callers:
            if caller.opcode in _CALLS or caller.opcode == "conditional":
                yield Value(caller, path)
            elif caller.opcode.endswith("-start"):
                yield Value(done_of(caller), path)

"""What a profile is joined with: where each instruction is from, and the steps of collectives."""

from collections.abc import Sequence

from ..measured import InstructionOrigin, JoinedProgram, Sent, SentStep
from .attribution import place_of
from .flow import Flow
from .hlo import Computation, Instruction
from .moments import Window
from .values import done_of


def instructions_of(windows: Sequence[Window]) -> tuple[str, ...]:
    """The names of the instructions that start a collective, and of those that end it."""
    return tuple(dict.fromkeys(x.name for window in windows for x in _bounds(window)))


def program_of(flow: Flow, sent: Sequence[Sent]) -> JoinedProgram:
    """A program for a profile to be joined with. `sent` say of each collective where it is from."""
    steps = [[_step(window) for window in windows] for windows in flow.windows]
    # A combined instruction has its bytes for each of its collectives.
    bytes_of: dict[str, int] = {}
    for step in (step for each in steps for step in each):
        bytes_of[step.first] = bytes_of.get(step.first, 0) + step.wire_bytes
    collectives = [
        one._replace(steps=tuple(each), share=_share(each, bytes_of))
        for one, each in zip(sent, steps, strict=True)
    ]
    module = flow.module
    origins = {
        x.name: InstructionOrigin(*_place(x), _inside(x))
        for computation in module.computations.values()
        if _runs(computation)
        for x in computation.instructions
    }
    certain = frozenset(x.name for x in module.entry.instructions if not x.row.free)
    return JoinedProgram(module.name, origins, collectives, certain, flow.numbers)


def _runs(computation: Computation) -> bool:
    """Whether its instructions run one by one, and are not fused."""
    calls = [x.does != "fusion" and x.row.calls != "each" for x in computation.callers]
    return any(calls) or computation is computation.module.entry


def _inside(x: Instruction) -> frozenset[str]:
    """The names of the instructions that it runs, and that have events of their own."""
    if x.row.calls not in ("run", "loop", "branch") or x.does == "fusion":
        return frozenset()
    return frozenset(y.name for called in x.calls for y in called.instructions)


def _place(x: Instruction) -> tuple[str, str, str]:
    """Of a loop's counter, which has no place, that of the loop."""
    place = place_of(x)
    callers = x.computation.callers
    return place if place[2] or not callers else _place(callers[0])


def _bounds(window: Window) -> tuple[Instruction, Instruction]:
    """The instructions that a profile has: of a computation that runs beside others, its own."""
    for caller in window.begin.computation.callers:
        if caller.form == "start":
            return caller, done_of(caller)
    return window.begin, window.end


def _step(window: Window) -> SentStep:
    first, last = _bounds(window)
    member = window.member
    groups = tuple(map(tuple, member.groups.tolist()))
    in_pairs = member.kind == "collective-permute"
    return SentStep(first.name, last.name, groups, in_pairs, member.wire_bytes)


def _share(steps: Sequence[SentStep], bytes_of: dict[str, int]) -> float:
    """The part of its instructions' time that is a collective's own, by bytes."""
    # A combined instruction sends several, and a profile has only its whole time.
    total = sum(bytes_of[step.first] for step in steps)
    return sum(step.wire_bytes for step in steps) / total if total else 1.0

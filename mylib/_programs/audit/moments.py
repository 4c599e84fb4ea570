"""When the collectives of a program begin, and when they must have ended."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from .collectives import Transfer
from .hlo import HloModule, Instruction


class Begin(NamedTuple):
    """A collective begins, and other work goes on.

    **Attributes:**

    - `collective`: its number in `Report.collectives`.
    - `share`: how much of it is sent, if it is split into a chain.
    """

    collective: int
    share: float


class End(NamedTuple):
    """Here a collective must have ended.

    **Attributes:**

    - `collective`: its number in `Report.collectives`.
    """

    collective: int


T = TypeVar("T")
# By the `id` of an instruction.
Moments = dict[int, list[T]]


class Window(NamedTuple):
    """A step of a collective: the instruction at which it begins, and the one at which it must have
    ended. `share` of the collective is sent in it.
    """

    member: Transfer
    share: float
    begin: Instruction
    end: Instruction


def windows_of(module: HloModule, sent: Sequence[Transfer]) -> list[list[Window]]:
    """The steps of each collective of a program."""
    # Where the TPU's compiler waits for what began in a fusion.
    later = dict(_ends_in_fusions(module))
    return [[*_windows(whole, later)] for whole in sent]


def _windows(
    whole: Transfer, later: Mapping[tuple[str, str | None], Instruction]
) -> Iterator[Window]:
    members = whole.members or (whole,)
    # The steps of a chain send equal parts of it.
    share = (whole.times or 1) / sum(member.times or 1 for member in members)
    for member in members:
        for x in _outermost(member.first):
            # In a fusion it has no end of its own: it ends with the fusion, or a later one.
            done = later.get(member.first.channel, x) if x is not member.first else member.done
            yield Window(member, share, x, done if member.asynchronous else x)


def is_overlapped(window: Window) -> bool:
    """Whether a device computes between the beginning of a step and its end."""
    begin, end, first = window.begin, window.end, window.member.first
    if not window.member.asynchronous or '"is_sync":true' in first.text:
        return False
    if begin is end:  # its whole computation runs beside others
        return True
    order = begin.computation.instructions
    between = [x for x in order[order.index(begin) + 1 : order.index(end)] if not x.waits]
    if begin is not first:  # what computes beside a fusion's collective goes on with it
        fusions = [x.called for x in between if x.does == "fusion"]
        return any(x.channel == first.channel for fused in fusions for x in fused.instructions)
    # Products, fusions and loops. What only moves or names a value takes too little time.
    return any(x.row.works for x in between)


def moments_of(module: HloModule, sent: Sequence[Transfer]) -> tuple[Moments[Begin], Moments[End]]:
    """The instructions at which collectives begin and end, by their `id`."""
    begins: Moments[Begin] = {}
    ends: Moments[End] = {}
    for number, windows in enumerate(windows_of(module, sent)):
        for window in windows:
            begins.setdefault(id(window.begin), []).append(Begin(number, window.share))
            ends.setdefault(id(window.end), []).append(End(number))
    return begins, ends


def _outermost(x: Instruction) -> Iterator[Instruction]:
    """The instruction, or the fusions that contain it."""
    if not x.computation.fusions:
        yield x
    for caller in x.computation.fusions:
        yield from _outermost(caller)


def _ends_in_fusions(module: HloModule) -> Iterator[tuple[tuple[str, str | None], Instruction]]:
    """The TPU's compiler starts a collective in one fusion, and waits for it in a later one."""
    for x in module.instructions():
        if x.row.window == "end":
            for y in x.inputs():
                if "channel_id" in y.attributes:
                    yield from ((y.channel, caller) for caller in _outermost(x))

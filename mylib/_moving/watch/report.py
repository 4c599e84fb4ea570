"""The report of who is stuck, as text."""

from collections.abc import Iterator, Sequence

from ..._core.text import counted, in_short, more
from ..processes import named
from .verdict import GONE, Account, ToldCall, by, findings, verb

# The most groups of processes that are described, and calls of each.
_GROUPS = 8
_CALLS = 4


def standstill(age: float, limit: float) -> str:
    return f"no progress for {age:.0f} s (stuck_after={limit:g})"


def report(accounts: Sequence[Account], title: str) -> str:
    """What is odd, and where each process is: first those that have done least. Processes that are
    at the same place are described together.
    """
    oddities = findings(accounts)
    lines = [f"mylib.watch: {title}{oddities and f': {oddities[0]}' or ''}"]
    lines += [f"  {text}" for text in oddities[1:]]
    ordered = sorted(accounts, key=lambda account: sum(account.counts.values()))
    groups = by((account.index, tuple(_described(account))) for account in ordered)
    for text, who in groups[:_GROUPS]:
        head, *rest = (_agreeing(line, who) for line in text)
        lines += [f"{named(who).capitalize()} {head}", *(f"  {line}" for line in rest)]
    left = sum(len(who) for _, who in groups[_GROUPS:])
    return "\n".join([*lines, *more(left, "process")])


def _agreeing(line: str, who: Sequence[int]) -> str:
    """A line that begins with a verb, as it is said of these processes."""
    first, _, rest = line.partition(" ")
    return f"{verb(first, who)} {rest}"


def _described(account: Account) -> Iterator[str]:
    if account.state == "absent":
        yield "has told nothing"
        return
    where = account.news.get("at") or "an unknown line"
    if account.state in GONE:
        yield f"was at {where} when it left"
        return
    doing = {"paused": ", paused", "compiling": ", compiling"}.get(account.state, "")
    yield f"{'was' if account.silent else 'is'} at {where}{doing}"
    last, calls = account.news.get("last"), [*account.calls.values()]
    if account.silent:
        yield f"its last news: {last or 'no call yet'}"
        return
    if not account.record and last:
        yield f"its last call: {last}"
    running = [call for call in calls if call.has_ended is not True]
    starting = account.told("starting")
    if starting and starting not in (call.text for call in running):
        yield f"is starting {starting}: that call has not returned"
    for call in [call for call in calls if call.has_ended][-1:]:
        yield f"has ended call {call.number}, {call.text}"
    yield from map(_running, running[:_CALLS])
    if len(running) > _CALLS:
        yield f"and {counted(len(running) - _CALLS, 'later call')}"
    for what, processes in account.record.get("waits", ()):
        yield f"waits for {what}, of {processes}"
    for name, stack in account.record.get("stacks", {}).items():
        yield f"{name}, innermost last:"
        yield from (f"  {line}" for line in stack)


def _running(call: ToldCall) -> str:
    name = f"call {call.number}, {call.text}"
    if call.has_ended is None:
        return f"has started {name}: whether it has ended is unknown"
    devices = "device" if len(call.devices) == 1 else "devices"
    where = f" on {devices} {in_short(call.devices)}" if call.devices else ""
    sends = f". It communicates {call.communicates}" if call.communicates else ""
    return f"has not ended {name}{where}{sends}"

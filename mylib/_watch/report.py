"""The report of who is stuck, as text."""

from collections.abc import Iterator, Sequence
from typing import Any

from .._processes import named
from .._text import counted, in_short, more
from .verdict import GONE, Account, by, findings, verb

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
    ordered = sorted(accounts, key=lambda x: sum(x.counts.values()))
    groups = by(ordered, lambda x: tuple(_described(x)))
    for text, who in groups[:_GROUPS]:
        head, *rest = (_agreeing(line, who) for line in text)
        lines += [f"{named(who).capitalize()} {head}", *(f"  {line}" for line in rest)]
    left = sum(len(who) for _, who in groups[_GROUPS:])
    return "\n".join([*lines, *more(left, "process")])


def _agreeing(line: str, who: Sequence[int]) -> str:
    """A line that begins with a verb, as it is said of these processes."""
    first, _, rest = line.partition(" ")
    return f"{verb(first, who)} {rest}"


def _described(x: Account) -> Iterator[str]:
    if x.state == "absent":
        yield "has told nothing"
        return
    where = x.news.get("at") or "an unknown line"
    if x.state in GONE:
        yield f"was at {where} when it left"
        return
    doing = {"paused": ", paused", "compiling": ", compiling"}.get(x.state, "")
    yield f"{'was' if x.silent else 'is'} at {where}{doing}"
    if x.silent:
        yield f"its last news: {x.news.get('last') or 'no call yet'}"
        return
    record = x.record
    if not record and x.news.get("last"):
        yield f"its last call: {x.news['last']}"
    if record.get("starting") and record["starting"] not in (call[2] for call in _open(record)):
        yield f"is starting {record['starting']}: that call has not returned"
    yield from _calls(record)
    for what, processes in record.get("waits", ()):
        yield f"waits for {what}, of {processes}"
    for name, stack in record.get("stacks", {}).items():
        yield f"{name}, innermost last:"
        yield from (f"  {line}" for line in stack)


def _calls(record: dict[str, Any]) -> Iterator[str]:
    running = _open(record)
    ended = [call for call in record.get("calls", ()) if call[3] is True]
    if ended:
        yield f"has ended call {ended[-1][1]}, {ended[-1][2]}"
    for _, n, text, state, devices, about in running[:_CALLS]:
        if state is None:
            yield f"has started call {n}, {text}: whether it has ended is unknown"
        else:
            where = f" on {'device' if len(devices) == 1 else 'devices'} {in_short(devices)}"
            communicated = f". It communicates {about}" if about else ""
            yield f"has not ended call {n}, {text}{where if devices else ''}{communicated}"
    if len(running) > _CALLS:
        yield f"and {counted(len(running) - _CALLS, 'later call')}"


def _open(record: dict[str, Any]) -> list[Any]:
    """The calls that are not known to have ended."""
    return [call for call in record.get("calls", ()) if call[3] is not True]

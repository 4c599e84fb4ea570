"""Finds out who is stuck, and how it differs from the others, from what each process has told."""

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from ..._core.text import counted
from ..processes import members, named

# Name at most this many places.
_PLACES = 4
# The status of a process that is no longer watched.
GONE = ("left", "ended", "lost")

Key = TypeVar("Key")
# What a process tells, by name: what JSON can represent.
Told = dict[str, Any]


class ToldCall(NamedTuple):
    """A call, as its process tells it."""

    kind: str
    number: int
    text: str
    # None if it is unknown.
    has_ended: bool | None
    # The devices that have not ended it, and what it communicates, if that is known.
    devices: Sequence[int] = ()
    communicates: str = ""
    # They tell apart calls of one name and line.
    arguments: str = ""


@dataclass
class Account:
    """The facts known about one process."""

    index: int
    # Seconds without progress, and since it was last heard of, if that is unusually long.
    age: float
    silent: float = 0.0
    # "running", "compiling", "paused"; "absent" before it has been heard of; or one of `GONE`.
    state: str = "running"
    # What it tells regularly: its calls, by kind and processes, and where it is.
    news: Told = field(default_factory=dict)
    # What it tells if it is stuck: its last calls, what it waits for, stacks.
    record: Told = field(default_factory=dict)

    @property
    def counts(self) -> Mapping[str, int]:
        return self.news.get("counts", {})

    @property
    def calls(self) -> dict[tuple[str, int], ToldCall]:
        """Its last calls, by kind and number."""
        calls = (ToldCall(*call) for call in self.record.get("calls", ()))
        return {(call.kind, call.number): call for call in calls}

    def told(self, what: str) -> Any:
        """A part of its record; None if that is empty."""
        return self.record.get(what) or None


def is_stuck(accounts: Sequence[Account], limit: float) -> bool:
    """Whether a process is stalled for `limit` seconds, and nobody it may wait for is moving.

    It may wait for each process that has not made more calls than itself.
    """
    watched = [account for account in accounts if account.state not in GONE]
    kinds = {kind for account in watched for kind in account.counts}
    late = {_place(account, kinds) for account in watched if account.age >= limit}
    moving = {_place(account, kinds) for account in watched if account.age < limit}
    return any(all(_is_ahead(place, other) for place in moving) for other in late)


# The numbers of a process's calls of each kind that it takes part in.
_Place = frozenset[tuple[str, int]]


def _place(account: Account, kinds: Iterable[str]) -> _Place:
    mine = (kind for kind in kinds if account.index in _group(kind))
    return frozenset((kind, account.counts.get(kind, 0)) for kind in mine)


def _is_ahead(place: _Place, other: _Place) -> bool:
    theirs = dict(other)
    pairs = [(n, theirs[kind]) for kind, n in place if kind in theirs]
    return all(a >= b for a, b in pairs) and any(a > b for a, b in pairs)


@functools.lru_cache(maxsize=1024)
def _group(kind: str) -> frozenset[int]:
    """The processes of a kind of calls, such as `programs 0:4:1`."""
    return frozenset(members(kind.partition(" ")[2]))


def findings(accounts: Sequence[Account]) -> list[str]:
    """Oddities of some of the processes, the most telling first."""
    watched = [account for account in accounts if account.state not in GONE]
    present = [account for account in accounts if account.state != "absent"]
    oddities = [
        *_absent(accounts),
        *_silent(watched),
        *_differences(present),
        *_gone(accounts),
        *_behind([account for account in present if not account.silent]),
        *_in_functions(watched),
    ]
    return oddities or [*_places(watched)]


def _absent(accounts: Sequence[Account]) -> Iterator[str]:
    absent = [account.index for account in accounts if account.state == "absent"]
    if absent:
        yield f"{named(absent)} {verb('has', absent)} not come to this mylib.watch"


def _gone(accounts: Sequence[Account]) -> Iterator[str]:
    gone = (account for account in accounts if account.state in GONE)
    for why, who in by((account.index, account.news.get("why", "")) for account in gone):
        yield f"{named(who)} {verb('has', who)} left this mylib.watch{why and f' by {why}'}"


def _silent(accounts: Sequence[Account]) -> Iterator[str]:
    silent = {account.index: account.silent for account in accounts if account.silent}
    if silent:
        yield (
            f"{named([*silent])} {verb('has', silent)} not been heard of for "
            f"{min(silent.values()):.0f} s: stopped, dead, cut off, or held by a call that keeps "
            "Python's lock"
        )


def _differences(accounts: Sequence[Account]) -> Iterator[str]:
    """The first call of each kind that is another one in some processes."""
    recorded = {account.index: account.calls for account in accounts if account.record}
    for kind in sorted({kind for calls in recorded.values() for kind, _ in calls}):
        for n in sorted({n for calls in recorded.values() for other, n in calls if other == kind}):
            made = {i: calls[kind, n] for i, calls in recorded.items() if (kind, n) in calls}
            told = by((i, call.text) for i, call in made.items())
            if len(told) == 1:
                told = by((i, f"{call.text} {call.arguments}") for i, call in made.items())
            if len(told) > 1:
                texts = ", but ".join(f"{text} in {named(who)}" for text, who in told[:3])
                yield f"call {n} of {named(sorted(_group(kind)))} is {texts}"
                break


def _behind(accounts: Sequence[Account]) -> Iterator[str]:
    kinds = {kind for account in accounts for kind in account.counts}
    for kind in sorted(kinds, key=lambda kind: [*_NAMES].index(kind.partition(" ")[0])):
        group = [account for account in accounts if account.index in _group(kind)]
        most = max(account.counts.get(kind, 0) for account in group)
        first = [account for account in group if account.counts.get(kind, 0) == most]
        for count, who in by((account.index, account.counts.get(kind, 0)) for account in group):
            if count < most:
                have = verb("has", who)
                made = [calls.get((kind, count + 1)) for calls in (a.calls for a in first)]
                texts = [call.text for call in made if call]
                what = f", and {have} not made {texts[0]}" if texts else ""
                if kind.startswith("meetings"):
                    waits = [wait for a in first for wait, _ in a.record.get("waits", ())]
                    what = f", and {have} not come to compare ({waits[0]})" if waits else ""
                calls = counted(most - count, _NAMES[kind.partition(" ")[0]])
                others = named([account.index for account in first])
                places = {_place_of(account) for account in group if account.index in who}
                they = "it is" if len(who) == 1 else "they are"
                at = f": {they} {places.pop()}" if len(places) == 1 else ""
                yield f"{named(who)} {verb('is', who)} {calls} behind {others}{what}{at}"


_NAMES = {
    "programs": "call",
    "placements": "placement",
    "meetings": "comparison",
    "steps": "step",
    "batches": "batch",
}


def _in_functions(accounts: Sequence[Account]) -> Iterator[str]:
    for where, who in by((account.index, account.told("callback")) for account in accounts):
        yield f"a callback of {named(who)} has not returned: it is at {where}"
    for where, who in by((account.index, account.told("loader")) for account in accounts):
        yield f"the loader of {named(who)} has not made its next batch: it is at {where}"


def _places(accounts: Sequence[Account]) -> Iterator[str]:
    """Where they are, those first that do not wait for what mylib knows of."""

    def waits(account: Account) -> bool:
        return any(account.told(what) for what in ("starting", "in_jax", "waits"))

    ordered = sorted(accounts, key=waits)
    for where, who in by((account.index, _place_of(account)) for account in ordered)[:_PLACES]:
        yield f"{named(who)} {verb('is', who)} {where}"


def _place_of(account: Account) -> str:
    starting = account.told("starting")
    return f"starting {starting}" if starting else f"at {account.news.get('at')}"


def by(pairs: Iterable[tuple[int, Key | None]]) -> list[tuple[Key, list[int]]]:
    """The processes by something, for those that have it."""
    by_value: dict[Key, list[int]] = {}
    for index, value in pairs:
        if value is not None:
            by_value.setdefault(value, []).append(index)
    return list(by_value.items())


def verb(word: str, who: Collection[int]) -> str:
    """A word, as it is said of these processes."""
    return word if len(who) == 1 else _SEVERAL.get(word, word)


_SEVERAL = {"is": "are", "was": "were", "has": "have", "waits": "wait", "its": "their"}

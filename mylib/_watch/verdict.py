"""Finds out who is stuck, and how it differs from the others, from what each process has told."""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .._processes import members, named
from .._text import counted

# Name at most this many places.
_PLACES = 4
# The status of a process that is no longer watched.
GONE = ("left", "ended")


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
    news: dict[str, Any] = field(default_factory=dict)
    # What it tells if it is stuck: its last calls, what it waits for, stacks.
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def counts(self) -> Mapping[str, int]:
        return self.news.get("counts", {})

    @property
    def calls(self) -> Mapping[tuple[str, int], str]:
        """Its last calls: their names and lines."""
        return {(kind, n): text for kind, n, text, *_ in self.record.get("calls", ())}

    @property
    def programs(self) -> Mapping[tuple[str, int], str]:
        """Their digests, which differ from those of others with the same name and line."""
        return {(kind, n): about for kind, n, about in self.record.get("programs", ()) if about}


def is_stuck(accounts: Sequence[Account], limit: float) -> bool:
    """Whether a process is stalled for `limit` seconds, and nobody it may wait for is moving.

    It may wait for each process that has not made more calls than itself.
    """
    watched = [x for x in accounts if x.state not in GONE]
    kinds = {kind for x in watched for kind in x.counts}
    late = {_place(x, kinds) for x in watched if x.age >= limit}
    moving = {_place(x, kinds) for x in watched if x.age < limit}
    return any(all(_is_ahead(place, x) for place in moving) for x in late)


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
    watched = [x for x in accounts if x.state not in GONE]
    present = [x for x in accounts if x.state != "absent"]
    oddities = [
        *_absent(accounts),
        *_silent(watched),
        *_differences(present),
        *_gone(accounts),
        *_behind([x for x in present if not x.silent]),
        *_in_functions(watched),
    ]
    return oddities or [*_places(watched)]


def _absent(accounts: Sequence[Account]) -> Iterator[str]:
    absent = [x.index for x in accounts if x.state == "absent"]
    if absent:
        yield f"{named(absent)} {verb('has', absent)} not come to this mylib.watch"


def _gone(accounts: Sequence[Account]) -> Iterator[str]:
    for why, who in by(accounts, lambda x: x.news.get("why", "") if x.state in GONE else None):
        yield f"{named(who)} {verb('has', who)} left this mylib.watch{why and f' by {why}'}"


def _silent(accounts: Sequence[Account]) -> Iterator[str]:
    silent = [x for x in accounts if x.silent]
    if silent:
        seconds = min(x.silent for x in silent)
        who = [x.index for x in silent]
        yield (
            f"{named(who)} {verb('has', who)} not been heard of for {seconds:.0f} s: stopped, "
            "dead, cut off, or held by a call that keeps Python's lock"
        )


def _differences(accounts: Sequence[Account]) -> Iterator[str]:
    """The first call of each kind that is another one in some processes."""
    recorded = [(x, x.calls) for x in accounts if x.record]
    kinds = sorted({kind for _, calls in recorded for kind, _ in calls})
    for kind in kinds:
        numbers = sorted({n for _, calls in recorded for k, n in calls if k == kind})
        for n in numbers:
            by_text = by(accounts, lambda x, n=n, kind=kind: x.calls.get((kind, n)))
            by_program = by(accounts, lambda x, n=n, kind=kind: x.programs.get((kind, n)))
            if len(by_text) == 1 and len(by_program) > 1:
                by_text = [(f"{by_text[0][0]} ({about})", who) for about, who in by_program]
            if len(by_text) > 1:
                texts = ", but ".join(f"{text} in {named(who)}" for text, who in by_text[:3])
                yield f"call {n} of {named(sorted(_group(kind)))} is {texts}"
                break


def _behind(accounts: Sequence[Account]) -> Iterator[str]:
    kinds = {kind for x in accounts for kind in x.counts}
    for kind in sorted(kinds, key=lambda kind: [*_NAMES].index(kind.partition(" ")[0])):
        group = [x for x in accounts if x.index in _group(kind)]
        most = max(x.counts.get(kind, 0) for x in group)
        first = [x for x in group if x.counts.get(kind, 0) == most]
        for count, who in by(group, lambda x, kind=kind: x.counts.get(kind, 0)):
            if count < most:
                have = verb("has", who)
                texts = {x.calls.get((kind, count + 1)) for x in first} - {None}
                what = f", and {have} not made {texts.pop()}" if texts else ""
                if kind.startswith("meetings"):
                    waits = [w for x in first for w, _ in x.record.get("waits", ())]
                    what = f", and {have} not come to compare ({waits[0]})" if waits else ""
                calls = counted(most - count, _NAMES[kind.partition(" ")[0]])
                others = named([x.index for x in first])
                places = {_place_of(x) for x in group if x.index in who}
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
    for where, who in by(accounts, lambda x: x.record.get("callback") or None):
        yield f"a callback of {named(who)} has not returned: it is at {where}"
    for where, who in by(accounts, lambda x: x.record.get("loader") or None):
        yield f"the loader of {named(who)} has not made its next batch: it is at {where}"


def _places(accounts: Sequence[Account]) -> Iterator[str]:
    """Where they are, those first that do not wait for what mylib knows of."""

    def waits(x: Account) -> bool:
        return bool(x.record and (x.record["starting"] or x.record["in_jax"] or x.record["waits"]))

    for where, who in by(sorted(accounts, key=waits), _place_of)[:_PLACES]:
        yield f"{named(who)} {verb('is', who)} {where}"


def _place_of(x: Account) -> str:
    starting = x.record.get("starting")
    return f"starting {starting}" if starting else f"at {x.news.get('at')}"


def by(accounts: Iterable[Account], key: Any) -> list[tuple[Any, list[int]]]:
    """The processes by something, for those that have it."""
    by_value: dict[Any, list[int]] = {}
    for x in accounts:
        value = key(x)
        if value is not None:
            by_value.setdefault(value, []).append(x.index)
    return list(by_value.items())


def verb(word: str, who: Sequence[Any]) -> str:
    """A word, as it is said of these processes."""
    return word if len(who) == 1 else _SEVERAL.get(word, word)


_SEVERAL = {"is": "are", "was": "were", "has": "have", "waits": "wait", "its": "their"}

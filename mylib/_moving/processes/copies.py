"""The copies of shards that processes hold, and the faults if they differ."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from ..._core.errors import Fault
from ..._core.text import in_short
from .coordination import Processes
from .differences import Facts, Versions, names_in, texts_of, unexamined
from .groups import named, text_of

FIX = "make it from the same numbers in every process, or place the values of one of them again"
_FIX_TREE = "give all processes the same tree, with its arrays at the same places"

# The ids of this process's devices that hold copies of a shard, by the copies' checksums.
Held = dict[str, list[int]]


@dataclass
class Copies:
    """One process's data about an array: its shards that have copies, by number."""

    what: str
    shape: tuple[int, ...]
    request: str
    processes: Processes
    held: dict[int, Held]
    # The processes that hold each shard.
    holders: Mapping[int, Processes]

    @property
    def odd(self) -> list[int]:
        """The shards whose copies differ within this process."""
        return [number for number, held in self.held.items() if len(held) > 1]


def facts_of(copies: Mapping[str, Copies], everybody: Processes) -> Facts:
    """The facts that processes must agree on: their arrays, and the copies of each shard."""
    facts: dict[Processes, dict[str, str]] = {}

    def add(group: Processes, name: str, text: str) -> None:
        values = facts.setdefault(group, {})
        values[name] = f"{values.get(name, '')} {text}"

    for name, x in copies.items():
        add(x.processes, name, x.what)
        for number, held in x.held.items():
            add(x.holders[number], name, f"{number}: {', '.join(held)}")
        for number in x.odd:
            # Make this digest unique, so that the difference is reported.
            for group in dict.fromkeys((x.holders[number], everybody)):
                add(group, name, f"{number} differs in process {jax.process_index()}")
    return {group: values for group, values in facts.items() if len(group) > 1}


def details(copies: Mapping[str, Copies], everybody: Processes, group: Processes) -> dict[str, Any]:
    """The arrays, and the copies of shards that are held by the group."""
    arrays: dict[str, Any] = {}
    for name, x in copies.items():
        numbers = [n for n, holders in x.holders.items() if holders == group]
        numbers += x.odd if group == everybody else []
        held = {number: x.held[number] for number in numbers}
        arrays[name] = [x.what, x.shape, x.request, text_of(x.processes), held]
    return arrays


def faults_in(fix: str, versions: Versions) -> Iterator[Fault]:
    """The faults in the details of all."""
    for name in dict.fromkeys(name for answers in versions.values() for name in names_in(answers)):
        yield from list(_different_arrays(name, versions)) or _different_copies(fix, name, versions)


def _different_arrays(name: str, versions: Versions) -> Iterator[Fault]:
    # Different groups of processes may have different arrays of that name.
    for group, answers in versions.items():
        arrays = [x[name] for x in answers.values() if name in x and x[name][3] == text_of(group)]
        values = {who: x.get(name, ["no array of that name"])[0] for who, x in answers.items()}
        if arrays and (texts := texts_of(group, values)):
            reason = f"it is not the same array in all processes: {texts}"
            _, shape, request, *_ = arrays[0]
            yield Fault(name, tuple(shape), request, reason, _FIX_TREE)


def _different_copies(fix: str, name: str, versions: Versions) -> Iterator[Fault]:
    # For each shard and each of its values, what holds it.
    values: dict[str, dict[str, dict[str, None]]] = {}
    more: dict[str, list[str]] = {}
    array: list[Any] = []
    for group, answers in versions.items():
        for processes, facts in answers.items():
            array = array or facts.get(name, [])
            for number, held in facts[name][-1].items() if name in facts else ():
                more[number] = more.get(number) or unexamined(group, answers)
                for value, ids in held.items():
                    holders = _holders(ids, processes)
                    values.setdefault(number, {}).setdefault(value, {})[holders] = None
    differing = [number for number, by_value in values.items() if len(by_value) > 1]
    if differing:
        number, *others = differing
        first = values[number]
        texts = "; ".join([*(" and ".join(holders) for holders in first.values()), *more[number]])
        differ = "differs" if len(others) == 1 else "differ"
        more_shards = f" (and {len(others)} more of its shards {differ})" if others else ""
        reason = f"there are {len(first)} values of it: {texts}{more_shards}"
        _, shape, request, *_ = array
        yield Fault(name, tuple(shape), request, reason, fix)


def _holders(ids: list[int], alike: Processes) -> str:
    if len(alike) > 1:
        return f"{named(alike)} on all their devices that hold it"
    return f"{named(alike)} on device{'s' * (len(ids) > 1)} {in_short(sorted(ids))}"

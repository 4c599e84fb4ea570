"""Finds what differs between processes, in one meeting or two.

At the first one each process sends digests. Only if they differ is there a second one, at which
only the first of the processes that sent the same digest sends the details. So what is sent hardly
grows with the number of processes, and what all of them read is limited.
"""

import base64
import functools
import json
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, replace
from typing import Any, NamedTuple

import jax

from ..._core.errors import Fault, because
from ..._core.text import abridged, apart, counted
from .coordination import Processes
from .groups import digest, members, named, text_of
from .meeting import Continued, Meet

# Values that must be equal in all processes of a group, by name.
Facts = Mapping[Processes, Mapping[str, Any]]

# Compare at most this many groups, and this many versions of each group's facts.
_GROUPS = 8
_VERSIONS = 8
# Describe at most this many faults; of the others, name only the leaves.
_DESCRIBED = 100
# Send at most this many characters of each text to other processes.
_CHARACTERS = 8000

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_SAME = "the same in all processes"
FIX = (
    "make it in the same way, from the same numbers, in every process; where it is meant to "
    "differ, place with check=False"
)


# Stands for the faults that processes have found, beside groups of processes.
_FAULTS = "faults"


class Difference(NamedTuple):
    """Where processes differ. Groups of processes are texts, as `text_of` writes them.

    `versions` are, for each group whose facts differ, its processes with the same facts. If a
    process has found a fault, they are those that have found the same ones, and nothing else.
    `more_groups` is the number of other groups whose facts differ. `of_values` is whether these
    are all equal, and the values aren't.
    """

    versions: dict[str, list[str]]
    more_groups: int
    of_values: bool = False

    @property
    def is_known(self) -> bool:
        """Whether all processes have found the same faults: there is no second meeting."""
        return len(self.versions.get(_FAULTS, ())) == 1


# For each group, the facts of its processes, as the first of those with the same describes them.
Versions = Mapping[Processes, Mapping[Processes, Mapping[str, Any]]]
# Finds faults, given how to fix them.
Examine = Callable[[str, Versions], Iterable[Fault]]


def everybodys_faults(
    meet: Meet, faults: Sequence[Fault], facts: Facts, fix: str = FIX
) -> list[Fault]:
    """The faults that any process has found, and one, with this `fix`, for each fact that differs
    within its group. All processes get the same list.
    """
    difference = compare(meet, faults, facts)
    return [] if difference is None else faults_in_full(meet, difference, faults, facts, fix)


def compare(
    meet: Meet, faults: Sequence[Fault], facts: Facts, values: Facts | None = None
) -> Difference | None:
    """None if no process has found a fault, and each fact is equal within its group, and each value
    where all of the group have it.
    """

    def judge(messages: dict[int, str]) -> str:
        difference = difference_of({i: json.loads(text) for i, text in messages.items()})
        decision = json.dumps(difference)
        return decision if difference is None or difference.is_known else Continued(decision)

    decision = json.loads(meet(json.dumps(in_brief(faults, facts, values)), judge))
    return None if decision is None else Difference(*decision)


def in_brief(faults: Sequence[Fault], facts: Facts, values: Facts | None = None) -> dict[str, Any]:
    texts = [json.dumps(astuple(fault)) for fault in map(_without_addresses, faults)]
    found = digest(texts) if faults else ""
    return {"faults": found, "sums": _digests(facts), "values": _digests(values or {})}


def _digests(facts: Facts) -> dict[str, str]:
    return {text_of(group): digest(sorted(values.items())) for group, values in facts.items()}


def _without_addresses(fault: Fault) -> Fault:
    """The `repr` of a rule or a static field may contain an address, which differs everywhere."""
    texts = {name: text for name, text in vars(fault).items() if isinstance(text, str)}
    return replace(fault, **{name: _ADDRESS.sub("", text) for name, text in texts.items()})


def difference_of(brief: Mapping[int, Mapping[str, Any]]) -> Difference | None:
    """Compares what the processes have sent `in_brief`."""
    if any(b["faults"] for b in brief.values()):
        # A process with faults may not know yet what it would place.
        return Difference({_FAULTS: _alike({i: b["faults"] for i, b in brief.items()})}, 0)
    return _difference_in("sums", brief) or _difference_in("values", brief)


def _difference_in(kind: str, brief: Mapping[int, Mapping[str, Any]]) -> Difference | None:
    groups = dict.fromkeys(group for b in brief.values() for group in b[kind])
    sums = {
        group: {i: brief[i][kind].get(group) for i in members(group) if i in brief}
        for group in groups
    }
    differing = [group for group, by_process in sums.items() if len(set(by_process.values())) > 1]
    of_values = kind == "values"
    if of_values:  # a process whose last call was interrupted may not have looked at them yet
        differing = [group for group in differing if None not in sums[group].values()]
    if not differing:
        return None
    differing.sort(key=lambda group: -len(sums[group]))
    versions = {group: _alike(sums[group]) for group in differing[:_GROUPS]}
    return Difference(versions, len(differing) - len(versions), of_values)


def disagreements(fix: str, versions: Versions) -> Iterable[Fault]:
    """A fault for each fact that differs."""
    faults: dict[Fault, None] = {}
    for group, answers in versions.items():
        for name in names_in(answers):
            values = {who: x.get(name, "nothing of that name") for who, x in answers.items()}
            if texts := texts_of(group, values):
                faults[Fault(name, None, _SAME, f"it differs between them: {texts}", fix)] = None
    return faults


def faults_in_full(
    meet: Meet,
    difference: Difference,
    faults: Sequence[Fault],
    facts: Facts,
    fix: str = FIX,
    examine: Examine = disagreements,
) -> list[Fault]:
    """The faults that processes have found or, if there are none, those that `examine` finds in
    their facts. All processes get the same list.
    """
    faults = list(map(_without_addresses, faults))
    if difference.is_known:
        return faults
    mine = message(jax.process_index(), difference, faults, facts)
    return read(meet(mine, functools.partial(judge, difference, fix, examine)))


def message(me: int, difference: Difference, faults: Sequence[Fault], facts: Facts) -> str:
    """The message of process `me` to the second meeting; empty for most."""
    by_group = {
        text_of(group): {_told(name): _told(value) for name, value in values.items()}
        for group, values in facts.items()
    }
    by_group[_FAULTS] = {"": [{k: _told(v) for k, v in vars(x).items()} for x in faults]}
    mine = {
        group: by_group.get(group, {})
        for group, versions in difference.versions.items()
        if any(members(alike)[0] == me for alike in versions)
    }
    return _packed(mine) if mine else ""


def _told(value: Any) -> Any:
    """A text of the user's may have any length. Those that differ later on stay different."""
    text = value if isinstance(value, str) else ""
    short = abridged(text, _CHARACTERS)
    return value if short == text else f"{short} (checksum {digest(text)[:8]})"


def judge(difference: Difference, fix: str, examine: Examine, messages: Mapping[int, str]) -> str:
    """What all processes `read`, from the messages of all."""
    full = {index: _unpacked(text) for index, text in messages.items() if text}
    versions = {
        group: {tuple(members(x)): full[members(x)[0]][group] for x in alike}
        for group, alike in difference.versions.items()
    }
    if _FAULTS in versions:
        return _packed(_with_their_finders(versions[_FAULTS], len(messages)))
    faults = examine(fix, {tuple(members(group)): answers for group, answers in versions.items()})
    return _packed([asdict(fault) for fault in _shortened(list(faults), difference.more_groups)])


def read(judgement: str) -> list[Fault]:
    faults = [Fault(**fields) for fields in _unpacked(judgement)]
    # JSON has no tuples.
    return [replace(x, shape=None if x.shape is None else tuple(x.shape)) for x in faults]


def _alike(values: Mapping[int, Any]) -> list[str]:
    """The processes with equal values: the first few groups of them."""
    by_value: dict[Any, list[int]] = {}
    for index in sorted(values):
        by_value.setdefault(values[index], []).append(index)
    return [text_of(tuple(indices)) for indices in list(by_value.values())[:_VERSIONS]]


def _with_their_finders(
    versions: Mapping[Processes, Mapping[str, list[Any]]], count: int
) -> list[dict[str, Any]]:
    """The faults that processes have found, and which of the `count` processes did."""
    finders: dict[str, list[int]] = {}
    for processes, faults in versions.items():
        for fault in dict.fromkeys(map(json.dumps, faults[""])):
            finders.setdefault(fault, []).extend(processes)
    merged = [json.loads(fault) for fault in finders]
    for fault, by in zip(merged, finders.values(), strict=True):
        if len(by) < count:
            fault["request"] += f" (in {named(sorted(by))})"
    if left := count - sum(map(len, versions)):
        have = "has" if left == 1 else "have"
        reason = f"{counted(left, 'more process')} {have} found others, which are not listed"
        merged.append(asdict(because(reason, "fix those that are listed first", _SAME)))
    return merged


def names_in(versions: Mapping[Processes, Mapping[str, Any]]) -> Iterable[str]:
    return dict.fromkeys(name for facts in versions.values() for name in facts)


def texts_of(group: Processes, values: Mapping[Processes, str]) -> str:
    """Each value, with the processes that have it; empty if all of the group have the same."""
    by_value: dict[str, list[int]] = {}
    for processes, value in values.items():
        by_value.setdefault(value, []).extend(processes)
    texts = [f"{named(sorted(by))}: {value}" for value, by in by_value.items()]
    told = "; ".join([*texts, *unexamined(group, values)]) if len(texts) > 1 else ""
    return told + apart(*by_value) if len(by_value) == 2 else told


def unexamined(group: Processes, examined: Iterable[Processes]) -> list[str]:
    """How many of the group's processes have other versions, which are not examined, as text."""
    left = len(group) - sum(map(len, examined))
    differ = "differs" if left == 1 else "differ"
    return [f"{counted(left, 'more process')} {differ} from all of these"] if left else []


def _shortened(faults: list[Fault], more_groups: int) -> list[Fault]:
    brief = f"it differs between processes; only the first {_DESCRIBED} such faults are described"
    faults[_DESCRIBED:] = [replace(fault, reason=brief) for fault in faults[_DESCRIBED:]]
    if more_groups:
        reason = f"values differ within {counted(more_groups, 'more group')} of processes"
        faults.append(because(reason, "fix those that are listed first", _SAME))
    return faults


def _packed(x: Any) -> str:
    """Faults and facts repeat most of their text for each leaf: compressed, a leaf takes about as
    much as a digest of it.
    """
    return base64.b64encode(zlib.compress(json.dumps(x).encode())).decode()


def _unpacked(text: str) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(text)))

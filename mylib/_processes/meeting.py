"""What processes tell each other on the host, without their devices.

They meet at JAX's coordination service: each says something, one judges, all hear the judgement. A
process that doesn't come is named after a while; nobody waits for it for ever.
"""

import dataclasses
import functools
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from .._compat import CoordinationClient, coordination_client, names
from .._errors import Fault

# By their indices, in order.
Processes = tuple[int, ...]
# What has to be the same in all of some processes: a name and what is said of it.
Facts = Mapping[Processes, Mapping[str, str]]
# What one process makes of what all have said.
Judge = Callable[[dict[int, str]], str]
# Says something to the other processes, and returns what one of them makes of it all.
Meet = Callable[[str, Judge], str]

# As long as JAX itself waits for processes to start and to end. Hosts that read a checkpoint, or
# compile for the first time, are minutes apart.
_DEFAULT_TIMEOUT = 300.0


@dataclasses.dataclass
class _Meetings:
    """How often some processes have met for a purpose, and how often in vain since the last time:
    all of them have met as often, since nobody meets alone.
    """

    turn: int = 0
    attempt: int = 0
    # One thread at a time.
    lock: Any = dataclasses.field(default_factory=threading.Lock)


_meetings: dict[tuple[str, Processes], _Meetings] = {}

_MEND = (
    "make it in the same way, from the same numbers, in every process; where it is meant to "
    "differ, place with check=False"
)


def exchange(
    purpose: str,
    mine: str,
    processes: Processes,
    judge: Judge,
    *,
    timeout: float | None = None,
    alone: bool = False,
) -> str:
    """Every one of `processes` says something; what one of them makes of it is what all get. They
    meet with those who come for the same purpose. If this one may have come `alone`, calls of the
    others that come later do not fail because of it.

    `judge` is called in one process only. It must not raise: the others wait for it.
    """
    if len(processes) == 1:
        return judge({processes[0]: mine})
    client = coordination_client()
    if client is None:
        raise RuntimeError(
            "the processes can't talk to each other: call jax.distributed.initialize() at the "
            "start of each, or place with check=False"
        )
    timeout = patience() if timeout is None else timeout
    meetings = _meetings.setdefault((purpose, processes), _Meetings())
    with meetings.lock:
        place = f"mylib/{purpose}/{digest(processes)}"
        here = _meet(client, place, meetings, mine, processes, timeout, alone)
        if here is None:
            said = _listed(client, f"{place}/{meetings.turn}/{meetings.attempt - 1}/said")
            raise TimeoutError(_nobody_came(purpose, processes, said, timeout))
        if jax.process_index() != processes[0]:
            return client.blocking_key_value_get(f"{here}/judgement", int(timeout * 1000))
        judgement = judge(_listed(client, f"{here}/said"))
        client.key_value_set(f"{here}/judgement", judgement)
        # Whoever is here has heard all that was judged before.
        client.key_value_delete(f"{place}/{meetings.turn - 2}/")
        return judgement


def _meet(
    client: CoordinationClient,
    place: str,
    meetings: _Meetings,
    mine: str,
    processes: Processes,
    timeout: float,
    alone: bool,
) -> str | None:
    """Says something, and waits for the others. Returns where that was, or None if some of them did
    not come.
    """
    deadline = time.monotonic() + timeout
    while True:
        here = f"{place}/{meetings.turn}/{meetings.attempt}"
        if alone:
            client.key_value_set(f"{here}/alone/{jax.process_index()}", "")
        client.key_value_set(f"{here}/said/{jax.process_index()}", mine)
        left = max(1, int(1000 * (deadline - time.monotonic())))
        try:
            client.wait_at_barrier(here, left, list(processes))
        except jax.errors.JaxRuntimeError as error:
            if names.TEXT_DEADLINE not in str(error):
                raise
            meetings.attempt += 1
            if time.monotonic() >= deadline:
                return None
            # The others have given up here, maybe before this process came, and so their calls have
            # failed. Then this one fails, too, unless one of them has tried again since, or none of
            # them had come for this call.
            others = _listed(client, f"{here}/said").keys() - {jax.process_index()}
            came_for_it = others - _listed(client, f"{here}/alone").keys()
            tried_again = _listed(client, f"{place}/{meetings.turn}/{meetings.attempt}/said")
            if not tried_again and (came_for_it or not others):
                return None
        else:
            meetings.turn, meetings.attempt = meetings.turn + 1, 0
            return here


def gather(
    purpose: str, mine: Any, processes: Processes, *, timeout: float | None = None
) -> list[Any]:
    """What each of the processes says, in their order, for all of them; as JSON."""

    def judge(said: dict[int, str]) -> str:
        return f"[{', '.join(said[index] for index in processes)}]"

    return json.loads(exchange(purpose, json.dumps(mine), processes, judge, timeout=timeout))


def meeting(purpose: str, processes: Processes, *, alone: bool = False) -> Meet:
    """`exchange` between those who come for one purpose."""
    return lambda mine, judge: exchange(purpose, mine, processes, judge, alone=alone)


def everybodys_faults(
    meet: Meet, faults: Sequence[Fault], facts: Facts, mend: str = _MEND
) -> list[Fault]:
    """The faults that any of the processes has found, and one for each fact that is not the same in
    all that it is about, to be mended so. All of them get the same.

    At first only checksums are exchanged: mostly there is nothing to tell.
    """
    if all_agree(meet, bool(faults), facts):
        return []
    return faults_in_full(meet, faults, facts, mend)


def all_agree(meet: Meet, faulty: bool, facts: Facts) -> bool:
    """Whether no process is `faulty`, and each fact is the same in all that it is about."""
    return meet(json.dumps(in_brief(faulty, facts)), _judge_briefly) == "fine"


def in_brief(faulty: bool, facts: Facts) -> dict[str, Any]:
    sums = {_text(group): digest(sorted(said.items())) for group, said in facts.items()}
    return {"faulty": faulty, "sums": sums}


def faults_in_full(
    meet: Meet, faults: Sequence[Fault], facts: Facts, mend: str = _MEND
) -> list[Fault]:
    told = {_text(group): dict(said) for group, said in facts.items()}
    full = {"faults": [dataclasses.asdict(fault) for fault in faults], "facts": told}
    judge = functools.partial(_judge, mend)
    return [_fault(told) for told in json.loads(meet(json.dumps(full), judge))]


def _fault(told: dict[str, Any]) -> Fault:
    # JSON has no tuples.
    shape = told["shape"]
    return Fault(**{**told, "shape": None if shape is None else tuple(shape)})


def _judge_briefly(said: dict[int, str]) -> str:
    return "fine" if all_fine({i: json.loads(text) for i, text in said.items()}) else "faulty"


def all_fine(brief: Mapping[int, Mapping[str, Any]]) -> bool:
    """Whether nobody has found a fault, and all facts agree; from what each says `in_brief`."""
    if any(b["faulty"] for b in brief.values()):
        return False
    groups = {group for b in brief.values() for group in b["sums"]}
    return all(
        len({brief[index]["sums"].get(group) for index in _members(group) if index in brief}) == 1
        for group in groups
    )


def _judge(mend: str, said: dict[int, str]) -> str:
    full = {index: json.loads(text) for index, text in sorted(said.items())}
    finders: dict[str, list[int]] = {}
    for index, f in full.items():
        for fault in dict.fromkeys(map(json.dumps, f["faults"])):
            finders.setdefault(fault, []).append(index)
    if finders:
        # Who has found some may not have come as far as to know what it would place.
        return json.dumps(
            [
                fault if len(found_by) == len(full) else _attributed(fault, found_by)
                for fault, found_by in ((json.loads(text), by) for text, by in finders.items())
            ]
        )
    faults: dict[str, dict[str, Any]] = {}
    groups = dict.fromkeys(group for f in full.values() for group in f["facts"])
    for group in groups:
        members = {i: full[i]["facts"].get(group, {}) for i in _members(group) if i in full}
        for name in dict.fromkeys(name for facts in members.values() for name in facts):
            values = {i: facts.get(name) for i, facts in members.items()}
            if len(set(values.values())) > 1:
                fault = dataclasses.asdict(_disagreement(name, values, mend))
                faults[json.dumps(fault)] = fault
    return json.dumps(list(faults.values()))


def _attributed(fault: dict[str, Any], found_by: Sequence[int]) -> dict[str, Any]:
    """A fault that some of the processes have found, and others not."""
    return {**fault, "request": f"{fault['request']} (in {named(found_by)})"}


def _disagreement(name: str, values: Mapping[int, str | None], mend: str) -> Fault:
    by_value: dict[str | None, list[int]] = {}
    for index, value in values.items():
        by_value.setdefault(value, []).append(index)
    told = "; ".join(
        f"{named(indices)}: {'nothing of that name' if value is None else value}"
        for value, indices in by_value.items()
    )
    return Fault(name, None, "the same in all processes", f"it differs between them: {told}", mend)


def _listed(client: CoordinationClient, place: str) -> dict[int, str]:
    """What each process has put there."""
    return {
        int(key.rsplit("/", 1)[1]): value for key, value in client.key_value_dir_get(f"{place}/")
    }


def _nobody_came(
    purpose: str, processes: Processes, said: Mapping[int, str], timeout: float
) -> str:
    missing = [index for index in processes if index not in said]
    others = [index for index in processes if index != jax.process_index()]
    if missing:
        what = f"{named(missing)} did not come within {timeout:g} s to compare ({purpose})"
    else:
        what = (
            f"this process came too late to compare ({purpose}): {named(others)} had waited for "
            "it, and given up"
        )
    return (
        f"{what}. Every process with devices of the mesh has to make the same calls in the same "
        "order. If one is slow, set MYLIB_EXCHANGE_TIMEOUT to more seconds; if it makes no such "
        "call, place with check=False"
    )


def everybody() -> Processes:
    return tuple(range(jax.process_count()))


def processes_of(devices: Iterable[Any]) -> Processes:
    return tuple(sorted({device.process_index for device in devices}))


def patience() -> float:
    return float(os.environ.get("MYLIB_EXCHANGE_TIMEOUT", _DEFAULT_TIMEOUT))


def digest(x: Any) -> str:
    return hashlib.blake2b(json.dumps(x).encode(), digest_size=16).hexdigest()


def _text(processes: Processes) -> str:
    return ",".join(map(str, processes))


def _members(group: str) -> list[int]:
    return [int(index) for index in group.split(",")]


def named(indices: Sequence[int]) -> str:
    return f"process{'es' * (len(indices) > 1)} {', '.join(map(str, indices))}"

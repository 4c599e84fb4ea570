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

from ._errors import Fault
from ._world import coordination_client

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

# Who comes to a meeting that the others have given up is told so at once.
_AT_ONCE = 0.1

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
) -> str:
    """Every one of `processes` says something; what one of them makes of it is what all get. They
    meet with those who come for the same purpose.

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
        here = _meet(client, place, meetings, mine, processes, timeout)
        if here is None:
            said = _said(client, f"{place}/{meetings.turn}/{meetings.attempt - 1}")
            raise TimeoutError(_nobody_came(purpose, processes, said, timeout))
        if jax.process_index() != processes[0]:
            return client.blocking_key_value_get(f"{here}/judgement", int(timeout * 1000))
        judgement = judge(_said(client, here))
        client.key_value_set(f"{here}/judgement", judgement)
        # Whoever is here has heard all that was judged before.
        client.key_value_delete(f"{place}/{meetings.turn - 2}/")
        return judgement


def _meet(
    client: Any,
    place: str,
    meetings: _Meetings,
    mine: str,
    processes: Processes,
    timeout: float,
) -> str | None:
    """Says something, and waits for the others. Returns where that was, or None if some of them did
    not come.
    """
    deadline = time.monotonic() + timeout
    while True:
        here = f"{place}/{meetings.turn}/{meetings.attempt}"
        client.key_value_set(f"{here}/said/{jax.process_index()}", mine)
        start = time.monotonic()
        left = max(1, int(1000 * (deadline - start)))
        try:
            client.wait_at_barrier(here, left, list(processes))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            meetings.attempt += 1
            if time.monotonic() - start > _AT_ONCE or time.monotonic() > deadline:
                return None
            # The others have waited here in vain, for something that this process has never done.
            # They are further on by now.
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


def meeting(purpose: str, processes: Processes) -> Meet:
    """`exchange` between those who come for one purpose."""
    return lambda mine, judge: exchange(purpose, mine, processes, judge)


def everybodys_faults(
    meet: Meet, faults: Sequence[Fault], facts: Facts, mend: str = _MEND
) -> list[Fault]:
    """The faults that any of the processes has found, and one for each fact that is not the same in
    all that it is about, to be mended so. All of them get the same.

    At first only checksums are exchanged: mostly there is nothing to tell.
    """
    if meet(json.dumps(in_brief(faults, facts)), _judge_briefly) == "fine":
        return []
    return faults_in_full(meet, faults, facts, mend)


def in_brief(faults: Sequence[Fault], facts: Facts) -> dict[str, Any]:
    sums = {_text(group): digest(sorted(said.items())) for group, said in facts.items()}
    return {"faulty": bool(faults), "sums": sums}


def faults_in_full(meet: Meet, faults: Sequence[Fault], facts: Facts, mend: str) -> list[Fault]:
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
    faults = {json.dumps(fault): fault for f in full.values() for fault in f["faults"]}
    if faults:
        # Who has found some may not have come as far as to know what it would place.
        return json.dumps(list(faults.values()))
    groups = dict.fromkeys(group for f in full.values() for group in f["facts"])
    for group in groups:
        members = {i: full[i]["facts"].get(group, {}) for i in _members(group) if i in full}
        for name in dict.fromkeys(name for facts in members.values() for name in facts):
            values = {i: facts.get(name) for i, facts in members.items()}
            if len(set(values.values())) > 1:
                fault = dataclasses.asdict(_disagreement(name, values, mend))
                faults[json.dumps(fault)] = fault
    return json.dumps(list(faults.values()))


def _disagreement(name: str, values: Mapping[int, str | None], mend: str) -> Fault:
    by_value: dict[str | None, list[int]] = {}
    for index, value in values.items():
        by_value.setdefault(value, []).append(index)
    told = "; ".join(
        f"{named(indices)}: {'nothing of that name' if value is None else value}"
        for value, indices in by_value.items()
    )
    return Fault(name, None, "the same in all processes", f"it differs between them: {told}", mend)


def _said(client: Any, place: str) -> dict[int, str]:
    said = client.key_value_dir_get(f"{place}/said/")
    return {int(key.rsplit("/", 1)[1]): value for key, value in said}


def _nobody_came(
    purpose: str, processes: Processes, said: Mapping[int, str], timeout: float
) -> str:
    missing = [index for index in processes if index not in said]
    return (
        f"{named(missing or processes)} did not come within {timeout:g} s to compare ({purpose}). "
        "Every process with devices of the mesh has to make the same calls in the same order. If "
        "one is slow, set MYLIB_EXCHANGE_TIMEOUT to more seconds; if it makes no such call, place "
        "with check=False"
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

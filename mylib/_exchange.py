"""What processes tell each other on the host, without their devices.

They meet at JAX's coordination service: each says something, one judges, all hear the judgement. A
process that doesn't come is named after a while; nobody waits for it for ever.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from ._errors import Fault
from ._world import coordination_client

# By their indices, in order.
Processes = tuple[int, ...]
# What has to be the same in all of some processes: a name and what is said of it.
Facts = Mapping[Processes, Mapping[str, str]]

# As long as JAX itself waits for processes to start and to end. Hosts that read a checkpoint, or
# compile for the first time, are minutes apart.
_DEFAULT_TIMEOUT = 300.0

# How often some processes have met for a purpose.
_turns: defaultdict[tuple[str, Processes], Iterator[int]] = defaultdict(itertools.count)
_lock = threading.Lock()

_MEND = (
    "make it in the same way, from the same numbers, in every process; where it is meant to "
    "differ, place with check=False"
)


def exchange(
    purpose: str,
    mine: str,
    processes: Processes,
    judge: Callable[[dict[int, str]], str],
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
    timeout = _timeout() if timeout is None else timeout
    me, limit = jax.process_index(), int(timeout * 1000)
    with _lock:
        turn = next(_turns[purpose, processes])
    place = f"mylib/{purpose}/{_digest(processes)}"
    client.key_value_set(f"{place}/{turn}/said/{me}", mine)
    try:
        client.wait_at_barrier(f"{place}/{turn}", limit, list(processes))
    except jax.errors.JaxRuntimeError as error:
        said = _said(client, f"{place}/{turn}")
        raise TimeoutError(_nobody_came(purpose, processes, said, timeout)) from error
    if me != processes[0]:
        return client.blocking_key_value_get(f"{place}/{turn}/judgement", limit)
    judgement = judge(_said(client, f"{place}/{turn}"))
    client.key_value_set(f"{place}/{turn}/judgement", judgement)
    # Whoever is here has heard all that was judged before.
    client.key_value_delete(f"{place}/{turn - 1}/")
    return judgement


def gather(
    purpose: str, mine: Any, processes: Processes, *, timeout: float | None = None
) -> list[Any]:
    """What each of the processes says, in their order, for all of them; as JSON."""

    def judge(said: dict[int, str]) -> str:
        return f"[{', '.join(said[index] for index in processes)}]"

    return json.loads(exchange(purpose, json.dumps(mine), processes, judge, timeout=timeout))


def everybodys_faults(
    purpose: str, faults: Sequence[Fault], facts: Facts, processes: Processes
) -> list[Fault]:
    """The faults that any of the processes has found, and one for each fact that is not the same in
    all that it is about. All of them get the same.

    At first only checksums are exchanged: mostly there is nothing to tell.
    """
    sums = {_text(group): _digest(sorted(said.items())) for group, said in facts.items()}
    brief = {"faulty": bool(faults), "sums": sums}
    if exchange(purpose, json.dumps(brief), processes, _judge_briefly) == "fine":
        return []
    told = {_text(group): dict(said) for group, said in facts.items()}
    full = {"faults": [dataclasses.asdict(fault) for fault in faults], "facts": told}
    judgement = exchange(purpose, json.dumps(full), processes, _judge)
    return [
        Fault(**{**fault, "shape": fault["shape"] and tuple(fault["shape"])})
        for fault in json.loads(judgement)
    ]


def _judge_briefly(said: dict[int, str]) -> str:
    brief = {index: json.loads(text) for index, text in said.items()}
    if any(b["faulty"] for b in brief.values()):
        return "faulty"
    groups = {group for b in brief.values() for group in b["sums"]}
    alike = all(
        len({brief[index]["sums"].get(group) for index in _members(group) if index in brief}) == 1
        for group in groups
    )
    return "fine" if alike else "faulty"


def _judge(said: dict[int, str]) -> str:
    full = {index: json.loads(text) for index, text in sorted(said.items())}
    faults = {json.dumps(fault): fault for f in full.values() for fault in f["faults"]}
    groups = dict.fromkeys(group for f in full.values() for group in f["facts"])
    for group in groups:
        members = {i: full[i]["facts"].get(group, {}) for i in _members(group) if i in full}
        for name in dict.fromkeys(name for facts in members.values() for name in facts):
            values = {i: facts.get(name) for i, facts in members.items()}
            if len(set(values.values())) > 1:
                fault = dataclasses.asdict(_disagreement(name, values))
                faults[json.dumps(fault)] = fault
    return json.dumps(list(faults.values()))


def _disagreement(name: str, values: Mapping[int, str | None]) -> Fault:
    by_value: dict[str | None, list[int]] = {}
    for index, value in values.items():
        by_value.setdefault(value, []).append(index)
    told = "; ".join(
        f"{_named(indices)}: {'nothing of that name' if value is None else value}"
        for value, indices in by_value.items()
    )
    return Fault(name, None, "the same in all processes", f"it differs between them: {told}", _MEND)


def _said(client: Any, place: str) -> dict[int, str]:
    said = client.key_value_dir_get(f"{place}/said/")
    return {int(key.rsplit("/", 1)[1]): value for key, value in said}


def _nobody_came(
    purpose: str, processes: Processes, said: Mapping[int, str], timeout: float
) -> str:
    missing = [index for index in processes if index not in said]
    who = _named(missing) if missing else "another process, which had given up before,"
    return (
        f"{who} did not come within {timeout:g} s to compare ({purpose}). Every process with "
        "devices of the mesh has to make the same calls in the same order. If it is slow, set "
        "MYLIB_EXCHANGE_TIMEOUT to more seconds; if it makes no such call, place with check=False"
    )


def _timeout() -> float:
    return float(os.environ.get("MYLIB_EXCHANGE_TIMEOUT", _DEFAULT_TIMEOUT))


def _digest(x: Any) -> str:
    return hashlib.blake2b(json.dumps(x).encode(), digest_size=16).hexdigest()


def _text(processes: Processes) -> str:
    return ",".join(map(str, processes))


def _members(group: str) -> list[int]:
    return [int(index) for index in group.split(",")]


def _named(indices: Sequence[int]) -> str:
    return f"process{'es' * (len(indices) > 1)} {', '.join(map(str, indices))}"

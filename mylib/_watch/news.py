"""The messages of this process to the others, and their keys."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .._compat import CoordinationClient, names, set_once, value_at, values_by_process
from .._processes import named
from .._text import listed
from .programs import identity_of
from .record import Record, Started, ended_of
from .stacks import Thread

# Name at most this many kinds of collectives of a program.
_COLLECTIVES = 4

# The order to end; others, by number, are to tell all that a process knows of itself.
END = "end"


def news_of(record: Record, thread: Thread | None) -> dict[str, Any]:
    """The short message that each process sends regularly."""
    calls, counts = record.calls(), record.counts()
    last = f"call {calls[-1].number}, {_text(calls[-1])}" if calls else ""
    if starting := _starting(calls, counts, thread):
        kind, number, text, _ = starting
        last = f"call {number}, {text}" if kind else text
        counts |= {kind: number} if kind else {}
    return {"counts": counts, "at": thread.where() if thread else "", "last": last}


class _Starting(NamedTuple):
    """The call that has not returned."""

    kind: str
    number: int
    text: str
    program: str


def _starting(
    calls: Sequence[Started], counts: Mapping[str, int], thread: Thread | None
) -> _Starting | None:
    """On CPUs it may run the program. Its devices are unknown before it returns; they are assumed
    to be those of the last call of the same program, or else of the same function.
    """
    start = thread and thread.starts()
    if not start:
        return None
    call, line = start
    mine = identity_of(call)
    alike = [x.witness for x in calls if x.witness.identity.function == mine.function]
    same = [x for x in alike if x.identity.program == mine.program] or alike
    kinds = [x.kind for x in same if x.kind and x.name == call.wrapped.name]
    kind = kinds[-1] if kinds else ""
    text = f"{call.wrapped.name} in {line}"
    return _Starting(kind, counts.get(kind, 0) + 1, text, mine.program)


def record_of(record: Record, threads: Mapping[int, Thread], watched: int) -> dict[str, Any]:
    """The long message of a process that is stuck."""
    calls = record.calls()
    main = threads.get(watched)
    starting = _starting(calls, record.counts(), main)
    callbacks = {i: x for i, x in threads.items() if x.is_in(names.FRAMES_CALLBACK)}
    for_batch = any(wait.kind == "batches" for wait in record.waits.get(watched, ()))
    loaders = {i: x for i, x in threads.items() if for_batch and x.name == "mylib.data.prefetch"}
    shown = {"a thread of a callback": callbacks, "the loader's thread": loaders}
    stacks = {
        name: x.lines() for name, group in shown.items() for x in group.values() if x is not main
    }
    return {
        "calls": [
            (
                call.witness.kind,
                call.number,
                _text(call),
                ended,
                [] if ended else call.busy(),
                "" if ended else _communicated(call),
            )
            for call, ended in zip(calls, ended_of(calls), strict=True)
        ]
        + ([(*starting[:3], False, [], "")] if starting and starting.kind else []),
        "programs": [
            *((x.witness.kind, x.number, x.witness.identity.program) for x in calls),
            *((x.kind, x.number, x.program) for x in [starting] if x and x.kind),
        ],
        "starting": starting.text if starting else "",
        "waits": [
            (wait.what, named(wait.processes))
            for ident in (watched, *loaders)
            for wait in [*record.waits.get(ident, ())]
        ],
        "in_jax": main is not None and main.is_in_jax(),
        "callback": next((x.where() for x in callbacks.values()), ""),
        "loader": next((x.where() for i, x in loaders.items() if not record.waits.get(i)), ""),
        "stacks": ({"stack": main.lines()} if main else {}) | stacks,
    }


def _text(call: Started) -> str:
    return f"{call.witness.name} in {call.line()}"


def _communicated(call: Started) -> str:
    """The collectives of a program, if `audit` was called on it."""
    variant = call.witness.variant and call.witness.variant()
    if variant is None or variant.collectives is None:
        return ""
    kinds = (f"{x.kind} over {', '.join(x.axes or '?')}" for x in variant.collectives)
    return listed([*dict.fromkeys(kinds)], _COLLECTIVES) or "nothing"


class Bulletin:
    """Where the processes of a watch tell their news: keys of JAX's coordination service."""

    def __init__(self, client: CoordinationClient, number: int, me: int):
        self._client = client
        self._place = f"mylib/watch/{number}"
        self._me = me

    def tell(self, kind: str, content: Mapping[str, Any]) -> None:
        key = f"{self._place}/{kind}/{self._me}"
        self._client.key_value_set(key, json.dumps(content), allow_overwrite=True)

    def read(self, kind: str) -> dict[int, dict[str, Any]]:
        news = values_by_process(self._client, f"{self._place}/{kind}")
        return {index: json.loads(text) for index, text in news.items()}

    def read_one(self, kind: str, index: int) -> dict[str, Any] | None:
        text = value_at(self._client, f"{self._place}/{kind}/{index}")
        return None if text is None else json.loads(text)

    def orders(self) -> tuple[int | None, int]:
        """The process that has ended all of them, if any; and how often all were asked for their
        records.
        """
        orders = dict(self._client.key_value_dir_get(f"{self._place}/orders/"))
        ends = [int(who) for key, who in orders.items() if key.endswith(END)]
        return (ends[0] if ends else None), len(orders) - len(ends)

    def order(self, order: str) -> bool:
        """False if another process was faster."""
        return set_once(self._client, f"{self._place}/orders/{order}", str(self._me))

    def leave(self, count: int) -> None:
        """The last one deletes the keys."""
        if self._client.key_value_increment(f"{self._place}/left", 1) == count:
            self._client.key_value_delete(f"{self._place}/")

"""The messages of this process to the others, and their keys."""

import json
from collections.abc import Mapping, Sequence

from ..._core.compat import CoordinationClient, names, set_once, value_at, values_by_process
from ..._core.text import listed
from ..processes import named
from .record import Record, Started, arguments_of, ended_of
from .stacks import Thread
from .verdict import Told, ToldCall

# Name at most this many kinds of collectives of a program.
_COLLECTIVES = 4


def news_of(record: Record, thread: Thread | None) -> Told:
    """The short message that each process sends regularly."""
    calls, counts = record.calls(), record.counts()
    last = f"call {calls[-1].number}, {calls[-1].text}" if calls else ""
    if starting := _starting(calls, counts, thread):
        kind, number, text, *_ = starting
        last = f"call {number}, {text}" if kind else text
        counts |= {kind: number} if kind else {}
    return {"counts": counts, "at": thread.where() if thread else "", "last": last}


def _starting(
    calls: Sequence[Started], counts: Mapping[str, int], thread: Thread | None
) -> ToldCall | None:
    """The call that has not returned: on CPUs it may run the program. Its devices are unknown
    before it returns; they are assumed to be those of the last call of that name, and with such
    arguments.
    """
    start = thread and thread.starts()
    if not start:
        return None
    call, line = start
    name, arguments = call.wrapped.name, arguments_of(call)
    alike = [past.witness for past in calls if past.witness.kind and past.witness.name == name]
    alike = [witness for witness in alike if witness.arguments == arguments] or alike
    kind = alike[-1].kind if alike else ""
    return ToldCall(kind, counts.get(kind, 0) + 1, f"{name} in {line}", False, arguments=arguments)


def record_of(record: Record, threads: Mapping[int, Thread], watched: int) -> Told:
    """The long message of a process that is stuck."""
    calls = record.calls()
    told = [_told(*call) for call in zip(calls, ended_of(calls), strict=True)]
    main = threads.get(watched)
    starting = _starting(calls, record.counts(), main)
    if starting and starting.kind:
        told.append(starting)
    callbacks = {i: thread for i, thread in threads.items() if thread.is_in(names.FRAMES_CALLBACK)}
    for_batch = any(wait.kind == "batches" for wait in record.waits.get(watched, ()))
    loaders = {
        i: thread
        for i, thread in threads.items()
        if for_batch and thread.name == "mylib.data.prefetch"
    }
    shown = {} if main is None else {"stack": main}
    for name, group in ("a thread of a callback", callbacks), ("the loader's thread", loaders):
        for thread in group.values():
            if thread is not main:
                shown[name] = thread
    loading = (thread for i, thread in loaders.items() if not record.waits.get(i))
    return {
        "calls": told,
        "starting": starting.text if starting else "",
        "waits": [
            (wait.what, named(wait.processes))
            for ident in (watched, *loaders)
            for wait in [*record.waits.get(ident, ())]
        ],
        "in_jax": main is not None and main.is_in_jax(),
        "callback": next((thread.where() for thread in callbacks.values()), ""),
        "loader": next((thread.where() for thread in loading), ""),
        "stacks": {name: thread.lines() for name, thread in shown.items()},
    }


def _told(call: Started, has_ended: bool | None) -> ToldCall:
    witness = call.witness
    about = ([], "") if has_ended else (call.busy(), _communicated(call))
    return ToldCall(witness.kind, call.number, call.text, has_ended, *about, witness.arguments)


def _communicated(call: Started) -> str:
    """The collectives of a program, if `audit` was called on it."""
    variant = call.witness.variant and call.witness.variant()
    if variant is None or variant.collectives is None:
        return ""
    kinds = (f"{one.kind} over {', '.join(one.axes or '?')}" for one in variant.collectives)
    return listed([*dict.fromkeys(kinds)], _COLLECTIVES) or "nothing"


class Bulletin:
    """Where the processes of a watch tell their news: keys of JAX's coordination service."""

    def __init__(self, client: CoordinationClient, number: int, me: int):
        self._client = client
        self._place = f"mylib/watch/{number}"
        self._me = me

    def tell(self, kind: str, content: Told) -> None:
        key = f"{self._place}/{kind}/{self._me}"
        self._client.key_value_set(key, json.dumps(content), allow_overwrite=True)

    def read(self, kind: str) -> dict[int, Told]:
        news = values_by_process(self._client, f"{self._place}/{kind}")
        return {index: json.loads(text) for index, text in news.items()}

    def read_one(self, kind: str, index: int) -> Told | None:
        text = value_at(self._client, f"{self._place}/{kind}/{index}")
        return None if text is None else json.loads(text)

    def who_ends_all(self) -> str | None:
        """The process that has ended all of them, if any."""
        return value_at(self._client, f"{self._place}/end")

    def end_all(self) -> bool:
        """False if another process was faster."""
        return set_once(self._client, f"{self._place}/end", str(self._me))

    def leave(self, count: int) -> None:
        """The last one deletes the keys."""
        if self._client.key_value_increment(f"{self._place}/left", 1) == count:
            self._client.key_value_delete(f"{self._place}/")

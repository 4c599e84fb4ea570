"""Meetings of processes at JAX's coordination service: on the host, without their devices."""

import threading
from collections.abc import Callable
from typing import NamedTuple

import jax

from .._compat import CoordinationClient, coordination_client, names

# By their indices, in order.
Processes = tuple[int, ...]
# What one process makes of what all have said.
Judge = Callable[[dict[int, str]], str]

JUDGED = "judged"


class Conclusion(NamedTuple):
    """What came of a meeting: a word for its kind, and a text."""

    kind: str
    text: str


class Series:
    """Meetings of some processes at one place, one after the other.

    Each process says something and counts itself, and the last to come judges what all have said.
    If that one dies before it has judged, another one judges in its place. A process that gives up
    concludes a meeting as well. The first conclusion holds: all read the same one, however late
    they come.
    """

    def __init__(self, place: str, processes: Processes, me: int):
        self.place = place
        self.processes = processes
        self.turn = 0
        # One thread at a time, where several may come.
        self.lock = threading.Lock()
        self._me = me
        # The first meeting of which the service may still hold something.
        self._kept = 0

    def say(self, mine: str, judge: Judge) -> None:
        client, here = _client(), self._here()
        client.key_value_set(f"{here}/said/{self._me}", mine)
        if client.key_value_increment(f"{here}/count", 1) == len(self.processes):
            self.conclude(JUDGED, judge(self.said()))

    def hear(self, judge: Judge, seconds: float) -> Conclusion | None:
        """The conclusion; None if there is none after so many seconds."""
        conclusion = self.read(seconds)
        if conclusion is None and self._come() == len(self.processes):
            # The last to come has not judged.
            self.conclude(JUDGED, judge(self.said()))
            return self.read(seconds)
        return conclusion

    def read(self, seconds: float) -> Conclusion | None:
        """`hear`, for a process that has said nothing at this meeting."""
        key, milliseconds = f"{self._here()}/conclusion", int(1000 * seconds)
        try:
            found = _client().blocking_key_value_get(key, milliseconds)
        except jax.errors.JaxRuntimeError as error:
            if names.TEXT_DEADLINE not in str(error):
                raise
            return None
        kind, _, text = found.partition(" ")
        return Conclusion(kind, text)

    def conclude(self, kind: str, text: str) -> bool:
        """Ends the meeting. Returns False if another process was quicker."""
        try:
            _client().key_value_set(f"{self._here()}/conclusion", f"{kind} {text}")
        except jax.errors.JaxRuntimeError as error:
            if names.TEXT_ALREADY_EXISTS not in str(error):
                raise
            return False
        return True

    def said(self) -> dict[int, str]:
        """What each process has said so far."""
        said = _client().key_value_dir_get(f"{self._here()}/said/")
        return {int(key.rsplit("/", 1)[1]): value for key, value in said}

    def go_on(self, *, judged: bool = True) -> None:
        """To the next meeting. `judged` is whether all processes came to this one."""
        if judged:
            if self._me == self.processes[0]:
                # All have read how the meetings before this one ended.
                for turn in range(self._kept, self.turn):
                    _client().key_value_delete(f"{self.place}/{turn}/")
            self._kept = self.turn
        self.turn += 1

    def count(self, what: str) -> int:
        """Counts this process in, and returns how many have been counted."""
        return _client().key_value_increment(f"{self.place}/{what}", 1)

    def forget(self) -> None:
        """Deletes all that the service holds of these meetings."""
        _client().key_value_delete(f"{self.place}/")

    def _come(self) -> int:
        """How many processes have come. That is less to read than what they have said."""
        try:
            return int(_client().key_value_try_get(f"{self._here()}/count"))
        except jax.errors.JaxRuntimeError as error:
            if names.TEXT_NOT_FOUND not in str(error):
                raise
            return 0

    def _here(self) -> str:
        return f"{self.place}/{self.turn}"


def _client() -> CoordinationClient:
    client = coordination_client()
    if client is None:
        raise RuntimeError(
            "the processes can't talk to each other: call jax.distributed.initialize() at the "
            "start of each, or write check=False"
        )
    return client

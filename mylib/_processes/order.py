"""The calls that processes make together, in their order, and what is wrong with them."""

from typing import Any

from .groups import digest, named
from .series import Processes

IN_ORDER = "All processes must make the same calls in the same order"

# As many calls are remembered until the other processes are known to have made the same.
_KEPT = 1000


class TransferError(RuntimeError):
    """A transfer between processes can't be made, one of them has not taken part in it, or they
    have made other calls, or the same in another order.
    """


class Order:
    """The calls of the same processes, each with a description. All processes must make the same.

    Each process compares a running digest with two others, its neighbours. What one finds is passed
    on, so it costs as much for many processes as for three.
    """

    def __init__(self, processes: Processes, me: int):
        self.processes = processes
        self.me = me
        place = processes.index(me)
        self.neighbours = {processes[place - 1], processes[(place + 1) % len(processes)]}
        self.count, self.digest = 0, ""
        # By number: the digest of all calls so far, and the description.
        self._calls: dict[int, tuple[str, str]] = {}
        # By neighbour: the last call that is known to be equal, here and there.
        self._equal = dict.fromkeys(self.neighbours, 0)
        self._equal_there = dict.fromkeys(self.neighbours, 0)
        # By neighbour: the first call that is another one there, and its description here.
        self._differs: dict[int, tuple[int, str]] = {}

    def add(self, text: str) -> None:
        self.count, self.digest = self.count + 1, digest([self.digest, text])[:16]
        self._calls[self.count] = self.digest, text
        self._calls.pop(self.count - _KEPT, None)

    def is_settled(self) -> bool:
        known = {*self._equal.values(), *self._equal_there.values()}
        return known == {self.count}

    def account(self, neighbour: int) -> dict[str, Any]:
        """What a neighbour has to know of the calls here."""
        first = self._equal_there[neighbour]
        return {
            "count": self.count,
            "equal": self._equal[neighbour],
            "digests": [(n, call[0]) for n, call in self._calls.items() if n > first],
            "differs": self._differs.get(neighbour),
        }

    def compare(self, neighbour: int, theirs: dict[str, Any]) -> str | None:
        """What is wrong, once both have told each other which call differs."""
        self._equal_there[neighbour] = theirs["equal"]
        common = [(n, told) for n, told in theirs["digests"] if n in self._calls]
        if not common:
            return None
        last, told = common[-1]
        if self._calls[last][0] == told:
            self._equal[neighbour] = last
            equal = min(*self._equal.values(), *self._equal_there.values())
            for n in [n for n in self._calls if n <= equal]:
                del self._calls[n]
            return None
        differs = next(n for n, told in common if self._calls[n][0] != told)
        self._differs[neighbour] = differs, self._calls[differs][1]
        if theirs["differs"] is None or theirs["differs"][0] != differs:
            return None
        made = {self.me: self._calls[differs][1], neighbour: theirs["differs"][1]}
        (one, text), (other, instead) = sorted(made.items())
        return (
            f"call {differs} of {named(self.processes)} is {text} in process {one}, but {instead} "
            f"in process {other}. {IN_ORDER}"
        )

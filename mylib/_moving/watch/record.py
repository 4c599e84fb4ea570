"""What this process has started, and what of it has ended.

A call costs a few hundred nanoseconds and keeps at most 4 KiB alive. Nothing waits for devices:
results are asked whether they are ready.
"""

import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple

import jax

from ..._core.compat import data_of_shards
from ..._core.lines import calling_frame, spot
from ..._core.placement import bytes_on_each
from ..._core.text import counted, listed
from ..._core.tree import canonical_dtype, is_of_keys, split, texts_of
from ..processes import digest, processes_at, text_of

# The most calls that are remembered, and the bytes of each that may be kept alive.
_CALLS = 64
_BYTES = 4096
# At most this many results of a call are candidates for that, or are asked if none is small.
_ASKED = 4
# Look at no more than this many arrays of a placement, and show the shapes of so many arguments.
_LAST, _SHOWN = 16, 4


@dataclass(slots=True, eq=False)
class Tally:
    """How many calls of one kind have been started by these processes together."""

    name: str
    count: int = 0


@dataclass(slots=True, eq=False)
class Witness:
    """The results of a program that show whether it has ended."""

    # The record that it is for.
    owner: object
    name: str
    arguments: str
    # A weak reference to what `audit` may know about.
    variant: Any
    tally: Tally | None = None
    devices: tuple[int, ...] = ()
    # The positions of the smallest results that may be kept. The first one is.
    small: Sequence[int] = ()
    # Those of the smallest at all, which are looked at if none may be kept.
    others: Sequence[int] = ()

    @property
    def kind(self) -> str:
        return self.tally.name if self.tally else ""


class Started(NamedTuple):
    """A call, and the results that tell whether it has ended."""

    witness: Witness
    number: int
    code: CodeType
    instruction: int
    # A result that is held, and its position; or weak references to some.
    position: int
    held: Any
    references: Sequence[weakref.ref[Any]]

    @property
    def text(self) -> str:
        line = spot(self.code.co_filename, line_in(self.code, self.instruction))
        return f"{self.witness.name} in {line}"

    def results(self) -> list[Any]:
        """The arrays that still exist."""
        results = [ref() for ref in self.references] if self.held is None else [self.held]
        return [array for array in results if array is not None and not array.is_deleted()]

    def has_ended(self) -> bool | None:
        """None if nothing tells."""
        try:
            results = self.results()
            return all(array.is_ready() for array in results) if results else None
        except RuntimeError:  # deleted meanwhile
            return None

    def busy(self) -> list[int]:
        """The devices of this process that have not ended it."""
        try:
            shards: list[Any] = [x for array in self.results() for x in data_of_shards(array)]
            return sorted({shard.device.id for shard in shards if not shard.is_ready()})
        except RuntimeError:
            return []


class Halt(NamedTuple):
    kind: str
    what: str
    processes: tuple[int, ...]


class Record:
    """The calls, waits and steps of this process, reported by the rooms that make them."""

    def __init__(self) -> None:
        self._calls: deque[tuple[Any, ...]] = deque(maxlen=_CALLS)
        self._tallies: dict[tuple[str, tuple[int, ...]], Tally] = {}
        self._lock = threading.Lock()
        self._ended: dict[tuple[int, ...], Any] = {}
        self._over = 0
        # By thread.
        self.waits: dict[int, list[Halt]] = {}

    def started(self, call: Any, memo: list[Any], arrays: Sequence[Any]) -> None:
        if not memo or memo[0].owner is not self._lock:
            about = call.wrapped.name, arguments_of(call), weakref.ref(call.variant)
            memo[:] = [self._witness("programs", *about, arrays)]
        self._add(memo[0], arrays)

    def placed(self, arrays: Sequence[Any]) -> None:
        name = f"placement of {counted(len(arrays), 'array')}"
        last = arrays[-_LAST:]
        self._add(self._witness("placements", name, "", None, last), last)

    def _add(self, witness: Witness, arrays: Sequence[Any]) -> None:
        tally = witness.tally
        if tally is None:
            return  # nothing of it is here
        # Each call needs this: `inspect.currentframe` would need two steps more.
        frame = calling_frame(sys._getframe(2))  # pyright: ignore[reportPrivateUsage]
        tally.count = number = tally.count + 1
        position, held, references = -1, None, ()
        if witness.small:
            position = witness.small[0]
            held = arrays[position]
        else:
            references = [weakref.ref(arrays[i]) for i in witness.others]
        line = frame.f_code, frame.f_lasti
        self._calls.append((witness, number, *line, position, held, references))

    def _witness(
        self, kind: str, name: str, arguments: str, variant: Any, arrays: Sequence[Any]
    ) -> Witness:
        witness = Witness(self._lock, name, arguments, variant)
        sizes = sorted(
            (len(devices) * bytes_on_each(array.sharding, array.shape, array.dtype), i)
            for i, array in enumerate(arrays)
            if isinstance(array, jax.Array)
            and not is_of_keys(array)
            and (devices := array.sharding.addressable_devices)
        )
        if sizes:
            sharding = arrays[sizes[0][1]].sharding
            witness.tally = self._tally(kind, processes_at(sharding))
            witness.devices = tuple(sorted(d.id for d in sharding.addressable_devices))
            witness.small = [i for size, i in sizes[:_ASKED] if size <= _BYTES]
            witness.others = [i for _, i in sizes[:_ASKED]]
        return witness

    def _tally(self, kind: str, processes: tuple[int, ...]) -> Tally:
        with self._lock:
            tally = self._tallies.get((kind, processes))
            if tally is None:
                tally = self._tallies[kind, processes] = Tally(f"{kind} {text_of(processes)}")
            return tally

    @contextmanager
    def waiting(self, kind: str, what: str, processes: tuple[int, ...]) -> Iterator[None]:
        if kind:
            self._tally(kind, processes).count += 1
        waits = self.waits.setdefault(threading.get_ident(), [])
        waits.append(Halt(kind, what, processes))
        try:
            yield
        finally:
            waits.pop()
            self._over += 1

    def step(self, processes: tuple[int, ...]) -> None:
        self._tally("steps", processes).count += 1

    def counts(self) -> dict[str, int]:
        with self._lock:
            return {tally.name: tally.count for tally in self._tallies.values()}

    def calls(self) -> list[Started]:
        return [Started(*call) for call in self._calls.copy()]

    def look(self) -> tuple[Any, ...]:
        """Another value than before if there has been progress."""
        for call in self.calls():
            witness = call.witness
            if call.has_ended():
                self._ended[witness.devices] = witness.tally, call.number
            elif call.held is not None and call.held.is_deleted():
                # It was donated to a later call. Next time another one is kept.
                witness.small = [i for i in witness.small if i != call.position]
        return tuple(self.counts().values()), tuple(self._ended.items()), self._over


def ended_of(calls: Sequence[Started]) -> list[bool | None]:
    """Whether each call has ended: devices run their programs in order, so what is before one that
    has ended has ended, too. None if it is unknown.
    """
    ended: list[bool | None] = []
    last: set[tuple[int, ...]] = set()
    for call in reversed(calls):
        has_ended = True if call.witness.devices in last else call.has_ended()
        if has_ended:
            last.add(call.witness.devices)
        ended.append(has_ended)
    return ended[::-1]


def arguments_of(call: Any) -> str:
    """Those of a call of `filter_jit`, in words that are the same in all processes. Its program
    can't be compared: if the call hangs, it may not have been lowered here.
    """
    arrays = [f"{canonical_dtype(array)}{[*array.shape]}" for array in call.arrays]
    checksum = digest([arrays, texts_of(split((call.args, call.kwargs)))])[:6]
    return f"for {listed(arrays, _SHOWN) or 'no arrays'} (checksum {checksum})"


def line_in(code: CodeType, instruction: int) -> int:
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end)
    return next(lines, None) or code.co_firstlineno

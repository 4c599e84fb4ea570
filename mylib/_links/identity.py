"""Names of arrays that are the same in all processes, also where an array has no shards.

A process knows an array of other processes by a handle: an array without local shards. Nothing in
it says which of their arrays it is, so functions that make such arrays name them, by what made them
and how many times it has done so.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

from .._processes import digest

_LONG = 200


class _Entry(NamedTuple):
    array: "weakref.ref[jax.Array]"
    name: str
    uses: Counter[str]


_entries: dict[int, _Entry] = {}
_made: Counter[str] = Counter()
_unnamed: Counter[str] = Counter()
_lock = threading.Lock()


def next_name(maker: str) -> str:
    """A name for what `maker` makes now. Makers are few: a count of each is kept."""
    with _lock:
        _made[maker] += 1
        return f"{maker}#{_made[maker]}"


def give_names(arrays: Iterable[Any], name: str) -> None:
    """Names arrays by what has made them, `name`, and their position in it."""
    if len(name) > _LONG:
        # The name of an array that has been passed round has those of all before it.
        name = f"{name[:_LONG]}... ({digest(name)})"
    for i, x in enumerate(arrays):
        if isinstance(x, jax.Array):
            _name(x, f"{name}[{i}]")


def _name(x: jax.Array, name: str) -> None:
    key = id(x)

    def forget(gone: "weakref.ref[jax.Array]") -> None:
        entry = _entries.get(key)
        # Another array may have the same id by now.
        if entry is not None and entry.array is gone:
            del _entries[key]

    _entries[key] = _Entry(weakref.ref(x, forget), name, Counter())


def count() -> int:
    """The number of arrays with names."""
    return len(_entries)


def name_of(x: Any) -> str | None:
    entry = _entries.get(id(x))
    return entry.name if entry is not None and entry.array() is x else None


def next_transfer(x: Any, text: str) -> tuple[str, int]:
    """The name of `x`, and which of its transfers that `text` describes comes next.

    Arrays without a name are told apart by the descriptions of their transfers, and by the order of
    transfers with the same description.
    """
    entry = _entries.get(id(x))
    with _lock:
        if entry is None or entry.array() is not x:
            name, uses = f"an array without a name, {text}", _unnamed
        else:
            name, uses = entry.name, entry.uses
        uses[text] += 1
        return name, uses[text]

"""What has made an array: a text that is the same in all processes, also where the array has no
shards.

A process knows an array of other processes by a handle, and nothing in it says which of their
arrays it is. So functions that make such arrays label them with what has made them, and how many
times it has done so.
"""

import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any

import jax

from .._compat import label_of, set_label
from .._processes import digest

_LONG = 200

# Lines of a program are few: a count of each is kept.
_made: Counter[str] = Counter()
_lock = threading.Lock()


def next_call(maker: str) -> str:
    """What `maker` makes now."""
    with _lock:
        _made[maker] += 1
        return f"{maker}#{_made[maker]}"


def set_origin(arrays: Iterable[Any], call: str) -> None:
    """Labels arrays with what has made them, and their position in it."""
    if len(call) > _LONG:
        # An array that has been passed round has the origins of all before it.
        call = f"{call[:_LONG]}... ({digest(call)})"
    for i, x in enumerate(arrays):
        if isinstance(x, jax.Array):
            set_label(x, f"{call}[{i}]")


def origin_of(x: Any) -> str:
    """Empty if it is not known."""
    return label_of(x)

"""Messages between processes, on the host, without their devices.

Each process sends a message, one decides, all read the decision. A process that doesn't come is
named after a timeout; the others don't wait forever.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from .groups import in_short
from .series import JUDGED, Conclusion, Judge, Processes, Series

# Sends a message to the other processes, and returns the decision of one of them about all
# messages.
Meet = Callable[[str, Judge], str]

# JAX's own timeout for processes to start and end. Hosts that read a checkpoint, or compile for the
# first time, may be minutes apart.
_DEFAULT_TIMEOUT = 300.0
# In seconds. At this interval a waiting process checks whether the deciding one has died.
_STEP = 10.0

# The conclusions of meetings that not all processes attended. ABSENT: one came for this call. VOID:
# each came only to report an error.
_ABSENT = "absent"
_VOID = "void"

_series: dict[tuple[str, Processes], Series] = {}


class AbsentError(TimeoutError):
    """Some processes did not come to a meeting."""

    def __init__(self, message: str, missing: Processes):
        super().__init__(message)
        self.missing = missing


def exchange(
    purpose: str,
    mine: str,
    processes: Processes,
    judge: Judge,
    *,
    timeout: float | None = None,
    alone: bool = False,
) -> str:
    """Every one of `processes` sends a message; one of them decides, and all get its decision.
    Processes meet others with the same purpose. If this one may have come `alone`, it doesn't make
    later calls of the others fail.

    `judge` may be called in any process. It must not raise, because the others wait for it.
    """
    if len(processes) == 1:
        return judge({processes[0]: mine})
    me, key = jax.process_index(), (purpose, processes)
    series = _series.get(key)
    if series is None:
        place = f"mylib/{purpose}/{digest(processes)}"
        # Another thread may have been quicker.
        series = _series.setdefault(key, Series(place, processes, me))
    timeout = patience() if timeout is None else timeout
    deadline = time.monotonic() + timeout
    with series.lock:
        if series.turn == 0 and not series.begin():
            raise RuntimeError(_taken_over(purpose))
        while True:
            conclusion = _concluded(series, f"{int(alone)}{mine}", judge, deadline, timeout)
            series.go_on(judged=conclusion.kind == JUDGED)
            if conclusion.kind == JUDGED:
                return conclusion.text
            missing, waited = json.loads(conclusion.text)
            if me not in missing:
                raise AbsentError(_nobody_came(purpose, missing, waited), tuple(missing))
            # The others have given up before this process came, so their calls have failed. This
            # one fails, too, unless one of them has tried again since, or none of them had come for
            # this call.
            goes_on = conclusion.kind == _VOID or series.messages()
            if not goes_on or time.monotonic() >= deadline:
                raise AbsentError(_too_late(purpose, processes), tuple(missing))


def _concluded(
    series: Series, mine: str, judge: Judge, deadline: float, timeout: float
) -> Conclusion:
    """Sends a message, and waits for the others until the deadline."""

    def judge_all(messages: dict[int, str]) -> str:
        return judge({index: text[1:] for index, text in messages.items()})

    series.say(mine, judge_all)
    while True:
        left = deadline - time.monotonic()
        conclusion = series.hear(judge_all, max(0.1, min(_STEP, left)))
        if conclusion is not None:
            return conclusion
        if left <= _STEP:
            messages = series.messages()
            missing = [index for index in series.processes if index not in messages]
            came_for_it = any(not int(text[0]) for text in messages.values())
            if missing:
                kind = _ABSENT if came_for_it else _VOID
                series.conclude(kind, json.dumps([missing, timeout]))
            else:  # one has died after its message, before it was counted
                series.conclude(JUDGED, judge_all(messages))


def gather(
    purpose: str, mine: Any, processes: Processes, *, timeout: float | None = None
) -> list[Any]:
    """The messages of all processes, in their order, as JSON; the same for all of them."""

    def judge(messages: dict[int, str]) -> str:
        return f"[{', '.join(messages[index] for index in processes)}]"

    return json.loads(exchange(purpose, json.dumps(mine), processes, judge, timeout=timeout))


def meeting(purpose: str, processes: Processes, *, alone: bool = False) -> Meet:
    """`exchange` with a fixed purpose and group."""
    return lambda mine, judge: exchange(purpose, mine, processes, judge, alone=alone)


def _taken_over(purpose: str) -> str:
    return (
        f"this process can't compare ({purpose}): it has taken the place of one that has met the "
        "others before. Processes can't be replaced one by one: end all of them, start them again, "
        "and load the last checkpoint"
    )


def _nobody_came(purpose: str, missing: Sequence[int], timeout: float) -> str:
    return f"{named(missing)} did not come within {timeout:g} s to compare ({purpose}). {_ADVICE}"


def _too_late(purpose: str, processes: Processes) -> str:
    others = [index for index in processes if index != jax.process_index()]
    return (
        f"this process came too late to compare ({purpose}): {named(others)} had waited for it, "
        f"and given up. {_ADVICE}"
    )


_ADVICE = (
    "Every process with devices of the mesh must make the same calls in the same order. If one "
    "is slow, set MYLIB_EXCHANGE_TIMEOUT to more seconds; if it makes no such call, place with "
    "check=False"
)


def everybody() -> Processes:
    return tuple(range(jax.process_count()))


def processes_of(devices: Iterable[Any]) -> Processes:
    return tuple(sorted({device.process_index for device in devices}))


def patience() -> float:
    return float(os.environ.get("MYLIB_EXCHANGE_TIMEOUT", _DEFAULT_TIMEOUT))


def digest(x: Any) -> str:
    return hashlib.blake2b(json.dumps(x).encode(), digest_size=16).hexdigest()


def named(indices: Sequence[int]) -> str:
    return f"process{'es' * (len(indices) > 1)} {in_short(indices)}"

"""Messages between processes, on the host, without their devices.

Each process sends a message, one decides, all read the decision. A process that doesn't come is
named after a timeout; the others don't wait forever.
"""

import functools
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import jax

from .._errors import line_of_caller
from .._watched import waits
from .groups import digest, named
from .order import IN_ORDER
from .series import JUDGED, Conclusion, Judge, Processes, Series
from .watch import MEETINGS, counted, read_in_order, wait_in_step

# Sends a message to the other processes, and returns the decision of one of them about all
# messages.
Meet = Callable[[str, Judge], str]

# JAX's own timeout for processes to start and end. Hosts that read a checkpoint, or compile for the
# first time, may be minutes apart.
_DEFAULT_TIMEOUT = 300.0
# In seconds. At this interval a waiting process checks whether the deciding one has died.
_STEP = 10.0

# The conclusions of meetings that not all processes attended. ABSENT: some did not come in time.
# BROKEN: one was interrupted. VOID: each came only to report an error of a call in which others may
# have had nothing to compare.
_ABSENT = "absent"
_BROKEN = "broken"
_VOID = "void"

# The meetings of a program's own calls.
_CALLS = "calls"

_series: dict[tuple[str, Processes], Series] = {}
# Ctrl-C can't end a wait for JAX's service, so threads wait, which are kept for later meetings.
_waiting = ThreadPoolExecutor(64, thread_name_prefix="mylib-meetings")


class AbsentError(TimeoutError):
    """Some processes did not come to a meeting, or were interrupted in it."""

    def __init__(self, message: str, missing: Processes):
        super().__init__(message)
        self.missing = missing


class _Visit:
    """A process's part in one meeting. The lock keeps apart the thread that waits, and the caller
    that is interrupted.
    """

    def __init__(self, series: Series, purpose: str, alone: bool):
        self.series, self.purpose, self.alone = series, purpose, alone
        self.thread = threading.get_ident()
        self.lock = threading.Lock()
        # The meeting that it is about; None for the next one, whichever that is.
        self.turn: int | None = None
        # Whether the thread is at the meeting, and whether this call has been counted.
        self.is_there = self.is_over = False


@waits("meetings", lambda purpose, mine, processes, *_, **__: (purpose, processes))
def exchange(
    purpose: str,
    mine: str,
    processes: Processes,
    judge: Judge,
    *,
    timeout: float | None = None,
    alone: bool = False,
    in_order: bool = False,
) -> str:
    """Every one of `processes` sends a message; one of them decides, and all get its decision. If
    this one may have come `alone`, it doesn't make later calls of the others fail.

    Processes meet others with the same purpose. If it is `in_order`, that of another meeting is an
    error in all of them, as are differences in their transfers.

    Whatever is raised, each call counts: the next one of all processes meets the next one here.

    `judge` may be called in any process. It must not raise, because the others wait for it.
    """
    if len(processes) == 1:
        return judge({processes[0]: mine})
    visit = _Visit(_series_of(_CALLS if in_order else purpose, processes), purpose, alone)
    timeout = patience() if timeout is None else timeout
    if in_order:
        line = line_of_caller()
        mine = json.dumps([purpose, line, *counted("programs", processes)]) + f"\n{mine}"
        judge = functools.partial(_judge_in_order, judge)
    try:
        conclusion = _waiting.submit(_attend, visit, mine, judge, timeout)
        if not in_order:
            return conclusion.result()
        what = "" if alone else f"{purpose} in {line_of_caller()}"
        return read_in_order(processes, wait_in_step(conclusion, visit.series, what))
    except BaseException as error:
        _waiting.submit(_break_off, visit, _BROKEN, error).result()
        raise


def _judge_in_order(judge: Judge, messages: dict[int, str]) -> str:
    """The decision, or what differs between the calls of these processes, after another mark."""
    parts = {index: messages[index].partition("\n") for index in sorted(messages)}
    calls = {index: json.loads(call) for index, (call, _, _) in parts.items()}
    (first, (purpose, line, *before)), *others = calls.items()
    for index, (other, there, *before_it) in others:
        who = f"processes {first} and {index} make other calls"
        if other != purpose:
            return f"!{who}: {purpose} in {line} and {other} in {there}. {IN_ORDER}"
        if before_it != before:
            return f"?{who}, before {purpose} in {line}. {IN_ORDER}"
    return "=" + judge({index: text for index, (_, _, text) in parts.items()})


@contextmanager
def on_the_way(purpose: str, processes: Processes, *, alone: bool = False) -> Iterator[None]:
    """What is raised before a meeting ends it for the others. If this process may have come
    `alone`, it counts its call, and only Ctrl-C and the like end the meeting, for this call only.
    """
    series = _series_of(_CALLS, processes)
    visit = _Visit(series, purpose, alone)
    if series.thread == visit.thread:
        with series.lock:  # A meeting that was interrupted may take a moment to end.
            pass
    visit.turn = series.turn
    series.calls += alone
    try:
        yield
    except BaseException as error:
        if not (alone and isinstance(error, Exception)):
            _waiting.submit(_break_off, visit, _VOID if alone else _BROKEN, error).result()
        raise


def _series_of(purpose: str, processes: Processes) -> Series:
    series = _series.get((purpose, processes))
    if series is None:
        place = f"mylib/{purpose}/{digest(processes)}"
        series = Series(place, processes, jax.process_index())
        # Another thread may have been quicker.
        series = _series.setdefault((purpose, processes), series)
        if purpose == _CALLS:
            MEETINGS[processes] = series
    return series


def _attend(visit: _Visit, mine: str, judge: Judge, timeout: float) -> str:
    series, deadline = visit.series, time.monotonic() + timeout
    # A meeting that was interrupted may take a moment to end.
    if not series.lock.acquire(blocking=series.thread == visit.thread):
        visit.is_over = True
        raise RuntimeError(
            f"two threads meet other processes at the same time ({visit.purpose}), so their order "
            "may differ between processes. Let one thread do so, and pass check=False in the others"
        )
    try:
        series.thread = visit.thread
        if not series.begin():
            raise RuntimeError(
                f"this process can't compare ({visit.purpose}): it has taken the place of one that "
                "has met the others before. Processes can't be replaced one by one: end all of "
                "them, start them again, and load the last checkpoint"
            )
        while True:
            with visit.lock:
                if visit.is_over:
                    return ""  # The caller has been interrupted.
                visit.is_there = True
            conclusion = _conclusion(visit, mine, judge, deadline, timeout)
            if conclusion.kind == JUDGED:
                return conclusion.text
            if not _is_of_earlier_call(series, conclusion):
                raise _failure(visit, conclusion)
    finally:
        series.lock.release()


def _conclusion(
    visit: _Visit, mine: str, judge: Judge, deadline: float, timeout: float
) -> Conclusion:
    """That of the current meeting. The series goes on, whatever is raised."""
    conclusion = Conclusion(_BROKEN, "")
    try:
        conclusion = _concluded(visit, mine, judge, deadline, timeout)
    except BaseException as error:
        _conclude(visit.series, _BROKEN, error)
        raise
    finally:
        with visit.lock:
            visit.series.go_on(judged=conclusion.kind == JUDGED)
            goes_on = _is_of_earlier_call(visit.series, conclusion)
            visit.is_there, visit.is_over = False, visit.is_over or not goes_on
    return conclusion


def _is_of_earlier_call(series: Series, conclusion: Conclusion) -> bool:
    """Whether a meeting was about a call that is over, in which this process had nothing to
    compare.
    """
    return conclusion.kind == _VOID and series.calls > json.loads(conclusion.text)[-1]


def _failure(visit: _Visit, conclusion: Conclusion) -> AbsentError:
    who, about, _ = json.loads(conclusion.text)
    purpose, me = visit.purpose, jax.process_index()
    if isinstance(about, str):
        text = (
            f"{named(who)} was interrupted ({about}) when the processes compared ({purpose}), so "
            "this call has failed in all of them. They can go on with the next one"
        )
    elif me not in who:
        text = f"{named(who)} did not come within {about:g} s to compare ({purpose}). "
        text += _advice(purpose)
    else:  # The others gave up before this process came: their calls failed, so this one does, too.
        others = named([index for index in visit.series.processes if index != me])
        text = f"this process came too late to compare ({purpose}): {others} had waited for it, "
        text += f"and given up. {_advice(purpose)}"
    return AbsentError(text, tuple(who))


def _break_off(visit: _Visit, kind: str, error: BaseException) -> None:
    """Ends the meeting of a caller that does not wait any more."""
    series = visit.series
    with visit.lock:
        if visit.is_over:
            return
        visit.is_over = True
        if visit.is_there:
            _conclude(series, kind, error)
            return
    if series.lock.acquire(blocking=series.thread == visit.thread):
        try:
            if visit.turn in (None, series.turn):
                _conclude(series, kind, error)
                series.go_on(judged=False)
        finally:
            series.lock.release()


def _conclude(series: Series, kind: str, error: BaseException) -> None:
    about = [jax.process_index()], type(error).__name__, series.calls
    with suppress(jax.errors.JaxRuntimeError):  # The service may be gone.
        series.conclude(kind, json.dumps(about))


def _concluded(
    visit: _Visit, mine: str, judge: Judge, deadline: float, timeout: float
) -> Conclusion:
    """Sends a message, and waits for the others until the deadline."""
    series = visit.series

    def judge_all(messages: dict[int, str]) -> str:
        return judge({index: text[1:] for index, text in messages.items()})

    series.say(f"{int(visit.alone)}{mine}", judge_all)
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
                series.conclude(kind, json.dumps([missing, timeout, series.calls]))
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
    """`exchange` with a fixed purpose and group, in the order of the program's calls."""
    return lambda mine, judge: exchange(purpose, mine, processes, judge, alone=alone, in_order=True)


def _advice(purpose: str) -> str:
    unless = "; if it makes no such call, place with check=False" if purpose == "placement" else ""
    return (
        "Every process with devices of the mesh must make the same calls in the same order. If one "
        f"is slow, set MYLIB_EXCHANGE_TIMEOUT to more seconds{unless}. This call has failed in all "
        "of them: all must try it again, or none"
    )


def everybody() -> Processes:
    return tuple(range(jax.process_count()))


def processes_of(devices: Iterable[Any]) -> Processes:
    return tuple(sorted({device.process_index for device in devices}))


def patience() -> float:
    return float(os.environ.get("MYLIB_EXCHANGE_TIMEOUT", _DEFAULT_TIMEOUT))

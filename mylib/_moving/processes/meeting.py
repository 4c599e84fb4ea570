"""Messages between processes, on the host, without their devices.

Each process sends a message, one decides, all read the decision. A process that doesn't come is
named after a timeout; the others don't wait forever.
"""

import functools
import json
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import jax
from jax.sharding import Sharding

from ..._core.errors import MylibError, in_words
from ..._core.lines import line_of_caller
from ..._core.watched import waits
from .alive import about_lost, lost
from .comparing import ENDS, GOES_ON, programs_of, read_in_order, wait_in_step
from .coordination import JUDGED, Conclusion, Judge, Processes, Series, ended
from .environment import TIMEOUT, patience
from .groups import digest, named
from .order import IN_ORDER, TransferError
from .settings import other_settings

# Sends a message to the other processes, and returns the decision of one of them about all
# messages.
Meet = Callable[[str, Judge], str]

# In seconds. At these intervals a waiting process checks whether one that it waits for was lost,
# and, after the first one and later ones, whether the deciding one has died, and one has ended.
_STEP, _STEPS = 1.0, 10.0

# Conclusions of meetings that not all processes attended. FAILED: some did not come in time, or one
# was interrupted. VOID: only calls that had failed came; others may have had nothing to compare.
FAILED, VOID = "failed", "void"

# The purpose of the meetings of a program's own calls, which all processes make in one order.
CALLS = "calls"
# By purpose, and by the processes that meet.
_meetings: dict[tuple[str, Processes], Series] = {}

# Ctrl-C can't end a wait for JAX's service, so threads wait, which are kept for later meetings.
waiting = ThreadPoolExecutor(64, thread_name_prefix="mylib-meetings")


class Continued(str):
    """A decision after which the same processes meet once more, for the same call."""


class AbsentError(MylibError, TimeoutError):
    """Some processes did not come to a meeting, or were interrupted in it."""

    def __init__(self, message: str, missing: Processes):
        super().__init__(message)
        self.missing = missing


class Visit:
    """A process's part in one meeting. The lock keeps apart the thread that waits, and the caller
    that is interrupted.
    """

    def __init__(
        self, series: Series, alone: bool = False, thread: int = 0, turn: int | None = None
    ):
        self.series, self.alone = series, alone
        self.thread = thread or threading.get_ident()
        self.lock = threading.Lock()
        # The meeting that it is about; None for the next one, whichever that is.
        self.turn = turn
        # Whether the thread is at the meeting, and whether this call has been counted.
        self.is_there = self.is_over = False

    def attend(self, purpose: str, mine: str, judge: Judge, timeout: float) -> str:
        series, deadline = self.series, time.monotonic() + timeout
        try:
            does = f"meet other processes at the same time ({purpose})"
            series.only.hold(self.thread, does, ", and pass check=False in the others")
        except RuntimeError:
            self.is_over = True
            raise
        try:
            if not series.begin():
                raise RuntimeError(
                    f"this process can't compare ({purpose}): it has taken the place of one "
                    "that has met the others before. Processes can't be replaced one by one: end "
                    "all of them, start them again, and load the last checkpoint"
                )
            while True:
                with self.lock:
                    if self.is_over:
                        return ""  # The caller has been interrupted.
                    self.is_there = True
                conclusion = self._conclusion(mine, judge, deadline, timeout)
                if conclusion.kind == JUDGED:
                    return conclusion.text
                if self.is_over:
                    raise self._failure(purpose, conclusion)
        finally:
            series.only.release()

    def _conclusion(self, mine: str, judge: Judge, deadline: float, timeout: float) -> Conclusion:
        """The number of the current meeting. The series continues after errors."""
        series, conclusion = self.series, Conclusion(FAILED, "")
        try:
            conclusion = self._concluded(mine, judge, deadline, timeout)
        except BaseException as error:
            self._conclude(FAILED, error)
            raise
        finally:
            with self.lock:
                judged = conclusion.kind == JUDGED
                series.go_on(judged=judged, is_owed=judged and conclusion.text[:1] == GOES_ON)
                # Or it was about a call that is over, in which there was nothing to compare here.
                ours = conclusion.kind != VOID or series.calls <= json.loads(conclusion.text)[-1]
                self.is_there, self.is_over = False, self.is_over or ours
        return conclusion

    def _concluded(self, mine: str, judge: Judge, deadline: float, timeout: float) -> Conclusion:
        """Sends a message, and waits for the others until the deadline, or until one that has not
        come has ended.
        """
        series, step = self.series, _STEP
        next_look = time.monotonic() + step
        lost()  # The watch begins.

        def judge_all(messages: dict[int, str]) -> str:
            return judge({index: text[1:] for index, text in messages.items()})

        series.say(f"{int(self.alone)}{mine}", judge_all)
        while True:
            left = deadline - time.monotonic()
            conclusion = series.hear(judge_all, max(0.1, min(_STEP, left)))
            if conclusion is not None:
                return conclusion
            is_late, are_lost = left <= _STEP, sorted(lost().intersection(series.processes))
            if are_lost:
                return self._without(are_lost, judge_all)
            if not is_late and time.monotonic() < next_look:
                continue
            step = min(2 * step, _STEPS)
            next_look = time.monotonic() + step
            if text := other_settings(series.processes):
                raise TransferError(text)
            # Before the messages are read: one that has ended sends none after that.
            has_ended = ended().intersection(series.processes)
            if not is_late and not has_ended:
                continue
            messages = series.messages()
            missing = [index for index in series.processes if index not in messages]
            gone = [index for index in missing if index in has_ended]
            if gone or (is_late and missing):
                came_for_it = any(not int(text[0]) for text in messages.values())
                kind = FAILED if came_for_it else VOID
                about = [gone, None] if gone else [missing, timeout]
                series.conclude(kind, json.dumps([*about, "", series.calls]))
            elif is_late:  # one has died after its message, before it was counted
                series.conclude(JUDGED, judge_all(messages))

    def _without(self, are_lost: list[int], judge: Judge) -> Conclusion:
        """The conclusion of those that are left. The lost ones may have come before."""
        series, messages = self.series, self.series.messages()
        if len(messages) == len(series.processes) and jax.process_index() not in are_lost:
            series.conclude(JUDGED, judge(messages))
        else:
            series.conclude(FAILED, json.dumps([are_lost, False, "", series.calls]))
        while (conclusion := series.read(_STEP)) is None:
            pass
        return conclusion

    def _failure(self, purpose: str, conclusion: Conclusion) -> Exception:
        who, about, breach, _ = json.loads(conclusion.text)
        me = jax.process_index()
        if breach:  # that process has known it first
            return TransferError(breach)
        if isinstance(about, str):
            text = f"{named(who)} was interrupted ({about}) when the processes compared ({purpose})"
            text += ", so this call has failed in all of them. They can go on with the next one"
        elif about is False:
            text = f"{about_lost(who, me)} did not come to compare ({purpose})"
        elif about is None:
            have = "has" if len(who) == 1 else "have"
            text = (
                f"{named(who)} {have} ended, and did not come to compare ({purpose}). {_SAME_CALLS}"
            )
        elif me not in who:
            text = f"{named(who)} did not come within {about:g} s to compare ({purpose}). "
            text += _advice(purpose)
        else:  # The others gave up before this process came: their calls failed, so does this one.
            others = named([index for index in self.series.processes if index != me])
            text = f"this process came too late to compare ({purpose}): {others} had waited for "
            text += f"it, and given up. {_advice(purpose)}"
        return AbsentError(text, tuple(who))

    def break_off(self, error: BaseException, kind: str = FAILED) -> None:
        """Ends the meeting of a caller that does not wait any more."""
        series = self.series
        with self.lock:
            if self.is_over:
                return
            self.is_over = True
            if self.is_there:
                self._conclude(kind, error)
                return
        if series.only.try_to_hold(self.thread):
            try:
                if series.is_owed or self.turn in (None, series.turn):
                    self._conclude(FAILED if series.is_owed else kind, error)
                    series.go_on(judged=False)
            finally:
                series.only.release()

    def _conclude(self, kind: str, error: BaseException) -> None:
        breach = str(error) if isinstance(error, TransferError) else ""
        about = [jax.process_index()], in_words(error), breach, self.series.calls
        with suppress(jax.errors.JaxRuntimeError):  # The service may be gone.
            self.series.conclude(kind, json.dumps(about))


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
    visit = Visit(series_of(CALLS if in_order else purpose, processes), alone)
    if in_order:
        call = [purpose, line_of_caller(), *programs_of(processes)]
        mine = f"{json.dumps(call)}\n{mine}"
        judge = functools.partial(_judge_in_order, judge)
    try:
        timeout = patience() if timeout is None else timeout
        conclusion = waiting.submit(visit.attend, purpose, mine, judge, timeout)
        if not in_order:
            return conclusion.result()
        return read_in_order(processes, wait_in_step(conclusion, processes))
    except BaseException as error:
        waiting.submit(visit.break_off, error).result()
        raise


def _judge_in_order(judge: Judge, messages: dict[int, str]) -> str:
    """The decision, or what differs between the calls of these processes, after another mark."""
    parts = {index: messages[index].partition("\n") for index in sorted(messages)}
    calls = {index: json.loads(call) for index, (call, _, _) in parts.items()}
    (first, (purpose, line, *before)), *others = calls.items()
    for index, (other_purpose, other_line, *before_it) in others:
        who = f"processes {first} and {index} make other calls"
        if other_purpose != purpose:
            return f"!{who}: {purpose} in {line} and {other_purpose} in {other_line}. {IN_ORDER}"
        if before_it != before:
            return f"?{who}, before {purpose} in {line}. {IN_ORDER}"
    decision = judge({index: text for index, (_, _, text) in parts.items()})
    return (GOES_ON if isinstance(decision, Continued) else ENDS) + decision


def series_of(purpose: str, processes: Processes) -> Series:
    series = _meetings.get((purpose, processes))
    if series is None:
        place = f"mylib/{purpose}/{digest(processes)}"
        series = Series(place, processes, jax.process_index())
        # Another thread may have been quicker.
        series = _meetings.setdefault((purpose, processes), series)
    return series


def gather_messages(
    purpose: str, mine: Any, processes: Processes, *, timeout: float | None = None
) -> list[Any]:
    """The messages of all processes, in their order, as JSON; the same for all of them."""

    def judge(messages: dict[int, str]) -> str:
        return f"[{', '.join(messages[index] for index in processes)}]"

    return json.loads(exchange(purpose, json.dumps(mine), processes, judge, timeout=timeout))


def meeting(purpose: str, processes: Processes, *, alone: bool = False) -> Meet:
    """`exchange` with a fixed purpose and group, in the order of the program's calls."""
    return lambda mine, judge: exchange(purpose, mine, processes, judge, alone=alone, in_order=True)


_SAME_CALLS = "Every process with devices of the mesh must make the same calls in the same order"


def _advice(purpose: str) -> str:
    unless = "; if it makes no such call, place with check=False" if purpose == "placement" else ""
    return (
        f"{_SAME_CALLS}. If one is slow, set {TIMEOUT} to more seconds{unless}. This call "
        "has failed in all of them: all must try it again, or none"
    )


def everybody() -> Processes:
    return tuple(range(jax.process_count()))


def processes_of(devices: Iterable[Any]) -> Processes:
    return tuple(sorted({device.process_index for device in devices}))


@functools.lru_cache(maxsize=1024)
def processes_at(sharding: Sharding) -> Processes:
    return processes_of(sharding.device_set)

"""The agreement of processes about a batch before they place it."""

import functools
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ..._core.errors import PlacementError, in_words
from ..processes import (
    Continued,
    Difference,
    Meet,
    difference_of,
    everybodys_faults,
    faults_in_full,
    in_brief,
    named,
)
from .request import Tail
from .share import Share

_FIX = (
    "begin the same loops in the same order in every process; read the rows that "
    "mylib.data.reader_shard names, and make the rest of a batch in the same way"
)


def settle(
    share: Share, meet: Meet, compared: set[str], rows: int = 0, ended: bool = False
) -> Share | None:
    """Compares the share with those of the other processes, and returns it ready to be placed, with
    at least `rows` rows if it may be padded. None if the sources of all processes have `ended`.

    `compared` are the kinds of batches whose numbers have been compared.
    """
    if share.request.is_alone:
        if share.faults:
            raise PlacementError(share.faults)
        return _fitting(share, rows, share.rows).masked(share.rows)
    facts = share.facts()
    brief = in_brief(share.faults, facts)
    kind = share.kind()
    news = bool(share.request.check) or kind not in compared
    mine = {**brief, "rows": share.rows, "news": news, "ended": ended}
    judgement = _judged(mine, share.request.tail, meet)
    if judgement is None:
        return None
    if judgement["difference"] is not None:
        difference = Difference(*judgement["difference"])
        raise PlacementError(faults_in_full(meet, difference, share.faults, facts, _FIX))
    fitting = _fitting(share, rows, judgement["rows"])
    if judgement["news"]:
        different = everybodys_faults(meet, [], fitting.values(), _FIX)
        if different:
            raise PlacementError(different)
        compared.add(kind)
    return fitting.masked(share.rows)


def settle_end(tail: Tail, meet: Meet) -> None:
    """Ends together with the other processes, without ever having had a batch."""
    _judged({"ended": True}, tail, meet)


def settle_failure(error: Exception, tail: Tail, meet: Meet) -> None:
    """Reports to the other processes why there is no batch."""
    # Perhaps no other process is waiting.
    with suppress(TimeoutError):
        meet(json.dumps({"failed": in_words(error)}), functools.partial(_judge, tail))


def farewell(process: int, error: BaseException) -> str:
    """The message to the others when a process makes no more batches because of an error."""
    return _no_batch({process: in_words(error)})


def _no_batch(failed: Mapping[Any, str]) -> str:
    reported = "; ".join(f"process {i}: {text}" for i, text in failed.items())
    return f"there is no batch, as it could not be made in all processes. {reported}"


def _fitting(share: Share, least: int, rows: int | None) -> Share:
    if share.request.tail == "error" or rows is None:
        return share
    return share.of_rows(share.rounded(max(least, rows)))


def _judged(mine: dict[str, Any], tail: Tail, meet: Meet) -> dict[str, Any] | None:
    """The common decision, or None to end. Raises the same error in all processes."""
    judgement = json.loads(meet(json.dumps(mine), functools.partial(_judge, tail)))
    if "failed" in judgement:
        raise RuntimeError(_no_batch(judgement["failed"]))
    if "ended" in judgement:
        fix = (
            "To pad, each process must have had one batch with rows"
            if tail == "pad"
            else "Give all the same number of batches; or write tail='drop', to end with the "
            "first, or tail='pad', to pad until the last"
        )
        raise RuntimeError(
            f"the source of {named(judgement['ended'])} has ended, and that of "
            f"{named(judgement['going'])} has not. {fix}"
        )
    return judgement if "rows" in judgement else None


def _judge(tail: Tail, messages: dict[int, str]) -> str:
    sent = {i: json.loads(text) for i, text in sorted(messages.items())}
    failed = {i: s["failed"] for i, s in sent.items() if "failed" in s}
    if failed:
        return json.dumps({"failed": failed})
    ended = [i for i, s in sent.items() if s["ended"]]
    going = [i for i, s in sent.items() if not s["ended"]]
    if not going or (ended and tail == "drop"):
        return json.dumps({})
    # Only a process that has had a batch can pad.
    if ended and (tail == "error" or not all("rows" in s for s in sent.values())):
        return json.dumps({"ended": ended, "going": going})
    rows = [s["rows"] for s in sent.values() if s["rows"] is not None]
    difference = difference_of(sent)
    # A finished process repeats its last values for leaves without rows.
    news = bool(ended) or any(s["news"] for s in sent.values())
    least_or_most = (min if tail == "drop" else max)(rows, default=None)
    decision = json.dumps({"difference": difference, "rows": least_or_most, "news": news})
    goes_on = news if difference is None else not difference.is_known
    return Continued(decision) if goes_on else decision

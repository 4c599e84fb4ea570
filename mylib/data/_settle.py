"""What processes settle about a batch before they place it."""

import functools
import json
from collections.abc import Mapping
from typing import Any

from .._errors import PlacementError, in_words
from .._processes import Judge, Meet, all_fine, everybodys_faults, faults_in_full, in_brief, named
from ._request import Tail
from ._share import Share

_MEND = (
    "begin the same loops in the same order in every process; read the rows that "
    "mylib.data.reader_shard names, and make all else of a batch in the same way"
)


def settle(
    share: Share, meet: Meet, compared: set[str], rows: int = 0, ended: bool = False
) -> Share | None:
    """The share as it can be placed, having been compared with those of the other processes; of
    `rows` rows at least, where it may be filled up. None, if the sources of all have `ended`.

    `compared` are the kinds of batches of which the numbers have been compared.
    """
    if share.request.is_alone:
        if share.faults:
            raise PlacementError(share.faults)
        return _fitting(share, rows, share.rows).masked(share.rows)
    facts = share.facts()
    brief = in_brief(bool(share.faults), facts)
    kind = share.kind()
    news = bool(share.request.check) or kind not in compared
    said = {**brief, "rows": share.rows, "news": news, "ended": ended}
    judgement = _judged(said, share.request.tail, meet)
    if judgement is None:
        return None
    if judgement["faulty"]:
        raise PlacementError(faults_in_full(meet, share.faults, facts, _MEND))
    fitting = _fitting(share, rows, judgement["rows"])
    if judgement["news"]:
        different = everybodys_faults(meet, [], fitting.values(), _MEND)
        if different:
            raise PlacementError(different)
        compared.add(kind)
    return fitting.masked(share.rows)


def settle_end(tail: Tail, meet: Meet) -> None:
    """Ends with the other processes, having had no batch at all."""
    _judged({"ended": True}, tail, meet)


def settle_failure(error: Exception, tail: Tail, meet: Meet) -> None:
    """Tells the other processes why there is no batch."""
    try:
        meet(json.dumps({"failed": in_words(error)}), _judge_for(tail))
    except TimeoutError:
        # Nobody is there who would want to know.
        pass


def farewell(process: int, error: BaseException) -> str:
    """What the others are told when a process makes no more batches, because of an error."""
    return _no_batch({process: in_words(error)})


def _no_batch(failed: Mapping[Any, str]) -> str:
    told = "; ".join(f"process {i}: {text}" for i, text in failed.items())
    return f"there is no batch, as it could not be made everywhere. {told}"


def _fitting(share: Share, least: int, rows: int | None) -> Share:
    if share.request.tail == "error" or rows is None:
        return share
    rows = max(least, rows) if share.request.tail == "pad" else rows
    return share.with_rows(share.rounded(rows))


def _judged(said: dict[str, Any], tail: Tail, meet: Meet) -> dict[str, Any] | None:
    """What is to be done, None if that is to end; or the error that is the same in all."""
    judgement = json.loads(meet(json.dumps(said), _judge_for(tail)))
    if "failed" in judgement:
        raise RuntimeError(_no_batch(judgement["failed"]))
    if "ended" in judgement:
        mend = (
            "To fill up, each has to have had one batch that has rows"
            if tail == "pad"
            else "Give all the same number of batches; or write tail='drop', to end with the "
            "first, or tail='pad', to fill up until the last"
        )
        raise RuntimeError(
            f"the source of {named(judgement['ended'])} has ended, and that of "
            f"{named(judgement['going'])} has not. {mend}"
        )
    return judgement if "rows" in judgement else None


def _judge_for(tail: Tail) -> Judge:
    return functools.partial(_judge, tail)


def _judge(tail: Tail, said: dict[int, str]) -> str:
    all_said = {i: json.loads(text) for i, text in sorted(said.items())}
    failed = {i: s["failed"] for i, s in all_said.items() if "failed" in s}
    if failed:
        return json.dumps({"failed": failed})
    ended = [i for i, s in all_said.items() if s["ended"]]
    going = [i for i, s in all_said.items() if not s["ended"]]
    if not going or (ended and tail == "drop"):
        return json.dumps({})
    # To fill up, one must have had a batch.
    if ended and (tail == "error" or not all("rows" in s for s in all_said.values())):
        return json.dumps({"ended": ended, "going": going})
    rows = [s["rows"] for s in all_said.values() if s["rows"] is not None]
    return json.dumps(
        {
            "faulty": not all_fine(all_said),
            "rows": (min if tail == "drop" else max)(rows, default=None),
            # Who has ended says again what it said last, of all that has no rows.
            "news": bool(ended) or any(s["news"] for s in all_said.values()),
        }
    )

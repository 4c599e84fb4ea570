"""What the estimates of published steps read of their compiled programs, in a file. To compile all
of these programs takes hours.
"""

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from published import Row

import mylib
from mylib._programs.audit import Message, Work
from mylib._programs.audit.moments import Begin, End
from mylib._programs.audit.work import Loop, Operation

FILE = Path(__file__).with_name("published.json.gz")
Inputs = tuple[Work, list[Message]]


def inputs_of(report: mylib.results.Report) -> Inputs:
    sent = [Message(c.kind, c.axes or (), c.wire_bytes, c.times or 1) for c in report.collectives]
    return report.work, sent


def load() -> dict[str, Any]:
    return json.loads(gzip.decompress(FILE.read_bytes())) if FILE.exists() else {}


def read(row: Row, stored: Mapping[str, Any]) -> Inputs | None:
    """The inputs of a row; None if they are not there, or are of another program."""
    found = stored.get(row.name)
    if found is None or found["program"] != program(row):
        return None
    schedule = tuple(map(_unpacked, found["schedule"]))
    sent = [Message(kind, tuple(axes), *numbers) for kind, axes, *numbers in found["sent"]]
    return Work(found["flops"], found["traffic"], found["unknown"], schedule), sent


def write(found: Iterable[tuple[Row, Inputs]]) -> None:
    """Adds the inputs of rows to the file."""
    stored = load()
    for row, (work, sent) in found:
        stored[row.name] = {
            "program": program(row),
            "flops": work.flops,
            "traffic": work.traffic,
            "unknown": work.unknown,
            "schedule": list(map(_packed, work.schedule)),
            "sent": sent,
        }
    FILE.write_bytes(gzip.compress(json.dumps(stored, sort_keys=True).encode(), mtime=0))


def program(row: Row) -> str:
    """What a row's program depends on."""
    parts = row.size, dict(row.axes), row.work, dict(row.options), row.machine.chip.kinds
    return repr((*map(str, parts), row.machine.shape))


def _packed(step: Any) -> list[Any]:
    if isinstance(step, Loop):
        return ["Loop", step.times, list(map(_packed, step.steps))]
    return [type(step).__name__, *step]


def _unpacked(packed: list[Any]) -> Any:
    kind, *fields = packed
    match kind:
        case "Operation":
            times, flops, *rest = fields
            return Operation(times, tuple((dtype, n) for dtype, n in flops), *rest)
        case "Loop":
            return Loop(fields[0], tuple(map(_unpacked, fields[1])))
        case "Begin":
            return Begin(*fields)
    return End(*fields)

"""What the checks of one client came to. Needs nothing but Python: run.py is run by any."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """**Attributes:** what is wrong, if anything is, and what was returned: of each array, by its
    path, the dtype and shape, the placement, and the numbers.
    """

    about: str
    error: str | None
    results: dict[str, Any] | None
    skipped: bool = False


def records(file: Path) -> Iterator[dict[str, Any]]:
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:  # half written by a process that died
            return


def outcomes(file: Path) -> dict[str, Outcome]:
    """The last that is said of each check."""
    return {
        record["check"]: Outcome(record["about"], record["error"], record["results"])
        for record in records(file)
    }


def difference(one: Any, other: Any) -> str | None:
    """How the results of a check differ, beyond rounding."""
    for path in one.keys() | other.keys():
        if path not in one or path not in other:
            return f"only one has a result{path}"
        a, b = one[path], other[path]
        if not (isinstance(a, list) and isinstance(b, list)):
            if a != b:
                return f"result{path}: {a} and {b}"
            continue
        (kind, where, x), (other_kind, elsewhere, y) = a, b
        if kind != other_kind:
            return f"result{path}: {kind} and {other_kind}"
        if where != elsewhere and not _is_split(where, elsewhere):
            return f"result{path}: at {where} and at {elsewhere}"
        scale = 1 + max((abs(v) for v in x if math.isfinite(v)), default=0)
        for v, w in zip(x, y, strict=True):
            same = v == w or (math.isnan(v) and math.isnan(w)) or abs(v - w) <= 1e-5 * scale
            if not same:
                return f"result{path}: {v} and {w}"
    return None


def _is_split(where: str, elsewhere: str) -> bool:
    """Whether the same devices, which had a copy each, share the array elsewhere."""
    spec, _, devices = where.partition(" of ")
    return spec == "()" and elsewhere.endswith(f" of {devices}")


def is_split(one: Any, other: Any) -> bool:
    """Whether there is such an array among the results."""
    arrays = [path for path, x in one.items() if isinstance(x, list)]
    pairs = [(one[path][1], other[path][1]) for path in arrays]
    return any(a != b and _is_split(a, b) for a, b in pairs)


@dataclass(frozen=True)
class Row:
    """What the table says of a client."""

    client: str
    version: str
    checks: int
    passed: int  # as it is, with Equinox's verbs
    ours: int
    skipped: int
    differences: list[str]  # that is due to us
    failures: list[str]  # of the client itself
    abouts: list[str]
    # Checks without a difference whose results are split with us, and replicated as it is.
    split: list[str] = field(default_factory=list)


def row(client: str, version: str, plain: dict[str, Outcome], ours: dict[str, Outcome]) -> Row:
    differences, failures, split, passed, good, skipped = [], [], [], 0, 0, 0
    for name in plain | ours:
        missing = Outcome("", "was not run", None)
        a, b = plain.get(name, missing), ours.get(name, missing)
        if a.skipped and b.skipped:
            skipped += 1
            continue
        passed += a.error is None
        error = b.error
        if error is None and a.error is None:
            error = difference(a.results, b.results)
            if error is None and is_split(a.results, b.results):
                split.append(name)
        good += error is None
        if a.error is not None:
            failures.append(f"`{name}`: {a.error}")
            if b.error == a.error:
                continue
        if error is not None:
            differences.append(f"`{name}`: {error}")
        elif a.error is not None:
            differences.append(f"`{name}` passes with mylib")
    abouts = list(dict.fromkeys(o.about for o in (plain | ours).values() if o.about))
    return Row(
        client,
        version,
        len(plain | ours),
        passed,
        good,
        skipped,
        differences,
        failures,
        abouts,
        split,
    )

"""Writes groups of processes as text, and reads them; and shortens lists of numbers for readers."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from .series import Processes

# A list of more numbers is written as ranges, and ends after as many of them.
_LONG = 8


def text_of(processes: Processes) -> str:
    """The group as runs with equal steps, `0:1000:1 2000:2008:4`. That is short for large groups,
    too, as they usually contain all processes, or every eighth.
    """
    runs: list[list[int]] = []
    for index in processes:
        run = runs[-1] if runs else []
        if len(run) == 1 or len(run) > 1 and index - run[-1] == run[1] - run[0]:
            run.append(index)
        else:
            runs.append([index])
    steps = [run[1] - run[0] if len(run) > 1 else 1 for run in runs]
    return " ".join(f"{run[0]}:{run[-1] + 1}:{step}" for run, step in zip(runs, steps, strict=True))


def members(group: str) -> list[int]:
    runs = [map(int, run.split(":")) for run in group.split(" ")]
    return [index for run in runs for index in range(*run)]


def in_short(numbers: Sequence[int]) -> str:
    """The numbers in their order: `0, 1, 5`, many as `0..511, 2048..2559`, and very many ranges as
    the first of them `and 4000 more`.
    """
    if len(numbers) <= _LONG:
        return ", ".join(map(str, numbers))
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    text = ", ".join(str(a) if a == b else f"{a}..{b}" for a, b in ranges[:_LONG])
    left = sum(b - a + 1 for a, b in ranges[_LONG:])
    return f"{text} and {left} more" if left else text


def named(indices: Sequence[int]) -> str:
    return f"process{'es' * (len(indices) > 1)} {in_short(indices)}"


def digest(x: Any) -> str:
    return hashlib.blake2b(json.dumps(x).encode(), digest_size=16).hexdigest()

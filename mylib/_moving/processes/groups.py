"""Writes groups of processes as text, and reads them."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from ..._core.text import in_short
from .coordination import Processes


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


def named(indices: Sequence[int]) -> str:
    return f"process{'es' * (len(indices) > 1)} {in_short(indices)}"


def digest(x: Any) -> str:
    return hashlib.blake2b(json.dumps(x).encode(), digest_size=16).hexdigest()

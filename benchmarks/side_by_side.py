"""How the benchmarks measure: ours and its peers in turns, and a table of the ratios."""

import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

Call = Callable[[Any], Any]


class Row(NamedTuple):
    """One line of the table. A row that promises nothing is there to explain the others."""

    work: str
    ours: str
    peer: str
    ratio: float
    promise: str = ""
    kept: bool | None = None

    def cells(self) -> list[str]:
        ratio = f"{self.ratio:.2g}" if self.ratio < 0.1 else f"{self.ratio:.2f}"
        verdict = {None: "", True: "ok", False: "MISSED"}[self.kept]
        return [self.work, self.ours, self.peer, ratio, self.promise, verdict]


_COLUMNS = ("work", "ours", "peer", "ratio", "must reach", "ok")


def print_header(where: str, columns: Sequence[str] = _COLUMNS) -> None:
    versions = ".".join(map(str, sys.version_info[:2])), jax.__version__, eqx.__version__
    print("Python {}, jax {}, equinox {}; {}\n".format(*versions, where))
    print_row(columns)
    print_row(["---"] * len(columns))


def print_row(cells: Sequence[str]) -> None:
    print("|", " | ".join(cells), "|", flush=True)


def race(
    calls: Sequence[Call],
    repeats: float,
    prepare: Callable[[], Any] = lambda: None,
    wait: bool = True,
) -> list[list[float]]:
    """The seconds that each of the calls takes in each turn. Each gets what `prepare` returns, made
    anew, and its results live until the clock has stopped.
    """
    times: list[list[float]] = [[] for _ in calls]
    turns = max(3, round(repeats))
    # Collecting garbage in between must not read all that JAX has allocated, and empty the caches.
    gc.collect()
    gc.freeze()
    for turn in range(-1, turns):
        gc.collect()
        gc.disable()
        # The first turn compiles and fills caches. Going first is no advantage to anyone.
        for n in np.roll(range(len(calls)), turn):
            seconds = stopwatch(calls[n], prepare(), wait)
            if turn >= 0:
                times[n].append(seconds)
        gc.enable()
    gc.unfreeze()
    return times


def stopwatch(call: Call, given: Any, wait: bool = True) -> float:
    start = time.perf_counter()
    result = call(given)
    if wait:
        jax.block_until_ready(result)
    seconds = time.perf_counter() - start
    del result
    return seconds


def duel(
    work: str,
    ours: Call,
    peers: dict[str, Call],
    repeats: float,
    limit: float | None = None,
    prepare: Callable[[], Any] = lambda: None,
    wait: bool = True,
) -> Row:
    """A row of ours against the best of its peers."""
    times = race([ours, *peers.values()], repeats, prepare, wait)
    return max(compare(work, times, peers, limit), key=lambda row: row.ratio)


def compare(
    work: str, times: list[list[float]], peers: Iterable[str], limit: float | None = None
) -> Iterator[Row]:
    """A row for each of the peers, from the times of a race in which ours was the first."""
    for name, theirs in zip(peers, times[1:], strict=True):
        ratio = median(a / b for a, b in zip(times[0], theirs, strict=True))
        peer = f"{name}, {show(median(theirs))}"
        yield Row(work, show(median(times[0])), peer, ratio, *at_most(limit, ratio))


def at_most(limit: float | None, ratio: float) -> tuple[str, bool | None]:
    return ("", None) if limit is None else (f"≤ {limit:g}", ratio <= limit)


def show(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def in_processes(script: str, count: int, devices: int, *options: str) -> list[list[str]]:
    """The rows that a script writes to the file after `--rows`, run in several processes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        here = [f"-n{count}", f"--devices-per-process={devices}"]
        launch = [sys.executable, "-m", "mylib.testing", "launch", *here]
        command = [*launch, script, "--rows", str(path), *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads(path.read_text())

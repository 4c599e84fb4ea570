"""What `mylib.watch` costs: a call of a compiled function, and messages of many processes.

    python benchmarks/watch.py             half a minute
    python benchmarks/watch.py --quick     fewer repeats, for a rough look

`ok` says whether the number is what the library promises.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from side_by_side import Row, in_processes, print_header, print_row, show

import mylib
from mylib._moving.processes import connected, gather
from mylib._moving.watch.news import Bulletin
from mylib._moving.watch.record import Record

# Simulated processes, and the seconds in which each tells its news once.
SIMULATED = 1000
PERIOD = 10.0
# As the longest news of processes that make programs, placements and comparisons.
NEWS = {
    "counts": {f"{kind} 0:{SIMULATED}:1": 123_456 for kind in ("programs", "meetings", "batches")},
    "at": "train.py:131 in train",
    "last": "call 123456, train_step in train.py:131",
    "age": 0.5,
    "state": "running",
    "why": "",
    "recorded": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    scale = 0.2 if options.quick else 1.0
    if options.rows:
        jax.distributed.initialize()
        rows = [row.cells() for row in service()]
        if jax.process_index() == 0:
            options.rows.write_text(json.dumps(rows))
        return
    print_header("one CPU device; then 2 processes, the second of which simulates many")
    for row in calls(scale):
        print_row(row.cells())
    for cells in in_processes(__file__, 2, 1, *sys.argv[1:]):
        print_row(cells)


def calls(scale: float) -> Iterator[Row]:
    """What a call tells the record, by the number of results; and the call without a watch."""
    for results in (1, 1000):
        f = mylib.filter_jit(lambda x, n=results: [x + i for i in range(n)])
        arrays = f(jnp.ones(()))
        jax.block_until_ready(arrays)
        best = min(each(recording(arrays), 20_000 * scale) for _ in range(5))
        whole = each(lambda f=f: f(jnp.ones(())), 200 * scale)
        work = f"record a call with {results} result{'s' * (results > 1)}"
        peer = f"the call itself, {show(whole)}"
        yield Row(work, show(best), peer, best / whole, "≤ 2 µs", best <= 2e-6)


def recording(arrays: list[jax.Array]) -> Callable[[], None]:
    """What a watch does at a call with these results."""
    record, memo = Record(), []
    program, variant = SimpleNamespace(name="f"), SimpleNamespace(key=None)
    call = SimpleNamespace(program=program, variant=variant)
    record.started(call, memo, arrays)  # as when the program is traced
    return lambda: record.started(call, memo, arrays)


def each(act: Callable[[], object], times: float) -> float:
    """The seconds of this thread's own CPU."""
    start = time.thread_time()
    for _ in range(round(times)):
        act()
    return (time.thread_time() - start) / round(times)


def service() -> Iterator[Row]:
    """The time of the process that keeps the service, while another one sends what many would."""
    everybody = (0, 1)
    gather("begin", 0, everybody)
    before = time.process_time()
    wall = 0.0
    if jax.process_index() == 1:
        start = time.perf_counter()
        simulate()
        wall = time.perf_counter() - start
    walls = gather("end", wall, everybody)
    busy = time.process_time() - before
    share = busy / PERIOD
    messages = f"{SIMULATED} messages, sent in {show(max(walls))}"
    work = f"service of {SIMULATED} simulated processes, in {PERIOD:g} s"
    yield Row(work, show(busy), messages, share, "≤ 0.02", share <= 0.02)


def simulate() -> None:
    """The messages of one period: each process tells its news, a third of them look for orders, and
    two read everybody's news twice.
    """
    client = connected()

    def one(index: int) -> None:
        bulletin = Bulletin(client, 1, index)
        bulletin.tell("news", NEWS | {"number": index})
        if index % 3 == 0:
            bulletin.orders()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(one, range(SIMULATED)))
    reader = Bulletin(client, 1, 0)
    for _ in range(4):
        assert len(reader.read("news")) == SIMULATED


if __name__ == "__main__":
    main()

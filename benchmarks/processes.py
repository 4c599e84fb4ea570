"""What several processes cost: tests that run in them, and placing over the devices of all.

    python benchmarks/processes.py            every row, a minute or two
    python benchmarks/processes.py --quick    fewer repeats, for a rough look

Ours and the peer take turns, and a ratio is the median over the turns of our time by the peer's in
the same turn. The times beside it are medians too, and only rough. `ok` says whether the ratio is
what the library promises; a promise that is broken is shown as MISSED.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

# What is started here must not take what is meant for this process.
os.environ.pop("XLA_FLAGS", None)

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from side_by_side import Call, Row, compare, duel, print_header, print_row, show

import mylib
from mylib._processes import Series

TESTS = {"kept": 20, "new": 5}
BODY = """
import jax, numpy as np, pytest
from jax.experimental import multihost_utils

@pytest.mark.parametrize("n", range({tests}))
@pytest.mark.multihost(processes=2, devices_per_process=4, fresh={fresh})
def test_meets(n):
    assert multihost_utils.process_allgather(np.array(n)).tolist() == [n, n]
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    scale = 0.2 if options.quick else 1.0
    if options.rows:
        jax.distributed.initialize()
        rows = [row.cells() for row in (*placing(scale), *checking(scale))]
        if jax.process_index() == 0:
            rows += [row.cells() for row in meeting()]
            options.rows.write_text(json.dumps(rows))
        return
    print_header("2 processes with 4 simulated CPU devices each")
    for row in testing(scale):
        print_row(row.cells())
    for cells in in_processes(options.quick):
        print_row(cells)


def testing(scale: float) -> Iterator[Row]:
    """A test, the start of its processes and of its session shared among those of the session."""

    def session(processes: str) -> float:
        tests, fresh = TESTS[processes], processes == "new"
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "test_them.py").write_text(BODY.format(tests=tests, fresh=fresh))
            start = time.perf_counter()
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
            subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
            return (time.perf_counter() - start) / tests

    turns = [(session("kept"), session("new")) for _ in range(max(1, round(3 * scale)))]
    kept, new = map(list, zip(*turns, strict=True))
    work = f"one of {TESTS['kept']} tests, in processes that are kept"
    yield from compare(work, [kept, new], ["in new ones"], limit=0.2)


def placing(scale: float) -> Iterator[Row]:
    yield from placed(P(), "replicated", scale, limit=0.1)
    yield from placed(P("x"), "split", scale)


def placed(spec: P, where: str, scale: float, limit: float | None = None) -> Iterator[Row]:
    sharding = NamedSharding(line(), spec)
    tree = leaves(200)

    def ours(check: bool | None) -> Call:
        return lambda _: mylib.filter_shard(tree, sharding, check=check)

    peers = {"device_put": lambda _: jax.device_put(tree, sharding)}
    yield duel(f"place 200 NumPy arrays, {where}", ours(None), peers, 10 * scale, limit)
    peers = {"with the check": ours(None)}
    yield duel(f"the same, check=False, {where}", ours(False), peers, 10 * scale)


def checking(scale: float) -> Iterator[Row]:
    sharding = NamedSharding(line(), P())
    tree = leaves(1000)
    there = mylib.filter_shard(tree, sharding)
    yield duel(
        "compare the copies of 1000 arrays",
        lambda _: mylib.check_replicas(there),
        {"device_put, which compares": lambda _: jax.device_put(tree, sharding)},
        5 * scale,
        limit=0.05,
    )
    # The first call has to be linear in the number of arrays: 5 s for 20,000.
    for count in (1000, 4000, 20_000):
        there = mylib.filter_shard(leaves(count), sharding, check=False)
        jax.block_until_ready(there)
        times = [seconds(lambda there=there: mylib.check_replicas(there)) for _ in range(2)]
        limit = 5 * count / 20_000
        work, second = f"the first time, {count} arrays", f"the second time, {show(times[1])}"
        yield Row(
            work, show(times[0]), second, times[0] / times[1], f"≤ {limit:g} s", times[0] <= limit
        )


def meeting() -> Iterator[Row]:
    """What processes exchange before they place values. Threads take their place, as many as there
    are processes, at JAX's own coordination service.
    """
    first = None
    for count in (2, 16, 100, 1000):
        processes = tuple(range(count))
        place = f"mylib/benchmark/{count}"
        everyone = [Series(place, processes, index) for index in processes]
        times = [seconds(lambda everyone=everyone: meet(everyone)) for _ in range(4)]
        best = min(times)
        first = best if first is None else first
        limit, kept = ("≤ 1 s", best <= 1) if count == 1000 else ("", None)
        work, peer = f"{count} processes compare what they place", f"2 processes, {show(first)}"
        yield Row(work, show(best), peer, best / first, limit, kept)


def meet(everyone: Sequence[Series]) -> None:
    def judge(said: dict[int, str]) -> str:
        return "fine" if len(set(said.values())) == 1 else "they differ"

    def one(series: Series) -> None:
        series.say("the checksum of what this process places", judge)
        while series.hear(judge, 10) is None:
            pass
        series.go_on()

    threads = [threading.Thread(target=one, args=(series,)) for series in everyone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def line() -> Mesh:
    return jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


def leaves(count: int) -> list[np.ndarray]:
    """Small arrays of ten shapes, 2 to 20 KB each."""
    return [np.full((8 + 8 * (i % 10), 64), i, np.float32) for i in range(count)]


def in_processes(quick: bool) -> list[list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        launch = [sys.executable, "-m", "mylib.testing", "launch", "-n2", "--devices-per-process=4"]
        script = [__file__, "--rows", str(path), *(["--quick"] if quick else [])]
        subprocess.run([*launch, *script], check=True, stdout=subprocess.DEVNULL)
        return json.loads(path.read_text())


if __name__ == "__main__":
    main()

"""What several processes cost: tests that run in them, placing over the devices of all, and the
meetings at which they compare what they place.

    python benchmarks/processes.py             every row but those of meetings, a minute or two
    python benchmarks/processes.py --quick     fewer repeats, for a rough look
    python benchmarks/processes.py --meetings  meetings of 2 to 32 real processes (6 GB of memory),
                                               and of up to 10,000 simulated ones

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
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from side_by_side import Call, Row, compare, duel, in_processes, print_header, print_row, show

import mylib
from mylib._moving.processes import (
    Series,
    compare as compare_facts,
    difference_of,
    in_brief,
    meeting,
)

# Numbers of processes that meet.
REAL = (2, 4, 8, 16, 32)
SIMULATED = (100, 1000, 10_000)
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
    parser.add_argument("--meetings", action="store_true", help="what meetings cost")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    scale = 0.2 if options.quick else 1.0
    if options.rows:
        jax.distributed.initialize()
        parts = [meetings(scale)] if options.meetings else [placing(scale), checking(scale)]
        rows = [row.cells() for part in parts for row in part]
        if jax.process_index() == 0:
            if options.meetings and jax.process_count() == 2:
                rows += [row.cells() for row in simulated_meetings()]
            options.rows.write_text(json.dumps(rows))
        return
    if options.meetings:
        print_header("processes with 1 simulated CPU device each")
        for count in REAL:
            for cells in in_processes(__file__, count, 1, *sys.argv[1:]):
                print_row(cells)
        return
    print_header("2 processes with 4 simulated CPU devices each")
    for row in testing(scale):
        print_row(row.cells())
    for cells in in_processes(__file__, 2, 4, *sys.argv[1:]):
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
    tree = leaves_of(200)

    def ours(check: bool | None) -> Call:
        return lambda _: mylib.filter_shard(tree, sharding, check=check)

    peers = {"device_put": lambda _: jax.device_put(tree, sharding)}
    yield duel(f"place 200 NumPy arrays, {where}", ours(None), peers, 10 * scale, limit)
    peers = {"with the check": ours(None)}
    yield duel(f"the same, check=False, {where}", ours(False), peers, 10 * scale)


def checking(scale: float) -> Iterator[Row]:
    sharding = NamedSharding(line(), P())
    tree = leaves_of(1000)
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
        there = mylib.filter_shard(leaves_of(count), sharding, check=False)
        jax.block_until_ready(there)
        times = [seconds(lambda there=there: mylib.check_replicas(there)) for _ in range(2)]
        limit = 5 * count / 20_000
        work, second = f"the first time, {count} arrays", f"the second time, {show(times[1])}"
        yield Row(
            work, show(times[0]), second, times[0] / times[1], f"≤ {limit:g} s", times[0] <= limit
        )


def meetings(scale: float) -> Iterator[Row]:
    """Real processes compare what they would place."""
    everybody = tuple(range(jax.process_count()))
    meet, count = meeting("benchmark", everybody), f"{len(everybody)} processes"
    one = np.zeros(1, np.int32)
    for leaves in (1, 10_000) if len(everybody) == 2 else (1,):
        facts = {everybody: facts_about(leaves)}
        yield duel(
            f"{count} compare what they would place: {leaves} lea{'f' if leaves == 1 else 'ves'}",
            lambda _, facts=facts: compare_facts(meet, [], facts),
            {"multihost_utils.assert_equal": lambda _: multihost_utils.assert_equal(one)},
            20 * scale,
        )
    tree, sharding = leaves_of(10), NamedSharding(jax.make_mesh((len(everybody),), ("x",)), P())
    yield duel(
        f"{count} place 10 arrays",
        lambda _: mylib.filter_shard(tree, sharding),
        {"device_put, which compares": lambda _: jax.device_put(tree, sharding)},
        5 * scale,
    )


def simulated_meetings() -> Iterator[Row]:
    """A few threads take the place of many processes, at JAX's own coordination service. The time
    includes what in reality each process does for itself.
    """
    for count in SIMULATED:
        processes = tuple(range(count))
        place = f"mylib/benchmark/{count}"
        everyone = [Series(place, processes, index) for index in processes]
        message = json.dumps(in_brief([], {processes: facts_about(1)}))
        times = [seconds(lambda m=message, e=everyone: meet_all(m, e)) for _ in range(3)]
        best = min(times)
        limit, kept = ("≤ 1 s", best <= 1) if count == 1000 else ("", None)
        each = f"{show(best / count)} and {len(message)} bytes a process"
        work = f"{count} simulated processes: 1 leaf"
        yield Row(work, show(best), each, best / times[-1], limit, kept)


def meet_all(message: str, everyone: Sequence[Series]) -> None:
    def judge(said: dict[int, str]) -> str:
        return json.dumps(difference_of({i: json.loads(text) for i, text in said.items()}))

    def some(share: Sequence[Series]) -> None:
        for series in share:
            series.say(message, judge)
        for series in share:
            while series.hear(judge, 10) is None:
                pass
            series.go_on()

    count = min(len(everyone), 64)
    threads = [threading.Thread(target=some, args=(everyone[i::count],)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def facts_about(leaves: int) -> dict[str, str]:
    what = "float32[8, 64] as NamedSharding(mesh=Mesh('x': 8), spec=P()) on devices 0..7"
    return {f".layers[{i}].weight": f"{what} (checksum {i:016x})" for i in range(leaves)}


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def line() -> Mesh:
    return jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


def leaves_of(count: int) -> list[np.ndarray]:
    """Small arrays of ten shapes, 2 to 20 KB each."""
    return [np.full((8 + 8 * (i % 10), 64), i, np.float32) for i in range(count)]


if __name__ == "__main__":
    main()

"""`mylib.watch` in several processes: who is stuck is named, soon, and nobody else."""

import logging
import os
import re
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mylib
from mylib._core.compat import coordination_client
from mylib.testing import barrier, gather

JOB = Path(__file__).with_name("job.py")
LIMIT = 3.0
# A report comes within so many seconds of the limit.
SOON = 5.0

processes = pytest.mark.multihost(processes=2, devices_per_process=2, timeout=120)


@pytest.fixture
def mesh():
    return mylib.make_mesh(d=-1)


class _Reports(logging.Handler):
    """The reports of this process; and whether any process has made one."""

    def __init__(self, path):
        super().__init__()
        self.texts = []
        self._path = path / "reported"

    def emit(self, record):
        if "mylib.watch" in record.getMessage():
            self.texts.append(record.getMessage())
            self._path.touch()

    def wait(self):
        """Until one has come: so long this process is stuck."""
        until = time.monotonic() + 60
        while time.monotonic() < until and not self._path.exists():
            time.sleep(0.05)


@pytest.fixture
def reports(multihost_tmp_path):
    handler = _Reports(multihost_tmp_path)
    logging.getLogger("mylib").addHandler(handler)
    yield handler
    logging.getLogger("mylib").removeHandler(handler)


def _keys():
    client = coordination_client()
    assert client is not None
    return client.key_value_dir_get("mylib/watch/")


@processes
def test_a_process_that_does_not_come_to_a_program(mesh, reports):
    """Process 1 waits, is named by process 0, and goes on."""
    total = mylib.filter_jit(lambda x: x.sum(), out_shardings=P(), mesh=mesh)
    x = mylib.filter_shard(np.ones(4, np.float32), P("d"), mesh=mesh)
    before = threading.active_count()
    with mylib.watch(stuck_after=2):
        for step in range(3):
            if step == 2 and jax.process_index() == 1:
                reports.wait()
            assert float(total(x)) == 4
        barrier()
    told = gather(reports.texts)
    assert len(told[0]) == 1 and told[1] == []
    first = told[0][0].splitlines()[0]
    assert "process 1 is 1 call behind process 0, and has not made <lambda> in test_w" in first
    assert re.search(r"it is at test_watch_processes.py:\d+ in wait", first)
    # The thread that compares calls, and those of meetings, are there for later ones.
    assert threading.active_count() <= before + 3
    assert not any("lookout" in x.name for x in threading.enumerate())
    barrier()
    assert not _keys()


@pytest.mark.slow
@processes
def test_a_process_that_does_not_come_to_compare(mesh, reports):
    with mylib.watch(stuck_after=2):
        if jax.process_index() == 0:
            reports.wait()
        mylib.filter_shard(np.ones(4, np.float32), P("d"), mesh=mesh)
        barrier()
    (text,) = [x for told in gather(reports.texts) for x in told]
    assert "process 0 is 1 comparison behind process 1, and has not come to compare" in text


@pytest.mark.slow
@processes
def test_a_process_that_works_is_waited_for(mesh, reports):
    total = mylib.filter_jit(lambda x: x.sum(), out_shardings=P(), mesh=mesh)
    x = mylib.filter_shard(np.ones(4, np.float32), P("d"), mesh=mesh)
    mine = mylib.filter_jit(lambda x: x + 1)
    with mylib.watch(stuck_after=2):
        float(total(x))
        if jax.process_index() == 1:
            until = time.monotonic() + 5
            while time.monotonic() < until:
                float(mine(1.0 * np.ones(())))
                time.sleep(0.1)
        assert float(total(x)) == 4
        barrier()
    assert gather(reports.texts) == [[], []]


@processes
def test_nobody_waits_to_leave():
    """A watch may be left at the very moment at which its thread tells something."""
    for i in range(60):
        with mylib.watch(stuck_after=60):
            time.sleep(0.045 + i % 20 * 0.001)
            left = time.monotonic()
        assert time.monotonic() - left < 4


def _run(case, count, checkout_env):
    """The status and the output of a job, and when it says that it hangs."""
    launch = [sys.executable, "-m", "mylib.testing", "launch", "-n", str(count)]
    with subprocess.Popen(
        [*launch, str(JOB), case, str(LIMIT)],
        env=checkout_env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as started:
        assert started.stdout is not None
        lines, reported = [], None
        # Its guard then ends the processes.
        too_late = threading.Timer(200, started.kill)
        too_late.start()
        for line in started.stdout:
            lines.append(line)
            if "mylib.watch: no progress" in line:
                reported = reported or time.time()
        status = started.wait(120)
        too_late.cancel()
    text = "".join(lines)
    hung = [float(x) for x in re.findall(r"hangs at ([\d.]+)", text)]
    took = reported - max(hung) if reported and hung else None
    return status, text, took


# What the first line of the report says.
CASES = {
    "sleeps": r"process 1 is 1 call behind process 0, and has not made step .* in hang",
    "swallows": r"process 1 is 1 call behind process 0, and has not made step .* in hang",
    "skips": r"call 6 of processes 0, 1 is evaluate .* in process 0, but step .* in process 1",
    "exchanged": r"call 6 of processes 0, 1 is step .* in process 0, but evaluate .* process 1",
    "arguments": r"is <lambda> (in job.py:\d+) for float32\[4\] \(checksum (\w+)\) in process 0, "
    r"but <lambda> \1 for float32\[4\] \(checksum (?!\2)\w+\) in process 1",
    "loader": r"the loader of process 1 has not made its next batch: it is at job.py:\d+ in hang",
    "stopped": r"process 1 has not been heard of",
    "stopped0": r"the coordination service, which process 0 keeps, has not answered",
    "lock": r"process 1 has not been heard of .* Python's lock",
    "lock0": r"process 0 has not been heard of .* Python's lock",
    "callback": r"a callback of process 1 has not returned: it is at job.py:\d+ in hang",
    "first": r"process 1 is 1 batch behind process 0: it is at job.py:\d+ in hang",
    "main0": r"process 0 is 1 call behind process 1, and has not made step .* in hang",
    "leaves": r"process 1 has left this mylib.watch",
    "raises": r"process 1 has left this mylib.watch by ValueError: a bad sample",
    "placement": r"process 1 is 1 comparison behind process 0, and has not come to compare",
    "absent": r"process 1 has not come to this mylib.watch",
    "plain": r"process 1 is 1 step behind process 0: it is at job.py:\d+ in hang",
}
# The others differ less from those that every day's tests show.
SLOW = {"skips", "arguments"}


def _marked(case):
    return pytest.param(case, marks=pytest.mark.slow if case in SLOW else pytest.mark.thorough)


@pytest.mark.parametrize("case", [*map(_marked, CASES)])
def test_a_job_that_hangs(case, checkout_env):
    status, text, took = _run(case, 2, checkout_env)
    assert status == 87, text
    first = next(line for line in text.splitlines() if "mylib.watch: no progress" in line)
    assert re.search(CASES[case], first), text
    assert took is not None and took < LIMIT + SOON, text


@pytest.mark.thorough
@pytest.mark.parametrize("count", [4, 8])
def test_many_processes(count, checkout_env):
    status, text, _ = _run("sleeps", count, checkout_env)
    assert status == 87, text
    others = ", ".join(map(str, range(count - 1)))
    assert f"process {count - 1} is 1 call behind processes {others}, and has not" in text
    assert text.count("Processes 0, ") == 1  # those at the same place are described together


@contextmanager
def _busy_cores():
    """As many endless loops as there are cores."""
    command = [sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.mark.thorough
@pytest.mark.parametrize("case", ["slow", "compiles", "paused"])
def test_no_false_alarm(case, checkout_env):
    with _busy_cores():
        status, text, _ = _run(case, 2, checkout_env)
    assert status == 0 and "mylib.watch" not in text, text
    assert text.count("over []") == 2

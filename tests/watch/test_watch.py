"""`mylib.watch` in one process."""

import gc
import logging
import re
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contexts import AUTO as MESH
from jax.sharding import PartitionSpec as P
from scripts import run_python

import mylib
from mylib._core import watched as _watched
from mylib._moving.watch.record import Record, ended_of

LIMIT = 1.0


@pytest.fixture
def reports(caplog):
    caplog.set_level(logging.ERROR, "mylib")
    return lambda: [x.getMessage() for x in caplog.records if "mylib.watch" in x.getMessage()]


def _within(seconds, condition):
    until = time.monotonic() + seconds
    while time.monotonic() < until and not condition():
        time.sleep(0.02)
    return condition()


@pytest.fixture
def record(monkeypatch):
    found = Record()
    monkeypatch.setattr(_watched, "record", found)
    return found


def test_a_callback_that_does_not_return(reports):
    goes_on = threading.Event()

    def waits(x):
        goes_on.wait(60)
        return x

    x = jnp.ones(8)

    @mylib.filter_jit
    def step(x):
        return jax.pure_callback(waits, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    def go_on():
        _within(30, reports)
        goes_on.set()

    before = threading.active_count()
    other = threading.Thread(target=go_on)
    with mylib.watch(stuck_after=LIMIT):
        other.start()
        start = time.monotonic()
        jax.block_until_ready(step(x))
        assert time.monotonic() - start < LIMIT + 5
    other.join()
    (text,) = reports()
    assert "a callback of process 0 has not returned: it is at" in text
    assert "test_watch.py" in text and "in waits" in text and "step in test_watch.py" in text
    assert _watched.record is None and threading.active_count() <= before


def test_progress_and_pauses_are_no_standstill(reports):
    with mylib.watch(stuck_after=0.4) as watch:
        for _ in range(8):
            time.sleep(0.1)
            watch.step()
        with watch.paused():
            time.sleep(0.8)
        assert not reports()
        assert _within(10, reports)
        time.sleep(0.5)
    (text,) = reports()  # once for each standstill
    assert text.startswith("mylib.watch: no progress for ")
    assert "in test_progress_and_pauses_are_no_standstill" in text


def test_calls_with_mistakes():
    with pytest.raises(ValueError, match="more than 0"):
        mylib.watch(stuck_after=0)
    with mylib.watch(stuck_after=60), pytest.raises(RuntimeError, match="another mylib.watch"):
        mylib.watch(stuck_after=60).__enter__()
    with pytest.raises(RuntimeError, match="not active"), mylib.watch(stuck_after=60).paused():
        pass


def test_what_is_recorded(record):
    step = mylib.filter_jit(lambda x: (x + 1, x.sum()))
    x = mylib.filter_shard(np.ones((8, 1024), np.float32), P("data"), mesh=MESH)
    for _ in range(3):
        x, loss = step(x)
    jax.block_until_ready(loss)
    placed, *calls = record.calls()
    assert placed.witness.name == "placement of 1 array" and placed.number == 1
    assert [call.number for call in calls] == [1, 2, 3]
    assert calls[0].witness.name == "<lambda>" and "<lambda> in test_watch.py:" in calls[0].text
    assert record.counts() == {"placements 0:1:1": 1, "programs 0:1:1": 3}
    assert ended_of(calls) == [True] * 3 and calls[0].busy() == []
    # The small result is kept, the others are not.
    assert calls[-1].held is loss
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None


def test_arguments_of_calls(record):
    """They are told apart by shapes, dtypes and static arguments."""
    step = mylib.filter_jit(lambda x, *static: x + 1)
    x, y = jnp.ones(3), jnp.ones(4)
    for args in ((x,), (2 * x,), (y,), (jnp.arange(3),), (x, "static"), (x, "other")):
        step(*args)
    told = [call.witness.arguments for call in record.calls()]
    assert told[0] == told[1] and len({*told}) == len(told) - 1
    assert re.match(r"for float32\[3\] \(checksum \w+\)", told[0])


def test_results_that_are_donated(record):
    """Another one is kept next time; if none is left, nothing tells whether the call has ended."""
    step = mylib.filter_jit(lambda x, n: (x + 1, n + 1), donate="all")
    x, n = jnp.ones(3), jnp.ones(())
    for _ in range(6):
        x, n = step(x, n)
        record.look()
    assert [call.position for call in record.calls()] == [1, 1, 0, 0, -1, -1]
    jax.block_until_ready(x)
    assert ended_of(record.calls()) == [True] * 6


def test_staged_calls_are_not_recorded(record):
    f = mylib.filter_jit(lambda x: x + 1)
    jax.jit(f)(jnp.ones(3))
    jax.grad(lambda x: f(x).sum())(jnp.ones(3))
    assert not record.calls()


def test_few_calls_are_remembered(record):
    f = mylib.filter_jit(lambda x: x + 1)
    x = jnp.ones(3)
    for _ in range(100):
        x = f(x)
    assert len(record.calls()) == 64 and record.calls()[-1].number == 100


def test_what_audit_knows(record):
    from mylib._moving.watch.news import record_of

    f = mylib.filter_jit(lambda x: x.sum(), out_shardings=P(), mesh=MESH)
    x = mylib.filter_device_put(np.ones(8, np.float32), P("data"), mesh=MESH)
    mylib.audit(f, x)
    f(x)
    (variant,) = [v() for v in [record.calls()[-1].witness.variant]]
    assert [c.kind for c in variant.collectives] == ["all-reduce"]
    told = record_of(record, {}, 0)["calls"][-1]
    assert told.number == 1 and told.communicates in ("", "all-reduce over data")


ENDED = """
import time, mylib
with mylib.watch(stuck_after=0.5, end=True):
    print("begins", flush=True)
    time.sleep(60)
"""


def test_the_status_of_a_process_that_is_ended(checkout_env):
    done = run_python("-c", ENDED, env=checkout_env)
    assert done.returncode == 87, done.stderr
    assert "no progress" in done.stderr and "in <module>" in done.stderr
    assert done.stdout == "begins\n"


@pytest.mark.slow
def test_memory_of_many_steps():
    import resource

    step = mylib.filter_jit(lambda x: (x + 1, x.sum()), donate="all")
    x = jnp.ones(4096)

    def run(steps):
        nonlocal x
        for _ in range(steps):
            x, loss = step(x)
        jax.block_until_ready(loss)
        gc.collect()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, len(gc.get_objects())

    with mylib.watch(stuck_after=60):
        most, objects = run(2000)
        first, _ = run(20_000)
        later, more = run(20_000)
    # Of a process with other tests before it, the most may grow once. A leak grows each time.
    assert min(first - most, later - first) < 10_000  # KiB
    assert more - objects < 1000

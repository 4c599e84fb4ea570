"""Processes that are not in step: late, interrupted, or with other calls. They are told."""

import importlib
import os
import signal
import threading
import time
from contextlib import nullcontext, suppress

import jax
import numpy as np
import pytest
from agreeing import all_equal, fails
from jax.sharding import Mesh, PartitionSpec as P
from stopping import stopped_for

import mylib
from mylib.testing import barrier, gather

pytestmark = pytest.mark.multihost(processes=2, devices_per_process=2)


@pytest.fixture
def mesh() -> Mesh:
    return mylib.make_mesh(d=-1)


def _place(mesh: Mesh, value: float) -> jax.Array:
    return mylib.filter_shard(np.full(4, value, np.float32), P("d"), mesh=mesh)


def _whole(x: jax.Array) -> list[float]:
    own = [shard.data.item(0) for shard in x.addressable_shards]
    return [value for values in gather(own) for value in values]


def _interrupt_after(seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer


def test_a_late_process_does_not_meet_a_later_call(mesh, monkeypatch):
    barrier()
    monkeypatch.setenv("MYLIB_EXCHANGE_TIMEOUT", "0.5")
    if jax.process_index() == 1:
        time.sleep(0.8)
    made: dict[int, list[float]] = {}
    for step in (1, 2, 3):
        with suppress(TimeoutError):
            made[step] = [s.data.item(0) for s in _place(mesh, step).addressable_shards]
    assert all(value == step for step, values in made.items() for value in values)
    all_equal(sorted(made))
    assert 1 not in made
    monkeypatch.delenv("MYLIB_EXCHANGE_TIMEOUT")
    assert _whole(_place(mesh, 7)) == [7] * 4


def test_an_interrupted_call_fails_in_all_and_the_next_one_works(mesh):
    _place(mesh, 0)
    barrier()
    start = time.monotonic()
    if jax.process_index() == 0:
        _interrupt_after(0.3)
        with pytest.raises(KeyboardInterrupt):
            _place(mesh, 1)
        # Not the minutes that it would wait for the other one.
        assert time.monotonic() - start < 60
    barrier()
    if jax.process_index() == 1:
        with pytest.raises(TimeoutError, match=r"process 0 was interrupted \(KeyboardInterrupt\)"):
            _place(mesh, 1)
    assert _whole(_place(mesh, 2)) == [2] * 4


def test_an_error_before_the_processes_meet_counts(mesh):
    """Here one in the middle of a checksum."""

    class Odd(np.ndarray):
        def __getitem__(self, index):
            raise KeyboardInterrupt

    x = np.full(4, 1, np.float32)
    if jax.process_index() == 0:
        with pytest.raises(KeyboardInterrupt):
            mylib.filter_shard(x.view(Odd), P(), mesh=mesh)
    else:
        with pytest.raises(TimeoutError, match="process 0 was interrupted"):
            mylib.filter_shard(x, P(), mesh=mesh)
    assert _whole(_place(mesh, 2)) == [2] * 4


def test_an_interrupt_between_the_two_meetings_of_a_refused_call(mesh, monkeypatch):
    """The first one finds a difference, the second one says which."""
    agreement = importlib.import_module("mylib._moving.processes.agreement")

    def interrupted(*_):
        raise KeyboardInterrupt

    def make(value: float) -> None:
        mylib.filter_shard(np.full(4, value, np.float32), P(), mesh=mesh)

    me = jax.process_index()
    with monkeypatch.context() as patched:
        if me == 0:
            patched.setattr(agreement, "faults_in_full", interrupted)
        with pytest.raises((KeyboardInterrupt, TimeoutError)) as caught:
            make(me)
    assert me == 0 or "process 0 was interrupted (KeyboardInterrupt)" in str(caught.value)
    # Equal calls are not refused, and others are, by their own difference.
    make(2)
    with pytest.raises(mylib.PlacementError, match="it differs between them"):
        make(3 + me)
    assert _whole(_place(mesh, 2)) == [2] * 4


def test_two_threads(mesh):
    """Their order may be another one in each process."""
    _place(mesh, 0)
    barrier()
    if jax.process_index() == 0:
        first = threading.Thread(target=lambda: _place(mesh, 1))
        first.start()
        time.sleep(0.2)
        with pytest.raises(RuntimeError, match="two threads"):
            _place(mesh, 2)
        barrier()
        first.join()
    else:
        barrier()
        _place(mesh, 1)
    assert _whole(_place(mesh, 3)) == [3] * 4


@pytest.mark.multihost(processes=2, devices_per_process=2, fresh=True)
def test_other_calls(mesh):
    placed = mylib.filter_shard(np.zeros(4, np.float32), P(), mesh=mesh)
    with pytest.raises(mylib.mpmd.TransferError) as caught:
        if jax.process_index() == 0:
            mylib.check_replicas(placed)
        else:
            _place(mesh, 1)
    text = str(caught.value)
    all_equal(text)
    assert "check_replicas in test_order.py" in text and "placement in test_order.py" in text
    with pytest.raises(mylib.mpmd.TransferError, match="make other calls"):
        _place(mesh, 1)


@pytest.mark.multihost(processes=2, devices_per_process=2, fresh=True)
def test_other_programs_before_a_meeting(mesh):
    """Each has mixed the shards of two arrays. The next call says so, and which they are."""
    a, b = _place(mesh, 0), _place(mesh, 1)
    for x in (a, b) if jax.process_index() == 0 else (b, a):
        mylib.filter_shard(x, P(), mesh=mesh)
    text = fails(mylib.mpmd.TransferError, _place, mesh, 2)
    assert "placed on processes 0, 1" in text and "#1[0]" in text and "#2[0]" in text


@pytest.mark.slow
def test_a_process_that_is_stopped_and_goes_on(mesh, monkeypatch):
    """Its call fails in both if the other one gives up; the next one works."""
    for limit, works in (("60", True), ("1", False)):
        _place(mesh, 0)
        barrier()
        monkeypatch.setenv("MYLIB_EXCHANGE_TIMEOUT", limit)
        with stopped_for(3) if jax.process_index() == 1 else nullcontext():
            if jax.process_index() == 1:
                time.sleep(1.5)  # in which it stops
            try:
                assert _whole(_place(mesh, 1)) == [1] * 4 and works
            except TimeoutError:
                assert not works
        monkeypatch.setenv("MYLIB_EXCHANGE_TIMEOUT", "60")
        assert _whole(_place(mesh, 2)) == [2] * 4


@pytest.mark.slow
# In the midst of an import, Python closes the file later, and says so; in a finalizer, it goes on.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.multihost(processes=2, devices_per_process=2, fresh=True)
def test_interrupts_at_random_moments(mesh):
    """Calls that return in both processes are of one step: values that differ would be an error."""
    me, rng = jax.process_index(), np.random.default_rng(jax.process_index())
    inside = False

    def interrupt(signum, frame):
        if inside:
            raise KeyboardInterrupt

    old = signal.signal(signal.SIGINT, interrupt)
    interrupted = told = 0
    for step in range(50):
        timer = _interrupt_after(rng.uniform(0, 0.01)) if step % 2 == me else None
        try:
            inside = True
            mylib.filter_shard(np.full(4, step, np.float32), P(), mesh=mesh)
            inside = False
        except KeyboardInterrupt:
            interrupted += 1
        except TimeoutError as error:
            assert "was interrupted" in str(error)
            told += 1
        inside = False
        if timer is not None:
            timer.join()
            time.sleep(0.02)
    signal.signal(signal.SIGINT, old)
    # As many as were interrupted before the other one had heard.
    assert gather([interrupted, told])[1 - me][1] <= interrupted
    assert _whole(_place(mesh, 99)) == [99] * 4

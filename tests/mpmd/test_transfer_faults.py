"""Transfers that only one side makes, or that both make differently: errors on both sides."""

import os
import signal
import socket
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreeing import all_equal, fails
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from stopping import stopped_for

import mylib
from mylib import mpmd
from mylib._moving.processes import comparison
from mylib.testing import barrier

# Every test breaks the connections of its processes, so each has processes of its own.
pytestmark = pytest.mark.multihost(processes=2, devices_per_process=2, fresh=True)

X: Any = np.arange(8, dtype=np.float32)


def _meshes() -> list[Mesh]:
    devices = np.array(jax.devices()).reshape(2, 2)
    return [Mesh(d, ("data",), axis_types=(AxisType.Auto,)) for d in devices]


def _connected() -> tuple[jax.Array, Mesh, Mesh]:
    """An array on the first of two meshes, between which a transfer has worked."""
    first, second = _meshes()
    x = mylib.filter_device_put(X, P("data"), mesh=first)
    there = mpmd.transfer(x, P(), mesh=second)
    np.testing.assert_array_equal(mpmd.fetch(mpmd.transfer(there, P(), mesh=first)), X)
    return x, first, second


@pytest.fixture
def seconds(monkeypatch):
    """Sets for how many seconds processes wait for each other. Not from the beginning: on a busy
    machine they are further apart until they have met.
    """
    return lambda count: monkeypatch.setenv("MYLIB_EXCHANGE_TIMEOUT", str(count))


def _next_error(*between: Mesh) -> str:
    """The error of the first transfer after the one that failed."""
    first, second = between or _meshes()
    mine, other = (second, first) if jax.process_index() and not between else (first, second)
    until = time.monotonic() + 60
    # Not by trying: that would be another transfer without its other side.
    while not comparison().failures and time.monotonic() < until:
        time.sleep(0.1)
    x = mylib.filter_device_put(X, P(), mesh=mine)
    with pytest.raises(mpmd.TransferError) as caught:
        mpmd.transfer(x, P(), mesh=other)
    return str(caught.value)


def test_another_dtype_than_was_asked_for():
    x, first, second = _connected()
    own = X if jax.process_index() == 0 else X.astype(np.int32)
    y = mylib.filter_device_put({"weight": own}, P("data"), mesh=first)
    start = time.monotonic()
    z = mpmd.transfer(y, P(), mesh=second)
    if jax.process_index() == 1:
        # Not the bits of other numbers.
        with pytest.raises(jax.errors.JaxRuntimeError):
            np.asarray(z["weight"])
    text = _next_error()
    assert time.monotonic() - start < 60
    all_equal(text)
    assert "is float32[8] in " in text and "in process 0, but int32[8] in " in text
    assert "['weight'], placed on process 0 in test_transfer_faults.py" in text


def _pair() -> tuple[list[jax.Array], Mesh]:
    """Two arrays, in another order in the second process, and another mesh."""
    x, first, second = _connected()
    double = mpmd.jit(lambda x: 2 * x, mesh=first)
    pair = [double(x), double(x)]
    return pair[:: 1 if jax.process_index() == 0 else -1], second


def _everywhere() -> Mesh:
    return mylib.make_mesh(data=-1)


def test_calls_in_another_order():
    """No number of another array arrives, though both are as large, and sent by one line."""
    pair, second = _pair()
    moved = [mpmd.transfer(x, P(), mesh=second) for x in pair]
    if jax.process_index() == 1:
        with pytest.raises((jax.errors.JaxRuntimeError, mpmd.TransferError)):
            np.asarray(moved[0])
    text = _next_error()
    all_equal(text)
    assert text.count("<lambda> on process 0") == 2 and "#1[0]" in text and "#2[0]" in text
    assert text.count("in test_transfer_faults.py:") == 4


@pytest.mark.slow
def test_arrays_of_all_processes_in_another_order():
    """Fetched: their values come from all of them."""
    a, b = (mylib.filter_shard(X + i, P("data"), mesh=_everywhere()) for i in (0, 100))
    mpmd.fetch(a)
    pair = [a, b][:: 1 if jax.process_index() == 0 else -1]
    text = fails(mpmd.TransferError, mpmd.fetch, pair[0])
    assert "placed on processes 0, 1 in test_transfer_faults.py" in text


def test_programs_in_another_order():
    """Over one set of devices a program mixes the shards. What is read next is an error."""
    everywhere = _everywhere()
    a, b = (mylib.filter_shard(X + i, P("data"), mesh=everywhere) for i in (0, 100))
    pair = [a, b][:: 1 if jax.process_index() == 0 else -1]
    start = time.monotonic()
    for x in pair:
        mpmd.transfer(x, P(), mesh=everywhere)
    while not comparison().failures and time.monotonic() < start + 60:
        time.sleep(0.1)
    fails(mpmd.TransferError, mpmd.fetch, a)
    text = fails(mpmd.TransferError, mpmd.transfer, a, P(), mesh=everywhere)
    assert time.monotonic() - start < 60
    assert "placed on processes 0, 1" in text


@pytest.mark.thorough
def test_to_and_fro_in_another_order():
    """Each process waits for the other one's array before it can send its own."""
    x, first, second = _connected()
    y = mylib.filter_device_put(X, P("data"), mesh=second)
    calls = [(x, second), (y, first)][:: 1 if jax.process_index() == 1 else -1]
    for array, mesh in calls:
        mpmd.transfer(array, P("data"), mesh=mesh)
    all_equal(_next_error())


@pytest.mark.multihost(processes=3, devices_per_process=2, fresh=True)
def test_a_circle():
    """Every two processes agree on their order, and yet each waits for another one."""
    me, devices = jax.process_index(), np.array(jax.devices()).reshape(3, 2)
    meshes = [Mesh(d, ("data",), axis_types=(AxisType.Auto,)) for d in devices]
    places = [NamedSharding(mesh, P("data")) for mesh in meshes]
    x = [mylib.filter_device_put(X, place) for place in places]
    for i in range(3):
        mpmd.fetch(mpmd.transfer(x[i], places[(i + 1) % 3]))

    def send(x: jax.Array, to: int) -> jax.Array:
        return mpmd.transfer(x, places[to])

    # What each gives is computed from what it takes.
    add = [jax.jit(lambda x: x + 1, out_shardings=place) for place in places]
    got = send(add[me - 1](x[me - 1]), me)
    send(add[me](got), (me + 1) % 3)
    start = time.monotonic()
    while not comparison().failures and time.monotonic() < start + 60:
        time.sleep(0.1)
    (text,) = comparison().failures.values()
    assert text.startswith("processes wait for each other: process 0 for float32[8] in 2 parts")
    all_equal(text)
    with pytest.raises((jax.errors.JaxRuntimeError, mpmd.TransferError)):
        np.asarray(got)
    with pytest.raises(mpmd.TransferError, match="wait for each other"):
        send(x[me], (me + 1) % 3)


@pytest.mark.slow
def test_a_circle_with_a_meeting(seconds):
    """One process waits to place values together, the other one for an array that comes later: both
    give up after the timeout.
    """
    x, first, second = _connected()
    everywhere = mylib.make_mesh(data=-1)
    mylib.filter_shard(X, P(), mesh=everywhere)
    seconds(5)
    barrier()
    start = time.monotonic()
    with pytest.raises((TimeoutError, mpmd.TransferError), match="within 5 s"):
        if jax.process_index() == 0:
            mylib.filter_shard(X, P(), mesh=everywhere)
        mpmd.fetch(mpmd.transfer(x, P(), mesh=second))
    assert time.monotonic() - start < 20


def test_two_threads():
    x, first, second = _connected()
    if jax.process_index() == 0:
        both, errors = threading.Barrier(2), []

        def send() -> None:
            for _ in range(200):
                both.wait(10)
                try:
                    mpmd.transfer(x, P(), mesh=second)
                except RuntimeError as error:
                    errors.append(str(error))
                both.wait(10)
                if errors:
                    return

        other = threading.Thread(target=send)
        other.start()
        send()
        other.join()
        assert errors and "two threads send arrays between the same processes" in errors[0]
    barrier()


@pytest.mark.slow
def test_a_process_that_is_stopped_and_goes_on():
    x, first, second = _connected()
    add = mpmd.jit(lambda x, i: x + i, mesh=first)
    with stopped_for(3) if jax.process_index() == 0 else nullcontext():
        for i in range(60):
            y = mpmd.transfer(add(x, np.float32(i)), P(), mesh=second)
            np.testing.assert_array_equal(mpmd.fetch(y), X + i)
            time.sleep(0.05)
    assert not comparison().failures


@pytest.mark.slow
# In the midst of an import, Python closes the file later, and says so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_an_interrupt_at_a_random_moment(seed, seconds):
    """All calls after it are right, or an error in both processes. None waits for ever.

    An interrupt before a call skips it, and leaves nothing behind: the next one must differ.
    """
    _, first, second = _connected()
    me, rng = jax.process_index(), np.random.default_rng(seed)
    given = [np.arange(8 * n, dtype=np.float32) for n in (1, 2, 3)]
    sent = [mylib.filter_device_put(x, P("data"), mesh=first) for x in given]
    add = [mpmd.jit(lambda x, i: x + i, mesh=mesh) for mesh in (first, second)]
    seconds(5)
    barrier()
    timer = threading.Timer(rng.uniform(0, 0.2), os.kill, (os.getpid(), signal.SIGINT))
    if me == seed % 2:
        timer.start()
    start, told = time.monotonic(), ""
    for i in range(60):
        try:
            if time.monotonic() - start > 5:
                break
            y = mpmd.transfer(add[0](sent[i % 3], np.float32(i)), P(), mesh=second)
            y = add[1](y, np.float32(i))
            np.testing.assert_array_equal(mpmd.fetch(y), given[i % 3] + 2 * i)
        except KeyboardInterrupt:
            continue
        except (mpmd.TransferError, jax.errors.JaxRuntimeError) as error:
            told = str(error)
            break
    with suppress(KeyboardInterrupt):  # all calls may have been faster
        if me == seed % 2:
            timer.join()
    assert time.monotonic() - start < 40
    until = time.monotonic() + 15
    while told and not comparison().failures and time.monotonic() < until:
        time.sleep(0.1)
    all_equal(bool(comparison().failures))
    assert bool(told) <= bool(comparison().failures)


@pytest.mark.thorough
def test_arrays_of_two_platforms_are_accounted_for_together(seconds):
    """Those of the second one as that would: there is one platform here."""
    x, first, second = _connected()
    seconds(2)
    lane = comparison().lane("arrays on another", (0, 1))
    for _ in range(4):
        call = comparison().count(lane, "an array")
        (lane.give if jax.process_index() == 0 else lane.take)(call, (jnp.zeros(()),))
        np.testing.assert_array_equal(mpmd.fetch(mpmd.transfer(x, P(), mesh=second)), X)
        time.sleep(1)
    until = time.monotonic() + 60
    while not comparison().is_idle() and time.monotonic() < until:
        time.sleep(0.1)
    assert comparison().is_idle() and not comparison().failures


@pytest.mark.slow
def test_what_is_donated_has_not_arrived(seconds):
    x, first, second = _connected()
    seconds(3)
    if jax.process_index() == 1:
        y = mpmd.transfer(x, P("data"), mesh=second)
        z = mpmd.jit(lambda y: y + 1, mesh=second, donate="all")(y)
        assert y.is_deleted()
        with pytest.raises((jax.errors.JaxRuntimeError, mpmd.TransferError)):
            np.asarray(z)
    assert "process 0 has not sent it within 3 s" in _next_error()


@pytest.mark.slow
def test_the_receiver_is_alone(seconds):
    x, first, second = _connected()
    seconds(5)
    if jax.process_index() == 1:
        y = mpmd.transfer(x, P(), mesh=second)
        with pytest.raises(mpmd.TransferError, match="has not sent it within 5 s"):
            mpmd.fetch(y)
    text = _next_error()
    all_equal(text)
    assert "process 1 waits for float32[8] in " in text
    assert "process 0 has not sent it" in text and "MYLIB_EXCHANGE_TIMEOUT" in text


def _ports() -> set[int]:
    """The ports at which this process listens."""
    sockets = set()
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            sockets.add(file.readlink().name)
    rows = [x.split() for x in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    mine = [row for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]
    return {int(row[1].partition(":")[2], 16) for row in mine}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="looks for ports as on Linux")
@pytest.mark.parametrize("attacked", [0, 1])
def test_a_silent_connection_from_elsewhere(attacked, seconds):
    """To a port of JAX's server: it would hold the next transfer for ever."""
    before = _ports()
    x, _, second = _connected()
    seconds(5)
    barrier()
    held = []
    if jax.process_index() == attacked:
        for port in _ports() - before:
            held.append(socket.create_connection(("127.0.0.1", port)))
    barrier()
    start = time.monotonic()
    mpmd.transfer(x, P(), mesh=second)
    text = _next_error()
    assert time.monotonic() - start < 40
    all_equal(text)
    assert "process 0 has offered it for 5 s, and it has not arrived" in text
    assert "holds a port" in text and "MYLIB_TRANSPORT=program" in text


@pytest.mark.thorough
def test_the_sender_is_alone(seconds):
    x, first, second = _connected()
    seconds(5)
    if jax.process_index() == 0:
        mpmd.transfer(x, P(), mesh=second)
    text = _next_error()
    all_equal(text)
    assert "process 0 sends float32[8]" in text
    assert "process 1 has not asked for it within 5 s" in text


@pytest.mark.thorough
def test_nobody_has_begun(seconds):
    first, second = _meshes()
    x = mylib.filter_device_put(X, P("data"), mesh=first)
    seconds(5)
    if jax.process_index() == 1:
        with pytest.raises(mpmd.TransferError, match="process 0, which has begun no transfer"):
            mpmd.transfer(x, P(), mesh=second)
    barrier()


@pytest.mark.thorough
def test_a_late_sender():
    x, first, second = _connected()
    if jax.process_index() == 0:
        time.sleep(3)
    y = mpmd.transfer(x, P(), mesh=second)
    np.testing.assert_array_equal(mpmd.fetch(y), X)


@pytest.mark.thorough
def test_a_long_computation_of_the_sender(seconds):
    """Longer than the timeout: the array has been promised, so the receiver goes on waiting."""
    x, first, second = _connected()
    seconds(10)

    def wait(x):
        time.sleep(16)
        return x

    def slow(x):
        return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    y = mpmd.jit(slow, mesh=first, out_shardings=P())(x)
    np.testing.assert_array_equal(mpmd.fetch(mpmd.transfer(y, P(), mesh=second)), X)

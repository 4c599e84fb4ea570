"""Transfers that only one side makes, or that both make differently: errors on both sides."""

import time
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec as P

import mylib
from mylib import mpmd
from mylib._links import connections
from mylib.testing import all_equal, barrier

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


def _next_error() -> str:
    """The error of the first transfer after the one that failed."""
    first, second = _meshes()
    mine, other = (first, second) if jax.process_index() == 0 else (second, first)
    until = time.monotonic() + 60
    # Not by trying: that would be another transfer without its other side.
    while not connections.failures and time.monotonic() < until:
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
    assert "process 0 sends float32[8]" in text and "process 1 asks for int32[8]" in text
    assert "['weight'], placed on process 0 in test_transfer_faults.py" in text


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

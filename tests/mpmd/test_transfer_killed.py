"""A process that is killed while it sends: an error for the one that waits."""

import signal
import socket
import subprocess
import sys
import time

import pytest

SCRIPT = """
import os, sys, time
import jax, numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec as P

port, me = sys.argv[1:]
jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(me), cluster_detection_method="deactivate")
import mylib
from mylib import mpmd

first, second = [
    Mesh(np.array(jax.devices())[i : i + 2], ("data",), axis_types=(AxisType.Auto,)) for i in (0, 2)
]

def wait(x):
    print("sending\\n", end="", flush=True)
    time.sleep(600)

def slow(x):
    return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

x = mylib.filter_device_put(np.ones(8, np.float32), P("data"), mesh=second)
assert mpmd.fetch(mpmd.transfer(x, P(), mesh=first)).sum() == 8
y = mpmd.jit(slow, mesh=second, out_shardings=P())(x)
start = time.monotonic()
try:
    print(mpmd.fetch(mpmd.transfer(y, P(), mesh=first)))
except mpmd.TransferError as error:
    print(f"{time.monotonic() - start:.0f} s {error}\\n", end="", flush=True)
    os._exit(7)
"""


@pytest.mark.thorough
def test_the_sender_is_killed(checkout_env):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    env = {**checkout_env, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, port, str(i)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for i in range(2)
    ]
    receiver, sender = started
    try:
        assert sender.stdout is not None and receiver.stdout is not None
        # Backends print lines of their own.
        assert any("sending" in line for line in sender.stdout)
        sender.send_signal(signal.SIGKILL)
        start = time.monotonic()
        told = receiver.stdout.read()
        assert receiver.wait(120) == 7
        assert time.monotonic() - start < 60
        assert "float32[8]" in told and "process 1 broke off" in told
    finally:
        for process in started:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

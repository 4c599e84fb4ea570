"""A process that is killed while another one waits for it: an error for the one that waits."""

import signal
import socket
import subprocess
import sys
import time

import pytest

COMMON = """
import os, sys, time
import jax, numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec as P

port, me = sys.argv[1:]
jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(me), cluster_detection_method="deactivate")
import mylib
from mylib import mpmd

def wait(x=None):
    print("waiting\\n", end="", flush=True)
    time.sleep(600)

def told(error):
    print(f"{type(error).__name__}: {error}\\n", end="", flush=True)
    os._exit(7)
"""

SENDER = """
first, second = [
    Mesh(np.array(jax.devices())[i : i + 2], ("data",), axis_types=(AxisType.Auto,)) for i in (0, 2)
]

def slow(x):
    return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

x = mylib.filter_device_put(np.ones(8, np.float32), P("data"), mesh=second)
assert mpmd.fetch(mpmd.transfer(x, P(), mesh=first)).sum() == 8
y = mpmd.jit(slow, mesh=second, out_shardings=P())(x)
try:
    print(mpmd.fetch(mpmd.transfer(y, P(), mesh=first)))
except mpmd.TransferError as error:
    told(error)
"""

LOADER = """
def source():
    for i in range(10):
        if i == 5 and me == "1":
            wait()
        yield {"x": np.ones((2, 2), np.float32), "i": i}

try:
    for batch in mylib.data.prefetch(source(), P("data"), mesh=mylib.make_mesh(data=-1)):
        print(batch["i"], flush=True)
except TimeoutError as error:
    told(error)
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        pytest.param(SENDER, "process 1 broke off", id="sender"),
        pytest.param(LOADER, "process 1 did not come within 5 s", id="loader"),
    ],
)
def test_the_other_one_is_killed(script, reason, checkout_env):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "MYLIB_EXCHANGE_TIMEOUT": "5"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", COMMON + script, port, str(i)],
            env={**checkout_env, **flags},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for i in range(2)
    ]
    one, other = started
    try:
        assert other.stdout is not None and one.stdout is not None
        # Backends print lines of their own.
        assert any("waiting" in line for line in other.stdout)
        other.send_signal(signal.SIGKILL)
        start = time.monotonic()
        text = one.stdout.read()
        assert one.wait(120) == 7, text
        assert time.monotonic() - start < 60
        assert reason in text
    finally:
        for process in started:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

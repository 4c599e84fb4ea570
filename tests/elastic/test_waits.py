"""Every wait for a process that is lost ends, and names it."""

import pytest
from scripts import left_alone

HEARTBEAT = 6

COMMON = """
import os, sys, time
import jax, numpy as np
from jax.sharding import PartitionSpec as P
import mylib
from mylib import mpmd

port, me = sys.argv[1:]
mylib.elastic.initialize(
    f"127.0.0.1:{port}", 2, int(me), heartbeat_timeout_seconds=6,
    cluster_detection_method="deactivate",
)
mesh = mylib.make_mesh(data=-1)
x = mylib.filter_shard(np.ones(8, np.float32), P("data"), mesh=mesh)

def wait():
    print("waiting\\n", end="", flush=True)
    if me == "1":
        time.sleep(600)

def batches():
    for i in range(10):
        if i == 5:
            wait()
        yield {"x": np.ones((2, 2), np.float32)}

def transfer():
    first, second = [jax.sharding.Mesh(jax.local_devices(process_index=i), "d") for i in (0, 1)]
    y = mylib.filter_device_put(np.ones(8, np.float32), P("d"), mesh=second)
    assert mpmd.fetch(mpmd.transfer(y, P(), mesh=first)).sum() == 8
    wait()
    return mpmd.fetch(mpmd.transfer(y, P(), mesh=first))

try:
"""
END = """
except Exception as error:
    print(f"{type(error).__name__}: {error}\\n", end="", flush=True)
    os._exit(7)
"""
WAITS = {
    "filter_shard": 'wait(); mylib.filter_shard(np.ones(8, np.float32), P("data"), mesh=mesh)',
    "check_replicas": "wait(); mylib.check_replicas(x)",
    "prefetch": 'list(mylib.data.prefetch(batches(), P("data"), mesh=mesh))',
    "transfer": "transfer()",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", WAITS)
def test_the_other_one_is_lost(what, checkout_env):
    text, took = left_alone(f"{COMMON}    {WAITS[what]}{END}", checkout_env)
    # A transfer may learn it sooner, from its connection.
    assert "process 1 was lost, and" in text or "process 1 broke off" in text
    print(f"after {took:.1f} s, with a heartbeat of {HEARTBEAT} s")
    # On a busy machine heartbeats and their judge are late; the wait itself is for 300 s.
    assert took < HEARTBEAT + 30

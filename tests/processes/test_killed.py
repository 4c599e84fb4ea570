"""A process that is killed while another one waits for it: an error for the one that waits. Loaders
have their test in `data/test_data.py`.
"""

import pytest
from scripts import left_alone

SENDER = """
import os, sys, time
import jax, numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec as P

port, me = sys.argv[1:]
jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(me), cluster_detection_method="deactivate")
import mylib
from mylib import mpmd

def wait(x):
    print("waiting\\n", end="", flush=True)
    time.sleep(600)

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
    print(error, flush=True)
    os._exit(7)
"""


@pytest.mark.thorough
def test_the_sender_is_killed(checkout_env):
    text, seconds = left_alone(SENDER, checkout_env | {"MYLIB_EXCHANGE_TIMEOUT": "5"})
    assert "process 1 broke off" in text and seconds < 60, text

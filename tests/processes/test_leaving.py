"""What the others know of a process whose program has ended."""

import textwrap

import pytest
from scripts import run_python

PROGRAM = """
    import os, sys, time
    import jax, numpy as np
    from jax.sharding import AxisType, Mesh, PartitionSpec as P
    import mylib
    from mylib import mpmd

    jax.distributed.initialize()
    me, case = jax.process_index(), sys.argv[1]
    first, second = (
        Mesh(d, ("data",), axis_types=(AxisType.Auto,))
        for d in np.array(jax.devices()).reshape(2, 1)
    )
    x = mylib.filter_device_put(np.ones(8, np.float32), P("data"), mesh=first)
    mpmd.fetch(mpmd.transfer(x, P(), mesh=second))
    start = time.monotonic()
    if me and case == "later":
        time.sleep(3)
    if me or case != "nothing":
        own = np.zeros(8, np.int32 if me and case != "the same" else np.float32)
        y = mylib.filter_device_put(own, P("data"), mesh=first)
        z = mpmd.transfer(y, P(), mesh=second)
    if me == 1:
        try:
            print("has got", mpmd.fetch(z).sum())
        except mpmd.TransferError as error:
            print(f"after {time.monotonic() - start:.0f} s:", error)
        # Process 0 keeps the service: it waits for this one.
        jax.distributed.shutdown()
        os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("now", "in process 1; the first has float32[8], the second int32[8]. All processes must"),
        (
            "later",
            "in process 1; the first has float32[8], the second int32[8]. All processes must",
        ),
        ("nothing", "but process 0 has ended after 2 calls of these processes, and this is call 3"),
        ("the same", "has got 0.0"),
    ],
)
def test_the_sender_ends(case, told, tmp_path, checkout_env):
    """In time, though the processes wait for each other for 300 s."""
    path = tmp_path / "leave.py"
    path.write_text(textwrap.dedent(PROGRAM))
    done = run_python("-m", "mylib.testing", "launch", "-n2", path, case, env=checkout_env)
    assert told in done.stdout, done.stdout + done.stderr


COMPARED = """
    import time
    import jax, numpy as np
    from jax.sharding import AxisType, Mesh, PartitionSpec as P
    import mylib

    jax.distributed.initialize()
    mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    x = np.zeros(8, np.float32)
    if jax.process_index():
        y = mylib.filter_shard(x, P("data"), mesh=mesh)
        start = time.monotonic()
        try:
            mylib.filter_shard(x, P(), mesh=mesh)
        except TimeoutError as error:
            print(f"{error}, after {int(time.monotonic() - start) // 60} minutes")
    else:
        mylib.filter_shard(x, P("data"), mesh=mesh)
"""


@pytest.mark.slow
def test_one_that_others_wait_for_ends(tmp_path, checkout_env):
    path = tmp_path / "end.py"
    path.write_text(textwrap.dedent(COMPARED))
    done = run_python("-m", "mylib.testing", "launch", "-n2", path, env=checkout_env)
    told = (
        "process 0 has ended, and did not come to compare (placement). Every process with devices "
        "of the mesh must make the same calls in the same order, after 0 minutes"
    )
    assert told in done.stdout, done.stdout + done.stderr

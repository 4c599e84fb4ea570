"""A job of several processes that hangs: `job.py CASE LIMIT`, the seconds of its watch.

The process that hangs prints the time before.
"""

import ctypes
import os
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

if os.environ.get("SLURM_NTASKS", "1") != "1":
    jax.distributed.initialize(heartbeat_timeout_seconds=60)

import mylib

CASE, LIMIT = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 3.0
ME, COUNT = jax.process_index(), jax.process_count()
MESH = mylib.make_mesh(d=-1)
ODD = COUNT - 1  # the process that differs


def hang() -> None:
    print(f"hangs at {time.time()}", flush=True)
    time.sleep(600)


@mylib.filter_jit(donate="all-except-first")
def step(batch, state):
    return state + batch.sum(), (state * batch.sum()).sum()


@mylib.filter_jit(out_shardings=P(), mesh=MESH)
def evaluate(state):
    return jnp.sort(state)


raised = mylib.filter_jit(lambda x, power: (x**power).sum(), out_shardings=P(), mesh=MESH)


def never(x):
    if ME == ODD:
        hang()
    return x


@mylib.filter_shard_map(mesh=MESH, in_specs=P("d"), out_specs=P())
def calls_back(state):
    call = mylib.opaque(lambda x: jax.pure_callback(never, jax.ShapeDtypeStruct((), x.dtype), x))
    return jax.lax.psum(call(state[0]), "d")


@jax.jit
def plain(state):
    return state + state.sum()


def placed(value: float) -> jax.Array:
    return mylib.filter_shard(np.full(2 * COUNT, value, np.float32), P("d"), mesh=MESH)


def batches():
    for i in range(1000):
        if CASE == "loader" and i == 5 and ME == ODD:
            hang()
        yield np.full(2, i, np.float32)


def traced_slowly(x):
    until = time.monotonic() + 2 * LIMIT
    while time.monotonic() < until:
        x = x + 1
    return x.sum()


def at_step(i: int, state: jax.Array) -> None:
    """What goes wrong in one of the processes."""
    time.sleep(LIMIT / 2 if CASE == "slow" and i < 6 and ME == ODD else 0.2)
    if CASE == "compiles" and i == 2:
        mylib.filter_jit(traced_slowly)(state if ME < 0 else jnp.ones(3)) if ME == ODD else None
    if CASE == "main0" and i == 4 and ME == 0:
        hang()
    if CASE == "stopped0" and i == 4 and ME == 0:
        print(f"hangs at {time.time()}", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    if CASE == "lock0" and i == 4 and ME == 0:
        print(f"hangs at {time.time()}", flush=True)
        ctypes.PyDLL(None).sleep(600)
    if ME != ODD or i != 4:
        return
    if CASE == "sleeps":
        hang()
    if CASE == "swallows":
        try:
            raise ValueError("a bad sample")
        except ValueError:
            hang()
    if CASE == "lock":
        print(f"hangs at {time.time()}", flush=True)
        ctypes.PyDLL(None).sleep(600)  # in C, with Python's lock
    if CASE == "stopped":
        print(f"hangs at {time.time()}", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    if CASE == "raises":
        print(f"hangs at {time.time()}", flush=True)
        raise ValueError("a bad sample")
    if CASE == "absent":
        hang()


def train(watch: "mylib.Watching") -> None:
    state = placed(1)
    if CASE in ("skips", "exchanged"):
        jax.block_until_ready(evaluate(state))
    if CASE == "first" and ME == ODD:
        hang()
    if CASE == "plain":
        for i in range(20):
            if i == 6 and ME == ODD:
                hang()
            watch.step()
            state = plain(state)
            float(state.addressable_data(0)[0])
        return
    with mylib.data.prefetch(batches(), P("d"), mesh=MESH) as source:
        for i, batch in enumerate(source):
            if i == 12:
                break
            if CASE == "leaves" and i == 4 and ME == ODD:
                print(f"hangs at {time.time()}", flush=True)
                break
            at_step(i, state)
            if CASE == "skips" and i == 4:
                print(f"hangs at {time.time()}", flush=True)
                if ME != ODD:
                    jax.block_until_ready(evaluate(state))
            if CASE == "exchanged" and i == 4:
                print(f"hangs at {time.time()}", flush=True)
                if ME == ODD:
                    jax.block_until_ready(evaluate(state))
            state, loss = step(batch, state)
            if CASE == "exchanged" and i == 4 and ME != ODD:
                jax.block_until_ready(evaluate(state))
            if CASE == "arguments" and i > 2:
                made = raised(state, 2 if i == 3 or ME == ODD else 3)
                hang() if i == 4 and ME == ODD else jax.block_until_ready(made)
            if CASE == "callback" and i == 4:
                jax.block_until_ready(calls_back(state))
            if CASE == "paused" and i == 3:
                with watch.paused():
                    time.sleep(2 * LIMIT if ME == ODD else 0)
            if CASE == "placement" and i == 4:
                hang() if ME == ODD else placed(2)
            float(loss)


started = {thread.name for thread in threading.enumerate()}
try:
    if CASE == "absent" and ME == ODD:
        hang()
    with mylib.watch(stuck_after=LIMIT, end=True) as watch:
        train(watch)
except ValueError:
    hang()
if CASE == "leaves" and ME == ODD:
    time.sleep(600)
left = {thread.name for thread in threading.enumerate()} - started
print("over", sorted(x for x in left if "lookout" in x or "printing" in x), flush=True)

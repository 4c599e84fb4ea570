"""A process that trains in a team, and in which something happens: SGD with momentum, in float64.

training.py PORT PROCESSES INDEX PLAN, with the plan as JSON. It prints JSON, a line for each event.
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import mylib
from mylib import elastic
from mylib._moving.processes import Gate
from mylib._training.elastic import replicas

port, processes, me = map(int, sys.argv[1:4])
plan = json.loads(sys.argv[4])
jax.config.update("jax_enable_x64", True)
if processes > 1:
    elastic.initialize(
        f"127.0.0.1:{port}",
        processes,
        me,
        heartbeat_timeout_seconds=plan["heartbeat"],
        cluster_detection_method="deactivate",
    )
ROWS, STOP = 48, plan.get("stop", 10)
DATA = np.random.default_rng(0).normal(size=(400, 8))
# The number of the step that is being made, and what is still to happen.
now, strikes = [0], plan.get("strikes", [])


def tell(**event):
    # One write, so that no other line comes between.
    os.write(1, (json.dumps({**event, "at": time.time()}) + "\n").encode())


def close_sockets():
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket"):
                socket.socket(fileno=os.dup(int(name))).shutdown(socket.SHUT_RDWR)
        except OSError:  # a file that has been closed, or a socket that isn't connected
            continue


def happens(when, n):
    for strike in [*strikes]:
        if [strike["process"], strike["when"], strike["step"]] != [me, when, n]:
            continue
        strikes.remove(strike)
        tell(strike=strike["how"])
        match strike["how"]:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(3)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "close":
                close_sockets()
            case "raise":
                raise ZeroDivisionError("an error of its own")
            case "leave":
                sys.exit(5)
            case "late":
                time.sleep(strike["seconds"])


class Commit(Gate):
    def opens(self, purpose, is_ready):
        if purpose != f"step {now[0]}":
            return super().opens(purpose, is_ready)
        happens("before the commit", now[0])
        all_are = super().opens(purpose, is_ready)
        happens("after the commit", now[0])
        return all_are

    def come(self, place, purpose):
        opens = super().come(place, purpose)
        if purpose == f"step {now[0]}":
            happens("in the commit", now[0])
        return opens


replicas.gate_of = Commit

axes = plan.get("axes", {"data": 2})
team = elastic.Team(at_least=plan.get("at_least", 1), **axes)
W = P("data", "model" if "model" in axes else None)
KEPT = {"w": W, "m": W, "key": P(), "epoch": None}


@mylib.filter_jit(out_shardings=KEPT)
def make(key):
    w = jax.random.normal(key, (8, 4))
    return {"w": w, "m": jnp.zeros((8, 4)), "key": jax.random.key(7), "epoch": 3}


def on_each_device(n):
    # Outside of `shard_map` only the first process would call it.
    jax.debug.callback(lambda n: happens("in the step", int(n[0])), n)
    return n


def loss_of(w, batch):
    return jnp.mean(jnp.sum((jnp.tanh(batch["x"] @ w) - batch["y"]) ** 2, 1))


def step(state, batch, pieces=1):
    everywhere = P(team.mesh.axis_names)
    jax.shard_map(on_each_device, in_specs=everywhere, out_specs=everywhere)(batch["n"])
    if plan.get("pieces"):
        rows = ("replica", "data")
        loss, slope = mylib.accumulate(loss_of, state["w"], batch, W, pieces=pieces, axes=rows)
        tell(pieces=pieces)
    else:
        loss, slope = jax.value_and_grad(loss_of)(state["w"], batch)
    m = 0.9 * state["m"] + slope
    key = jax.random.split(state["key"])[0]
    return {"w": state["w"] - 0.05 * m, "m": m, "key": key, "epoch": state["epoch"]}, loss


compiled = mylib.filter_jit(
    step, out_shardings=(KEPT, P()), donate="all" if plan.get("donate") else "none"
)


def read(n, rows):
    now[0] = n
    tell(reads=n, without=[i for loss in team.lost for i in loss.processes])
    happens("before reading", n)
    index = (n * ROWS + rows) % len(DATA)
    batch = {"x": DATA[index], "y": np.sin(DATA[index, :4]), "n": np.full(len(rows), n)}
    happens("after reading", n)
    return batch


with jax.set_mesh(team.mesh):
    first = make(jax.random.key(0))
if plan.get("another team"):
    list(elastic.Team(**axes).steps(compiled, first, read, rows=ROWS, stop=2))
losses, state = {}, first
status = 0
try:
    every = plan.get("every", 1)
    for n, new, loss in team.steps(compiled, first, read, rows=ROWS, stop=STOP, every=every):
        losses[n], state = float(loss), new
        tell(step=n)
        happens("after the step", n)
    everywhere = mylib.filter_shard(state["w"], P(), mesh=team.mesh)
    w = np.asarray(everywhere.addressable_data(0)).tolist()
    key = jax.random.key_data(state["key"].addressable_data(0)).tolist()
    tell(losses=list(losses.values()), w=w, key=key, epoch=state["epoch"])
except mylib.errors.TeamError as error:
    tell(error=str(error), restart=error.restart)
    status = elastic.RESTART if error.restart else 1
except ZeroDivisionError as error:
    tell(own=str(error))
    status = 4
Path(plan["folder"], str(me)).touch()
# Not at once: the service ends with the first process, and others have something to read there.
sys.exit(status)

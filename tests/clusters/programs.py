"""What the tests run in each process: `python programs.py NAME ...`, or a call of the function."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import mylib


def verbs() -> None:
    """Placing, a program, copies that are compared, and a loader."""
    mesh = mylib.make_mesh(data=-1)
    x = mylib.filter_shard(np.arange(16.0, dtype=np.float32), P("data"), mesh=mesh)
    total = mylib.filter_jit(jnp.sum, out_shardings=P(), mesh=mesh)(x)
    w = mylib.filter_device_put(np.ones((4, 4), np.float32), P(), mesh=mesh)
    mylib.check_replicas((w, total))
    shares = (np.full((8, 2), float(i), np.float32) for i in range(5))
    with mylib.data.prefetch(shares, P("data"), mesh=mesh) as batches:
        sums = [float(mylib.filter_jit(jnp.sum, out_shardings=P(), mesh=mesh)(b)) for b in batches]
    rows = 8 * jax.process_count() * 2
    assert sums == [i * rows for i in range(5)], sums
    say(f"sum {float(total):g} over {jax.device_count()} devices of {jax.process_count()}")


def differ() -> None:
    """Processes that disagree get the same error, each of them."""
    mesh, me = mylib.make_mesh(data=-1), jax.process_index()
    try:
        mylib.filter_shard({"w": np.full(8, me, np.float32)}, P(), mesh=mesh)
    except mylib.PlacementError as error:
        say(f"told: {'checksum' in str(error)} {'process 1' in str(error)}")


def late(seconds: str) -> None:
    """The last process comes late, or not in time."""
    mesh, me = mylib.make_mesh(data=-1), jax.process_index()
    if me == jax.process_count() - 1:
        time.sleep(float(seconds))
    try:
        mylib.filter_shard(np.ones(8, np.float32), P(), mesh=mesh)
        say("met")
    except TimeoutError as error:
        say(f"TimeoutError: {error}")
        raise SystemExit(3) from error


def killed(how: str) -> None:
    """One process dies while the others wait for it."""
    mesh, me = mylib.make_mesh(data=-1), jax.process_index()
    say("here")
    if me == 1 and how == "itself":
        os.kill(os.getpid(), signal.SIGKILL)
    if me == 1:
        time.sleep(1000)
    mylib.filter_shard(np.ones(8, np.float32), P(), mesh=mesh)
    say("met")


def train(folder: str, steps: str, stop_at: str) -> None:
    """Training that goes on from what is saved in `folder`; the first time it is stopped."""
    mesh, me = mylib.make_mesh(data=-1), jax.process_index()
    optim = optax.adam(1e-2)
    rule = mylib.rules.fsdp("data")

    def make(key: jax.Array):
        w = jax.random.normal(key, (16, 16))
        return w, optim.init(w)

    @mylib.filter_jit(out_shardings=(rule, rule, P()), mesh=mesh, donate="all")
    def step(w, state, x):
        value, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w - 1) ** 2))(w)
        updates, state = optim.update(grad, state, w)
        return optax.apply_updates(w, updates), state, value

    w, state = mylib.filter_jit(make, out_shardings=rule, mesh=mesh)(jax.random.key(0))
    leaves, structure = jax.tree.flatten((w, state))
    saved = Path(folder, "saved.npz")
    begin = 0
    if saved.exists():
        with np.load(saved) as file:
            begin = int(file["step"])
            leaves = [file[str(i)] for i in range(len(leaves))]
        w, state = mylib.filter_shard(jax.tree.unflatten(structure, leaves), rule, mesh=mesh)
        say(f"goes on at {begin}")
    for i in range(begin, int(steps)):
        x = np.random.default_rng(i).normal(size=(8, 16)).astype(np.float32)
        x = mylib.filter_shard(x, P("data"), mesh=mesh)
        w, state, value = step(w, state, x)
        say(f"step {i} loss {float(value):.6f}")
        whole = mylib.filter_shard((w, state), P(), mesh=mesh)
        if me == 0:
            arrays = {str(n): np.asarray(x) for n, x in enumerate(jax.tree.leaves(whole))}
            np.savez(saved.with_suffix(".new.npz"), step=i + 1, **arrays)
            saved.with_suffix(".new.npz").rename(saved)
        if begin == 0 and i + 1 == int(stop_at):
            Path(folder, f"stopped{me}").touch()
            time.sleep(1000)


def model() -> eqx.nn.MLP:
    """The arrays of a model, with numbers that no compiler may round."""
    shapes = eqx.filter_eval_shape(eqx.nn.MLP, 16, 8, 32, 2, key=jax.random.key(0))
    arrays = eqx.filter(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    return jax.tree.map(lambda x: np.arange(x.size, dtype=x.dtype).reshape(x.shape), arrays)


def save(folder: str) -> None:
    """Each process writes its part of a model that is over all devices."""
    import orbax.checkpoint as ocp

    mesh = mylib.make_mesh(data=-1)
    placed = mylib.filter_shard(model(), mylib.rules.fsdp("data"), mesh=mesh)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(folder, "model"), placed)
    say(f"saved from {jax.device_count()} devices of {jax.process_count()}")


def restore(folder: str) -> None:
    """The model that others have saved, on another mesh."""
    import orbax.checkpoint as ocp

    mesh, rule = mylib.make_mesh(data=2, model=-1), mylib.rules.fsdp("data")
    wanted = mylib.filter_shard(eqx.filter_eval_shape(model), rule, mesh=mesh)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(Path(folder, "model"), wanted)
    for x, y in zip(jax.tree.leaves(restored), jax.tree.leaves(model()), strict=True):
        np.testing.assert_array_equal(x, y)
    mylib.testing.assert_placed(restored, rule, mesh=mesh)
    say(f"restored on {jax.device_count()} devices of {jax.process_count()}")


def say(text: str) -> None:
    # Text and line end in one write: where Python does not buffer, `print` makes two of them, and
    # what another process says could come between.
    print(f"<{jax.process_index()}> {text}\n", end="", flush=True)


def said(text: str) -> list[str]:
    """What all processes have said, sorted; backends and engines have things to say as well."""
    return sorted(re.findall(r"<\d> (?:(?!<\d> ).)*", text))


if __name__ == "__main__":
    jax.distributed.initialize()
    name, *args = sys.argv[1:]
    {f.__name__: f for f in (verbs, differ, late, killed, train, save, restore)}[name](*args)

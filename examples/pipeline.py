"""A model in stages, each on a mesh of its own, in one process or in many.

    python examples/pipeline.py
    python -m mylib.testing launch -n 2 --devices-per-process 4 examples/pipeline.py
    srun --nodes=2 --ntasks=2 python examples/pipeline.py

It prints the same losses each time. With two processes each has one stage, and the other one is a
handle: an array that knows its shape and its sharding, and has no values here.
"""

import os

if "SLURM_NTASKS" in os.environ:
    # One of several processes. `launch` sets the variables that SLURM would set.
    import jax

    from mylib import mpmd

    # On hosts of a cluster, give the address at which they reach each other: address="10.0.0.7".
    mpmd.initialize()
else:
    # JAX reads these when it starts, so they come before its import: see train.py.
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["NPROC"] = "32"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    from mylib import mpmd

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import mylib

STAGES, LAYERS, WIDTH, BATCH, STEPS = 2, 2, 64, 64, 20
OPTIM = optax.adamw(3e-3)

meshes = mpmd.split(mylib.make_mesh(stage=STAGES, data=-1), "stage")
fsdp = mylib.rules.fsdp("data")
schedule = mpmd.one_f_one_b(stages=STAGES, microbatches=8)


class Stage(eqx.Module):
    """Some layers of the model. A mesh holds only its own stage, sharded."""

    layers: list[eqx.nn.Linear]

    def __init__(self, key: jax.Array):
        keys = jax.random.split(key, LAYERS)
        self.layers = [eqx.nn.Linear(WIDTH, WIDTH, key=key) for key in keys]

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = x + jax.vmap(layer)(jax.nn.gelu(x))
        return x


def loss(prediction: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((prediction - y) ** 2)


def make(key: jax.Array) -> tuple[Stage, optax.OptState]:
    stage = Stage(key)
    return stage, OPTIM.init(eqx.filter(stage, eqx.is_array))


def update(stage: Stage, grads: Stage, state: optax.OptState) -> tuple[Stage, optax.OptState]:
    updates, state = OPTIM.update(grads, state, eqx.filter(stage, eqx.is_array))
    return eqx.apply_updates(stage, updates), state


def main() -> None:
    # Each function runs where its mesh is, and returns handles in the other processes.
    makes = [mpmd.jit(make, mesh=mesh, out_shardings=fsdp) for mesh in meshes]
    updates = [mpmd.jit(update, mesh=mesh, out_shardings=fsdp) for mesh in meshes]
    keys = jax.random.split(jax.random.key(0), STAGES)
    made = [make(key) for make, key in zip(makes, keys, strict=True)]
    stages, states = [stage for stage, _ in made], [state for _, state in made]
    pipe = mpmd.pipeline(stages, loss, schedule=schedule)

    losses = []
    for i in range(STEPS):
        x = np.random.default_rng(i % 4).normal(size=(BATCH, WIDTH)).astype(np.float32)
        first = mylib.filter_device_put(x, P("data"), mesh=meshes[0])
        last = mylib.filter_device_put(np.sin(x), P("data"), mesh=meshes[-1])
        value, grads = pipe(stages, first, last)
        for s in range(STAGES):
            stages[s], states[s] = updates[s](stages[s], grads[s], states[s])
        losses.append(value)
    # The losses are on the last stage's mesh.
    values = [float(value) for value in mpmd.fetch(losses)]
    if jax.process_index() == 0:
        print(schedule)
        print(f"{jax.device_count()} devices in {jax.process_count()} process(es)")
        print("losses", " ".join(f"{value:.4f}" for value in values[::5]), f"{values[-1]:.4f}")


if __name__ == "__main__":
    main()

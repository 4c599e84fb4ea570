"""Trains a model whose weights, optimiser state and batches are sharded over 8 devices.

Prints that the losses are those of one device, where every array is, and what a step
communicates. The devices are simulated on the CPU, so this runs anywhere.
"""

import os

# Read when JAX starts, so they come before it is imported. NPROC is the number of threads that the
# simulated devices share: JAX 0.10 needs as many as there are devices, however few the cores.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["NPROC"] = "32"
os.environ["JAX_PLATFORMS"] = "cpu"

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

import mylib

DEVICES = 8
STEPS = 10
BATCH = 256

# How weights, gradients and optimiser state are kept: this rule shards the largest dimension of an
# array that the devices divide evenly, and replicates small arrays.
KEPT = mylib.rules.fsdp("data")

# A larger `eps` than usual: the tiniest gradients are rounding errors. Adam would blow them up, and
# the two runs that are compared below would drift apart.
OPTIMISER = optax.adamw(3e-4, eps=1e-5)


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    """What a data loader would give: NumPy arrays on the host."""
    rng = np.random.default_rng(0)
    teacher = rng.normal(size=(64, 16)).astype(np.float32) / 8
    xs = rng.normal(size=(STEPS, BATCH, 64)).astype(np.float32)
    return [(x, np.tanh(x @ teacher)) for x in xs]


def make(key: PRNGKeyArray) -> tuple[eqx.nn.MLP, optax.OptState]:
    model = eqx.nn.MLP(64, 16, width_size=1024, depth=3, key=key)
    return model, OPTIMISER.init(eqx.filter(model, eqx.is_array))


def loss_fn(
    model: eqx.nn.MLP, x: Float[Array, "batch in"], y: Float[Array, "batch out"]
) -> Float[Array, ""]:
    # Each layer gathers its weights when it is called, and forgets them; its gradient comes back
    # sharded as the weights are kept.
    model = mylib.fully_shard(model, eqx.nn.Linear, KEPT)
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


# The old model and optimiser state are donated: the new ones take their memory. The batch comes
# first and is not donated, as no result could use its memory. Model and state come out as they
# went in: otherwise the compiler chooses, and if it chooses differently the next call compiles
# again.
@mylib.filter_jit(
    in_shardings={"batch": P("data")},
    out_shardings=(KEPT, KEPT, None),
    donate="all-except-first",
)
def step(batch: PyTree, model: eqx.nn.MLP, state: optax.OptState) -> PyTree:
    loss, grads = eqx.filter_value_and_grad(loss_fn)(model, *batch)
    updates, state = OPTIMISER.update(grads, state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), state, loss


def train(mesh: Mesh) -> tuple[mylib.results.Explanation, list[float]]:
    with jax.set_mesh(mesh):
        # Created sharded: each device creates its own part.
        model, state = mylib.filter_jit(make, out_shardings=KEPT)(jax.random.key(0))
        losses = []
        for batch in batches():
            model, state, loss = step(batch, model, state)
            losses.append(float(loss))
        return mylib.explain({"model": model, "state": state}, KEPT), losses


def communication(mesh: Mesh) -> mylib.results.Report:
    """What a step communicates. It is compiled from shapes: nothing is moved or run."""
    with jax.set_mesh(mesh):
        shapes = eqx.filter_eval_shape(make, jax.random.key(0))
        return mylib.audit(step, batches()[0], *mylib.filter_shard(shapes, KEPT))


def main() -> None:
    several = mylib.make_mesh(data=DEVICES)
    one = mylib.make_mesh(data=1, devices=jax.devices()[:1])
    print(f"Training for {STEPS} steps on {DEVICES} simulated devices, and again on one.\n")
    kept, losses = train(several)
    _, reference = train(one)
    np.testing.assert_allclose(losses, reference, rtol=1e-3)
    apart = np.max(np.abs(np.divide(losses, reference) - 1))

    row = "{:<58} {}".format
    print(row(f"loss on {DEVICES} devices", f"{losses[0]:.4f} -> {losses[-1]:.4f}"))
    print(row("loss on one device", f"{reference[0]:.4f} -> {reference[-1]:.4f}"))
    print(row("largest relative difference between the two, of all steps", f"{apart:.0e}"))
    print(f"\nWhere the arrays of the model and of the optimiser's state are:\n\n{kept}")
    print(f"\nWhat a step communicates:\n\n{communication(several)}")


if __name__ == "__main__":
    main()

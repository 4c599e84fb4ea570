"""Trains a model whose weights, optimiser state and batches are spread over 8 devices.

Prints where every array is, how much memory a device saves by it, and that the training is the same
as on one device. The devices are simulated on the CPU, so this runs anywhere.
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
from jax.sharding import AxisType, Mesh, PartitionSpec as P
from jaxtyping import Array, Float, PyTree

import mylib

DEVICES = 8
STEPS = 10
BATCH = 256

# A rule: splits the largest dimension of an array that the devices divide evenly, or else copies.
KEPT = mylib.rules.fsdp("data", min_size=0)


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    """What a data loader would give: NumPy arrays on the host."""
    rng = np.random.default_rng(0)
    teacher = rng.normal(size=(64, 16)).astype(np.float32) / 8
    xs = rng.normal(size=(STEPS, BATCH, 64)).astype(np.float32)
    return [(x, np.tanh(x @ teacher)) for x in xs]


def loss_fn(
    model: eqx.nn.MLP, x: Float[Array, "batch in"], y: Float[Array, "batch out"]
) -> Float[Array, ""]:
    # Each layer gathers its weights when it is called, and forgets them; its gradient comes back
    # as the weights are kept.
    model = mylib.fully_shard(model, eqx.nn.Linear, KEPT)
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


# A larger `eps` than usual: the tiniest gradients are rounding errors. Adam would blow them up, and
# the two runs that are compared below would drift apart.
OPTIMISER = optax.adamw(3e-4, eps=1e-5)


# The old model and optimiser state are donated: the new ones take their memory. The batch comes
# first and is not donated, as nothing that comes out could use its memory. What goes round the loop
# comes out as it went in: otherwise the compiler chooses, and where it chooses differently the next
# call compiles again.
@mylib.filter_jit(out_shardings=(KEPT, KEPT, None), donate="all-except-first")
def step(batch: PyTree, model: eqx.nn.MLP, state: optax.OptState) -> PyTree:
    loss, grads = eqx.filter_value_and_grad(loss_fn)(model, *batch)
    updates, state = OPTIMISER.update(grads, state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), state, loss


class Trained(eqx.Module):
    batch: PyTree
    model: eqx.nn.MLP
    optimiser: optax.OptState


def train(mesh: Mesh) -> tuple[Trained, list[float]]:
    with jax.set_mesh(mesh):
        model = eqx.nn.MLP(64, 16, width_size=1024, depth=3, key=jax.random.key(0))
        state = OPTIMISER.init(eqx.filter(model, eqx.is_array))
        model, state = mylib.filter_shard((model, state), KEPT)
        losses = []
        for host_batch in batches():
            batch = mylib.filter_shard(host_batch, P("data"))
            model, state, loss = step(batch, model, state)
            losses.append(float(loss))
    return Trained(batch, model, state), losses


def megabytes(arrays: list[Array], *, per_device: bool) -> float:
    shapes = [x.sharding.shard_shape(x.shape) if per_device else x.shape for x in arrays]
    return sum(np.prod(s) * x.dtype.itemsize for s, x in zip(shapes, arrays, strict=True)) / 1e6


def show(tree: PyTree) -> None:
    row = "{:<42} {:<13} {:<13} {:>9}"
    print(row.format("array", "shape", "split over", "MB/device"))
    for path, x in jax.tree_util.tree_leaves_with_path(eqx.filter(tree, eqx.is_array)):
        spec = ", ".join(str(axis) for axis in x.sharding.spec)
        mb = megabytes([x], per_device=True)
        print(row.format(jax.tree_util.keystr(path), str(x.shape), f"({spec})", f"{mb:.3f}"))


def main() -> None:
    several, one = (
        jax.make_mesh((n,), ("data",), devices=jax.devices()[:n], axis_types=(AxisType.Auto,))
        for n in (DEVICES, 1)
    )
    print(f"Training for {STEPS} steps on {DEVICES} simulated devices, and again on one.\n")
    trained, losses = train(several)
    _, reference = train(one)
    show(trained)

    kept = jax.tree.leaves(eqx.filter((trained.model, trained.optimiser), eqx.is_array))
    copied, split = megabytes(kept, per_device=False), megabytes(kept, per_device=True)
    np.testing.assert_allclose(losses, reference, rtol=1e-3)
    apart = np.max(np.abs(np.divide(losses, reference) - 1))
    row = "{:<58} {}".format
    print()
    print(row("model and optimiser, MB on each device, copied", f"{copied:.2f}"))
    print(row("model and optimiser, MB on each device, split as above", f"{split:.2f}"))
    print(row(f"loss on {DEVICES} devices", f"{losses[0]:.4f} -> {losses[-1]:.4f}"))
    print(row("loss on one device", f"{reference[0]:.4f} -> {reference[-1]:.4f}"))
    print(row("largest relative difference between the two, of all steps", f"{apart:.0e}"))


if __name__ == "__main__":
    main()

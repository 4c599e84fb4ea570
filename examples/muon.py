"""Trains a model with Muon, whose weights, optimiser state and batches are sharded over 8 devices.

Muon orthogonalises the momentum of each weight matrix, and needs the whole matrix for that.
`mylib.by_matrix` gives each device whole matrices to update. Prints how evenly, what an update
sends beside Optax's Muon as it is, and that the training is the same as on one device, also if it
is continued on four. The devices are simulated on the CPU, so this runs anywhere.
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

STEPS, BATCH, WIDTH, RATE = 8, 256, 128, 0.02
KEPT = mylib.rules.fsdp("data")


class Net(eqx.Module):
    """Eight matrices of one shape, one for each device."""

    layers: list[eqx.nn.Linear]

    def __init__(self, key: PRNGKeyArray):
        self.layers = [eqx.nn.Linear(WIDTH, WIDTH, key=k) for k in jax.random.split(key, 8)]

    def __call__(self, x: Float[Array, " width"]) -> Float[Array, " width"]:
        for layer in self.layers[:-1]:
            x = x + jax.nn.gelu(layer(x))
        return self.layers[-1](x)


def muon(mesh: Mesh) -> optax.GradientTransformation:
    """Muon for the matrices, and Adam for the biases, which are no matrices."""
    return mylib.by_matrix(optax.contrib.muon(RATE), KEPT, mesh=mesh)


def optimiser(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    # What combines the gradients of several weights is outside of `by_matrix`. So is weight decay:
    # inside, the weights would be sent, too.
    return optax.chain(optax.clip_by_global_norm(1.0), inner, optax.add_decayed_weights(-1e-5))


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    teacher = rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 8
    xs = rng.normal(size=(STEPS, BATCH, WIDTH)).astype(np.float32)
    return [(x, np.tanh(x @ teacher)) for x in xs]


def loss_fn(model: Net, x: Float[Array, "batch in"], y: Float[Array, "batch out"]) -> Array:
    model = mylib.fully_shard(model, eqx.nn.Linear, KEPT)
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


# KEPT leaves the state of `by_matrix` where it was created.
@mylib.filter_jit(
    in_shardings={"batch": P("data")},
    out_shardings=(KEPT, KEPT, None),
    donate=("model", "state"),
)
def step(
    batch: PyTree, model: Net, state: optax.OptState, optim: optax.GradientTransformation
) -> tuple[Net, optax.OptState, Array]:
    loss, grads = eqx.filter_value_and_grad(loss_fn)(model, *batch)
    updates, state = optim.update(grads, state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), state, loss


def train(
    mesh: Mesh, first: int, last: int, saved: tuple[Net, optax.OptState] | None = None
) -> tuple[list[float], tuple[Net, optax.OptState]]:
    """Some of the steps, with a checkpoint at their end."""
    optim = optimiser(muon(mesh))
    with jax.set_mesh(mesh):
        model = mylib.filter_jit(Net, out_shardings=KEPT)(jax.random.key(0))
        if saved is None:
            state = optim.init(eqx.filter(model, eqx.is_array))
        else:
            model = mylib.filter_shard(saved[0], KEPT)
            template = eqx.filter_eval_shape(optim.init, eqx.filter(model, eqx.is_array))
            state = mylib.by_matrix.from_plain(saved[1], template)
        losses = []
        for batch in batches()[first:last]:
            model, state, loss = step(batch, model, state, optim)
            losses.append(float(loss))
        # Optax's own state, which any number of devices can read.
        plain = mylib.by_matrix.to_plain(state)
        return losses, jax.tree.map(
            lambda x: np.asarray(x) if eqx.is_array(x) else x, (model, plain)
        )


def sent(optim: optax.GradientTransformation, params: PyTree) -> int:
    """The bytes that a device sends in an update. It is compiled from shapes, and not run."""
    shardings = jax.tree.map(lambda x: x.sharding, params)
    state = jax.jit(optim.init)(params)
    update = jax.jit(optim.update, out_shardings=(shardings, None))
    return mylib.audit(update, params, state, params).wire_bytes()


def main() -> None:
    eight = mylib.make_mesh(data=8)
    four = mylib.make_mesh(data=4, devices=jax.devices()[:4])
    one = mylib.make_mesh(data=1, devices=jax.devices()[:1])

    params = eqx.filter(mylib.filter_shard(Net(jax.random.key(0)), KEPT, mesh=eight), eqx.is_array)
    print(mylib.show(muon(eight).init(params)))
    ours, plain = sent(muon(eight), params), sent(optax.contrib.muon(RATE), params)
    print(f"\nan update sends {ours / 2**10:.0f} KiB, and {plain / ours:.0f} times as much without")

    losses, _ = train(eight, 0, STEPS)
    reference, _ = train(one, 0, STEPS)
    np.testing.assert_allclose(losses, reference, rtol=1e-3)
    _, saved = train(eight, 0, STEPS // 2)
    continued, _ = train(four, STEPS // 2, STEPS, saved)
    np.testing.assert_allclose(continued, reference[STEPS // 2 :], rtol=1e-3)
    print(f"loss on 8 devices, and on one:         {losses[0]:.4f} -> {losses[-1]:.4f}")
    print(f"continued on 4 devices after {STEPS // 2} steps:  {continued[-1]:.4f}")


if __name__ == "__main__":
    main()

"""Trains a network by evolution strategies on eight devices, each of which sends four bytes a step.

Every device adds its own noise to the parameters, subtracts it, and compares the two losses. The
usual way is to average the updates of all devices, which sends as many bytes as a gradient has. But
the noise comes from keys that every device can compute, so it is enough to send the difference of
the losses, one number per device. Every device then recomputes the noise of all devices and takes
the same step.

The devices are simulated on the CPU, so this runs anywhere.
"""

import os

# JAX reads these when it starts, so they come before its import. NPROC is the number of threads
# that the simulated devices share: JAX 0.10 needs one per device, however few cores there are.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["NPROC"] = "32"
os.environ["JAX_PLATFORMS"] = "cpu"

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray

import mylib

MESH = mylib.make_mesh(population=8)
STEPS, SIZE, RATE = 30, 0.05, 0.02

Data = tuple[Float[Array, "batch in"], Float[Array, "batch out"]]


def make_model() -> eqx.nn.MLP:
    return eqx.nn.MLP(16, 4, 256, 3, key=jax.random.key(0))


def make_data() -> Data:
    x = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)
    return jnp.asarray(x), jnp.sin(x[:, :4])


def noise(key: PRNGKeyArray, model: eqx.nn.MLP) -> Any:
    weights, treedef = jax.tree.flatten(eqx.filter(model, eqx.is_array))
    keys = jax.random.split(key, len(weights))
    made = [jax.random.normal(k, w.shape) for k, w in zip(keys, weights, strict=True)]
    return jax.tree.unflatten(treedef, made)


def moved(model: eqx.nn.MLP, by: Any, times: Any) -> eqx.nn.MLP:
    return eqx.apply_updates(model, jax.tree.map(lambda e: times * e, by))


def loss(model: eqx.nn.MLP, data: Data) -> Float[Array, ""]:
    x, y = data
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def trial(model: eqx.nn.MLP, key: PRNGKeyArray, data: Data) -> tuple[Any, Float[Array, ""]]:
    """Some noise, and how much larger the loss is with it added than with it subtracted."""
    own = noise(key, model)
    return own, loss(moved(model, own, SIZE), data) - loss(moved(model, own, -SIZE), data)


def direction_sent(model: eqx.nn.MLP, key: PRNGKeyArray, data: Data) -> Any:
    """The mean of the directions of all devices; sends all parameters."""
    own, worse = trial(model, jax.random.fold_in(key, lax.axis_index("population")), data)
    return jax.tree.map(lambda e: lax.pmean(worse * e, "population"), own)


def direction_made_again(model: eqx.nn.MLP, key: PRNGKeyArray, data: Data) -> Any:
    """The same mean, but sends only the differences of the losses."""
    _, worse = trial(model, jax.random.fold_in(key, lax.axis_index("population")), data)
    everyones = lax.all_gather(worse, "population", to="invarying")

    def add(total: Any, i: Any) -> tuple[Any, None]:
        again = noise(jax.random.fold_in(key, i), model)
        share = everyones[i] / len(everyones)
        return jax.tree.map(lambda t, e: t + share * e, total, again), None

    nothing = jax.tree.map(jnp.zeros_like, eqx.filter(model, eqx.is_array))
    return lax.scan(add, nothing, jnp.arange(len(everyones)))[0]


@mylib.filter_shard_map(mesh=MESH, in_specs=P(), out_specs=P())
def train(model: eqx.nn.MLP, data: Data, direction: Callable[..., Any]) -> Any:
    """All steps, in one program."""

    def step(model: eqx.nn.MLP, i: Any) -> tuple[eqx.nn.MLP, Any]:
        by = direction(model, jax.random.fold_in(jax.random.key(1), i), data)
        model = moved(model, by, -RATE / (2 * SIZE))
        return model, loss(model, data)

    return mylib.loops.scan(step, model, jnp.arange(STEPS))


def main() -> None:
    model, data = make_model(), make_data()
    weights = jax.tree.leaves(eqx.filter(model, eqx.is_array))
    print(f"{sum(w.size for w in weights)} parameters, {STEPS} steps on 8 devices")
    print(f"loss at first {loss(model, data):.4f}")
    trained = []
    for name, direction, sent in (
        ("the mean of all directions", direction_sent, sum(w.nbytes for w in weights)),
        ("one number, and noise made again", direction_made_again, 4),
    ):
        after, losses = train(model, data, direction)
        print(f"{name}: each device sends {sent} bytes a step, loss at last {losses[-1]:.4f}")
        trained.append(jax.tree.leaves(eqx.filter(after, eqx.is_array)))
    for one, other in zip(*trained, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)
    print("Both end with the same parameters.")


if __name__ == "__main__":
    main()

"""Optimisers of whole matrices gather for each product, and a plan's prices say so."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import mylib
from mylib import machines
from mylib._plan.candidates import priced
from mylib._plan.trace import PlannedStep, trace

WIDTH, LAYERS = 256, 4
H100S = machines.gpu("h100", hosts=1, devices_per_host=8)


class SquareLayer(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        return jax.nn.relu(x @ self.weight)


class SquareLayers(eqx.Module):
    layers: list[SquareLayer]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def prices(transform):
    """Of the candidates of a step, by their names."""
    optim = optax.chain(transform, optax.scale(-1e-3))

    def step(x, model, state):
        grads = eqx.filter_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        updates, state = optim.update(grads, state, model)
        return eqx.apply_updates(model, updates), state

    weight = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    model = SquareLayers([SquareLayer(weight) for _ in range(LAYERS)])
    x = jax.ShapeDtypeStruct((64, WIDTH), jnp.float32)
    args = x, model, jax.eval_shape(optim.init, model)
    traced = trace(PlannedStep.of(step, args), "full", (SquareLayer,))
    return {x.name: x.price for x in priced(traced, H100S, 80e9) if x.price is not None}


def muon():
    numbers = lambda tree: jax.tree.map(  # noqa: E731
        lambda x: optax.contrib.MuonDimensionNumbers(), tree
    )
    return optax.contrib.scale_by_muon(weight_dimension_numbers=numbers)


def test_each_product_gathers():
    found, usual = prices(muon()), prices(optax.scale_by_adam())
    part, gathers = "what the optimiser sends", "all-gather over data"
    assert part not in found["DP 8"].parts
    assert found["FSDP 8"].parts[part] > 0 and part not in usual["FSDP 8"].parts
    # Three products in each of five iterations.
    sent = found["FSDP 8"].sent[gathers] - usual["FSDP 8"].sent[gathers]
    assert sent == 15 * LAYERS * 4 * WIDTH**2
    # Each device computes its rows of the products, and with data parallelism all of them.
    assert found["FSDP 8"].parts["computation"] < found["DP 8"].parts["computation"]
    assert all(x.seconds > 0 and x.parts["computation"] > 0 for x in found.values())


@pytest.mark.slow
def test_the_compiler_gathers_as_often():
    """The bytes of an update, by XLA for the CPU."""
    mesh = mylib.make_mesh(data=8)
    kept = mylib.rules.fsdp("data")
    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
    weights = mylib.filter_shard(weights, kept, mesh=mesh)
    state = jax.eval_shape(muon().init, weights)
    state = mylib.filter_shard(state, kept, mesh=mesh)
    update = jax.jit(
        muon().update, out_shardings=jax.tree.map(lambda x: x.sharding, (weights, state))
    )
    report = mylib.audit(update, weights, state)
    assert report.bytes("all-gather") == 15 * LAYERS * 4 * WIDTH**2

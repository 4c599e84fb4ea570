"""Optimisers of whole matrices gather for each product, and a plan's prices say so."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mylib
from mylib import machines
from mylib._planning.plan.candidates import priced
from mylib._planning.plan.trace import PlannedStep, trace

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


def training(transform, layers=LAYERS, width=WIDTH):
    """A step, what makes its model and its state, and a batch."""
    optim = optax.chain(transform, optax.scale(-1e-3))

    def make(key):
        keys = jax.random.split(key, layers)
        weights = [jax.random.normal(x, (width, width)) / width**0.5 for x in keys]
        model = SquareLayers([SquareLayer(x) for x in weights])
        return model, optim.init(model)

    def step(x, model, state):
        grads = eqx.filter_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        updates, state = optim.update(grads, state, model)
        return eqx.apply_updates(model, updates), state

    return step, make, np.random.default_rng(0).normal(size=(64, width)).astype(np.float32)


def prices(transform, layers=LAYERS, width=WIDTH):
    """Of the candidates of a step, by their names."""
    step, make, x = training(transform, layers, width)
    args = x, *eqx.filter_eval_shape(make, jax.random.key(0))
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


def test_by_matrix_is_priced():
    """Two all-to-alls, the matrices of the most loaded device, and its state with padding."""
    wide = 2048
    found, usual = (prices(x, 10, wide) for x in (mylib.by_matrix(muon(), None), muon()))
    fsdp, alone = found["FSDP 8"], found["DP 8"]
    # Of ten matrices on eight devices two have two: a stack has 16 places.
    assert fsdp.sent["all-to-all over data"] == 2 * 2 * 4 * wide**2
    assert not any(x.startswith("all-to-all") for x in alone.sent)
    of_one = 2 * (5 * 3 * wide**3)
    rate = H100S.chip.flops["float32"]
    sides = alone.parts["computation"] - fsdp.parts["computation"]
    assert sides > 8 * of_one / rate
    assert fsdp.memory < alone.memory
    part = "what the optimiser sends"
    assert fsdp.parts[part] < usual["FSDP 8"].parts[part]
    # It beats Optax as it is on each mesh.
    assert fsdp.seconds < min(x.seconds for x in usual.values())


@pytest.mark.parametrize(
    "axes", [{"data": 8}, {"data": 4, "model": 2}, {"replica": 2, "data": 4}], ids=str
)
@pytest.mark.everyday("{'data': 8}")
def test_a_planned_step_with_by_matrix(axes):
    """The state is created where the plan says, and values are those of one device."""
    step, make, x = training(mylib.by_matrix(muon(), None, ("replica", "data")), 6, 64)
    model, state = eqx.filter_eval_shape(make, jax.random.key(0))
    plan = mylib.plan(step, x, model, state, axes=axes, policies=("full",), compile=2)
    train, alone = plan.jit(step), eqx.filter_jit(step)
    ours, expected = plan.make(make, jax.random.key(0)), make(jax.random.key(0))
    stack = ours[1][0].stacks[0][0]
    assert not stack.sharding.is_fully_replicated and stack.shape[0] == 8
    assert plan.arguments["state"].specs["[0].stacks[0][0]"] == stack.sharding.spec.partitions
    for _ in range(2):
        ours, expected = train(x, *ours), alone(x, *expected)
    ours, expected = (mylib.by_matrix.to_plain(x) for x in (ours, expected))
    for a, b in zip(*map(jax.tree.leaves, (ours, expected)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert mylib.Plan.of(plan.as_text(), plan.layers) == plan
    assert "# the optimiser: mylib.by_matrix(transform, kept, mesh=mesh)" in plan.code()
    with pytest.raises((ValueError, mylib.PlacementError)):
        train(x, *make(jax.random.key(0)))


def test_a_step_that_has_owners_already():
    kept = mylib.rules.fsdp("data", min_size=1)
    mesh = mylib.make_mesh(data=8)
    step, make, x = training(mylib.by_matrix(muon(), kept, mesh=mesh), 2, 64)
    args = x, *eqx.filter_eval_shape(make, jax.random.key(0))
    with pytest.raises(mylib.errors.PlanError, match=r"write mylib.by_matrix\(transform, None\)"):
        mylib.plan(step, *args, compile=0)


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

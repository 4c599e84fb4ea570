"""`ReplicatedWarning`: an optimiser gathers sharded matrices for one product after the other."""

import re
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import mylib
from mylib._advice import gathered

MESH = mylib.make_mesh(data=8)
KEPT = mylib.rules.fsdp("data", min_size=1)


@pytest.fixture(autouse=True)
def little(monkeypatch):
    """Small programs send little."""
    monkeypatch.setattr(gathered, "_LITTLE", 1)


def statistics():
    """An optimiser that multiplies gradients by themselves, once each."""

    def init(params):
        return params, jax.tree.map(lambda x: jnp.eye(x.shape[0]), params)

    def update(grads, state, params=None):
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state[0], grads)
        left = jax.tree.map(lambda s, g: s + g @ g.T, state[1], grads)
        return jax.tree.map(lambda s, m: s @ m, left, momentum), (momentum, left)

    return optax.GradientTransformation(init, update)


def told(optim, kept=KEPT):
    """Of a training step."""
    model = eqx.nn.MLP(64, 64, 64, 1, key=jax.random.key(0))
    model = mylib.filter_shard(model, kept, mesh=MESH)
    batch = mylib.filter_shard(jnp.ones((16, 64)), P("data"), mesh=MESH)
    state = mylib.filter_jit(optim.init)(eqx.filter(model, eqx.is_array))

    @mylib.filter_jit(out_shardings=(kept, None), mesh=MESH)
    def step(model, state, batch):
        grads = eqx.filter_grad(lambda m: jnp.mean(jax.vmap(m)(batch) ** 2))(model)
        updates, state = optim.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(model, state, batch)
    assert all(w.filename == __file__ for w in caught)
    return [str(w.message) for w in caught if w.category is mylib.ReplicatedWarning]


def test_muon():
    (text,) = told(optax.contrib.muon(1e-3))
    assert re.match(r"step: the optimiser multiplies whole matrices", text)
    assert "model.layers[0].weight" in text
    assert "Write mylib.by_matrix(transform, kept) in place of transform" in text
    sent, held = map(float, re.findall(r"([\d.]+) KiB", text))
    assert sent > 5 * held


def test_what_is_not_told():
    assert not told(mylib.by_matrix(optax.contrib.muon(1e-3), KEPT, mesh=MESH))
    assert not told(optax.adamw(1e-3))
    assert not told(optax.contrib.muon(1e-3), P())


def test_an_optimiser_that_gathers_once():
    assert not told(statistics())


def test_products_that_are_no_optimiser_s():
    """A penalty on the weights is the user's own."""

    def penalty(model):
        return sum(jnp.sum((x.weight @ x.weight.T - jnp.eye(64)) ** 2) for x in model.layers)

    model = eqx.nn.MLP(64, 64, 64, 1, key=jax.random.key(0))
    model = mylib.filter_shard(model, KEPT, mesh=MESH)
    step = mylib.filter_jit(lambda m, s: (eqx.filter_grad(penalty)(m), s), out_shardings=KEPT,
                            mesh=MESH)  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, model)

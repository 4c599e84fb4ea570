"""`ReplicatedWarning`: a loop gathers the same weights in each iteration."""

import re
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mylib
from mylib._advice import pieces

MESH = mylib.make_mesh(data=8)
KEPT = mylib.rules.fsdp("data", min_size=1)
X = np.ones((2, 16, 64), np.float32)


@pytest.fixture(autouse=True)
def little(monkeypatch):
    """Small programs send little."""
    monkeypatch.setattr(pieces, "_LITTLE", 1)


class Stack(eqx.Module):
    """Layers in a scan."""

    layers: eqx.nn.Linear

    def __call__(self, x):
        arrays, rest = eqx.partition(self.layers, eqx.is_array)
        return jax.lax.scan(lambda x, a: (eqx.combine(a, rest)(x), None), x, arrays)[0]


class Loop(eqx.Module):
    """A layer with the loop over the pieces in it."""

    model: eqx.Module

    def __call__(self, batch):
        return jax.lax.map(lambda x: jnp.mean(jax.vmap(self.model)(x) ** 2), batch)


KEY = jax.random.key(0)
MLP = eqx.nn.MLP(64, 64, 64, 1, key=KEY)
STACK = Stack(eqx.filter_vmap(lambda k: eqx.nn.Linear(64, 64, key=k))(jax.random.split(KEY, 3)))


def each(model, batch, **options):
    """Adds the gradients of the pieces."""

    def add(total, x):
        def loss(model):
            model = mylib.fully_shard(model, eqx.nn.Linear, KEPT, mesh=MESH, **options)
            return jnp.mean(jax.vmap(model)(x) ** 2)

        return jax.tree.map(jnp.add, total, eqx.filter_grad(loss)(model)), None

    arrays = eqx.filter(model, eqx.is_array)
    return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, arrays), batch)[0]


def inside(model, batch):
    """The loop is in a layer."""

    def loss(model):
        return jnp.mean(mylib.fully_shard(Loop(model), Loop, KEPT, mesh=MESH)(batch))

    return eqx.filter_grad(loss)(model)


def at_once(model, batch):
    return mylib.accumulate(
        lambda m, x: jnp.mean(jax.vmap(m)(x) ** 2),
        model,
        batch.reshape(-1, 64),
        KEPT,
        pieces=2,
        mesh=MESH,
    )


def told(step, model):
    step = mylib.filter_jit(step, in_shardings={"batch": P(None, "data")}, mesh=MESH)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(mylib.filter_shard(model, KEPT, mesh=MESH), X)
    return [str(w.message) for w in caught if w.category is mylib.ReplicatedWarning]


@pytest.mark.parametrize(
    ("model", "options", "once"),
    [
        pytest.param(MLP, {}, 32.5, id="list"),
        pytest.param(STACK, {}, 48.75, id="scan"),
        pytest.param(MLP, {"send_dtype": jnp.int8}, 9, id="8 bits"),
    ],
)
@pytest.mark.everyday("list", "scan")
def test_a_loop_over_pieces(model, options, once):
    (message,) = told(lambda model, batch: each(model, batch, **options), model)
    assert "each of its 2 iterations" in message and "mylib.accumulate" in message
    assert "test_pieces.py" in message
    # Forward, and what the gradient needs of them again.
    assert once < float(re.search(r"([\d.]+) KiB each time", message)[1]) <= 2 * once


@pytest.mark.parametrize("step", [inside, at_once])
def test_gathered_once(step):
    assert not told(step, MLP)


def test_a_step_without_pieces():
    assert not told(lambda model, batch: inside(model, batch[:1]), STACK)

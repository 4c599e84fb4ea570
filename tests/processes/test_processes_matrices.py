"""`by_matrix` in two processes, beside Optax's Muon on one device."""

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

import mylib
from mylib.rules import fsdp, replicated
from mylib.testing import same_program

KEPT = fsdp("data", min_size=1)
MUON = optax.contrib.muon(1e-2)
STEPS = 3


def _params():
    draw = np.random.default_rng(0)
    shapes = {"wide": (16, 24), "square": (16, 16), "bias": (8,)}
    return {
        name: [draw.normal(size=shape).astype(np.float32) for _ in range(3)]
        for name, shape in shapes.items()
    }


def _step(optim, params, state):
    grads = jax.tree.map(jax.numpy.sin, params)
    updates, state = optim.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def _equal(tree, expected):
    """The values of sharded arrays; each process compares its own parts."""
    jax.tree.map(_parts_are_equal, tree, expected)


def _parts_are_equal(x, expected):
    expected = np.asarray(expected)
    for shard in x.addressable_shards:
        np.testing.assert_allclose(shard.data, expected[shard.index], rtol=2e-4, atol=1e-5)


@pytest.mark.multihost(processes=2, devices_per_process=4)
def test_training_and_a_checkpoint():
    mesh = mylib.make_mesh(data=8)
    own, plain = _params(), MUON.init(_params())
    for _ in range(2 * STEPS):
        own, plain = jax.jit(lambda p, s: _step(MUON, p, s))(own, plain)
    optim = mylib.by_matrix(MUON, KEPT, mesh=mesh)
    params = mylib.filter_shard(_params(), KEPT, mesh=mesh)
    state = optim.init(params)
    step = mylib.filter_jit(lambda p, s: _step(optim, p, s), out_shardings=(KEPT, None), mesh=mesh)
    same_program(step, params, state)
    for _ in range(STEPS):
        params, state = step(params, state)
    # What a checkpoint holds, and each process can read.
    saved = mylib.filter_shard(mylib.by_matrix.to_plain(state), replicated(), mesh=mesh)
    saved = jax.tree.map(np.asarray, saved)
    assert jax.tree.structure(saved) == jax.tree.structure(plain)
    template = eqx.filter_eval_shape(optim.init, params)
    state = mylib.by_matrix.from_plain(saved, template)
    for _ in range(STEPS):
        params, state = step(params, state)
    _equal(params, own)
    _equal(mylib.by_matrix.to_plain(state), plain)
    assert not params["wide"][0].is_fully_addressable

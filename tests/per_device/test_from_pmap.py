"""A training step that was written for `equinox.filter_pmap`, ported: the same parameters. The
short programs are beside each other in docs/from-pmap.md, which runs as a test.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import mylib

DEVICES, STEPS = 8, 3
OPTIM = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-4))


def loss_of(model, tokens, key):
    # Noise on the weights that every device draws for itself: what `pmap` code does with keys.
    noise = 0.01 * jax.random.normal(key, model.position.shape)
    model = eqx.tree_at(lambda m: m.position, model, model.position + noise)
    logits = jax.vmap(model)(tokens[:, :-1])
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
    return -jnp.mean(chosen)


def update(model, state, loss, grads):
    """As it stands in the code to port, for each device."""
    loss, grads = lax.pmean((loss, grads), "devices")
    updates, state = OPTIM.update(grads, state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), state, loss


@eqx.filter_pmap(axis_name="devices", in_axes=(eqx.if_array(0), eqx.if_array(0), 0, 0))
def old_step(model, state, tokens, key):
    loss, grads = eqx.filter_value_and_grad(loss_of)(model, tokens, key)
    return update(model, state, loss, grads)


def new_step(model, state, tokens, keys):
    own = mylib.vary(model, "devices")
    loss, grads = eqx.filter_value_and_grad(loss_of)(own, tokens, keys[0])
    return update(model, state, loss, grads)


def batches():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, models.VOCAB, (STEPS, DEVICES, 2, models.LENGTH + 1))
    return tokens.astype(np.int32)


def start():
    model = models.Transformer(depth=1, key=jax.random.key(0))
    return model, OPTIM.init(eqx.filter(model, eqx.is_array))


@pytest.fixture(scope="module")
def old():
    model, state = jax.tree.map(
        lambda x: jnp.stack([x] * DEVICES) if eqx.is_array(x) else x, start()
    )
    losses = []
    for i, tokens in enumerate(batches()):
        keys = jax.random.split(jax.random.key(i), DEVICES)
        model, state, loss = old_step(model, state, tokens, keys)
        losses.append(float(loss[0]))
    return jax.tree.map(lambda x: x[0] if eqx.is_array(x) else x, (model, state)), losses


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, checked",
    [
        (AxisType.Auto, True),
        pytest.param(AxisType.Explicit, False, marks=pytest.mark.thorough),
        pytest.param(AxisType.Auto, False, marks=pytest.mark.thorough),
        pytest.param(AxisType.Explicit, True, marks=pytest.mark.thorough),
    ],
)
def test_the_same_parameters_after_three_steps(old, kind, checked):
    mesh = jax.make_mesh((DEVICES,), ("devices",), axis_types=(kind,))
    step = mylib.filter_shard_map(
        new_step,
        mesh=mesh,
        in_specs={"tokens": P("devices"), "keys": P("devices")},
        out_specs=P(),
        check_vma=checked,
    )
    model, state = start()
    losses = []
    # The embedding gathers rows by index, which on Explicit axes needs a mesh in force.
    with jax.set_mesh(mesh):
        for i, tokens in enumerate(batches()):
            keys = jax.random.split(jax.random.key(i), DEVICES)
            model, state, loss = step(model, state, tokens.reshape(16, -1), keys)
            losses.append(float(loss))
    (old_model, old_state), old_losses = old
    np.testing.assert_allclose(losses, old_losses, rtol=1e-5)
    trained = (eqx.filter(tree, eqx.is_array) for tree in ((model, state), (old_model, old_state)))
    for ours, theirs in zip(*map(jax.tree.leaves, trained), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)

"""Equinox's own layers, transformations and errors, with the verbs that are ours."""

import io

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import optax
from common import assert_close, check, mesh, normal, shard
from jax.sharding import PartitionSpec as P

OWN = None


def mlp(width=64):
    return eqx.nn.MLP(16, 4, width, 2, key=jax.random.key(0))


def batch():
    return shard((normal(1, 32, 16), normal(2, 32, 4)), "data")


def loss(model, x, y):
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


@check
def forward_and_gradient():
    """an MLP's values and gradients, the batch sharded"""
    model, (x, y) = shard(mlp()), batch()
    value, gradient = eqx.filter_jit(eqx.filter_value_and_grad(loss))(model, x, y)
    expected = loss(mlp(), normal(1, 32, 16), normal(2, 32, 4))
    assert_close(value, expected)
    return value, gradient


@check
def training_that_donates():
    """ten steps of Adam, model and state donated"""
    optimiser = optax.adam(1e-2)

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, state):
        value, gradient = eqx.filter_value_and_grad(loss)(model, *batch)
        updates, state = optimiser.update(gradient, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, value

    model = shard(mlp())
    state = shard(optimiser.init(eqx.filter(model, eqx.is_array)))
    values = []
    for _ in range(10):
        model, state, value = step(batch(), model, state)
        values.append(value)
    assert values[-1] < values[0] / 2
    return model, values


@check
def sharding_inside_jit():
    """filter_shard of a value inside filter_jit"""
    x, _ = batch()

    @eqx.filter_jit
    def f(x):
        return shard(x * 2, None, "data", over=mesh()), shard(x.sum(0))

    columns, total = f(x)
    assert columns.sharding.spec == P(None, "data")
    return columns, total


@check
def checkpointed_layers():
    """the gradient through filter_checkpoint, with and without a policy"""
    blocks = eqx.filter_vmap(lambda k: eqx.nn.Linear(16, 16, key=k))(
        jax.random.split(jax.random.key(1), 4)
    )
    arrays, static = eqx.partition(shard(blocks), eqx.is_array)
    x, _ = batch()

    def total(arrays, policy):
        @eqx.filter_checkpoint(policy=policy)
        def layer(x, leaves):
            return jnp.tanh(jax.vmap(eqx.combine(leaves, static))(x)), None

        return jnp.sum(jax.lax.scan(layer, x, arrays)[0] ** 2)

    saves = jax.checkpoint_policies.dots_saveable
    results = [eqx.filter_jit(eqx.filter_grad(total))(arrays, policy) for policy in (None, saves)]
    assert_close(*results)
    return results


@check
def layers_with_state():
    """BatchNorm, its state carried from call to call"""
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(16, axis_name="batch", mode="ema")

    @eqx.filter_jit
    def f(norm, x, state):
        along = jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        return along(x, state)

    x, _ = batch()
    for _ in range(3):
        y, state = f(norm, x, state)
    return y, state.get(norm.ema_state_index)


@check
def dropout_and_attention():
    """attention with dropout, a typed key for each example"""
    layer = shard(eqx.nn.MultiheadAttention(2, 16, dropout_p=0.3, key=jax.random.key(2)))
    x = shard(normal(3, 8, 5, 16), "data")
    keys = shard(jax.random.split(jax.random.key(4), 8), "data")
    return eqx.filter_jit(lambda m, x, k: jax.vmap(lambda x, k: m(x, x, x, key=k))(x, k))(
        layer, x, keys
    )


@check
def bound_methods_and_statics():
    """methods, keyword arguments, static leaves, and functions as arguments and results"""

    class Scale(eqx.Module):
        factor: jax.Array
        name: str

        @eqx.filter_jit
        def __call__(self, x, *, power=1):
            return self.factor * x**power, self.name

    x, _ = batch()
    y, name = Scale(jnp.float32(3), "scale")(x, power=2)
    assert name == "scale"
    twice = eqx.filter_jit(lambda f: lambda x: f(f(x)))(jnp.sin)
    return y, twice(x), eqx.filter_jit(lambda f, x: f(x))(jnp.cos, x)


@check
def keywords_for_jit():
    """keywords that Equinox hands on to jax.jit: inline, keep_unused; and fun= by name"""
    x, _ = batch()
    inlined = eqx.filter_jit(lambda x: jnp.sin(x) * 2, inline=True)
    kept = eqx.filter_jit(lambda x, unused: jnp.cos(x), keep_unused=True)
    return eqx.filter_jit(fun=lambda x: inlined(x) + kept(x, x))(x)


@check
def ensembles():
    """filter_vmap of models over devices"""
    keys = jax.random.split(jax.random.key(5), 8)
    models = shard(eqx.filter_vmap(lambda k: eqx.nn.MLP(16, 4, 8, 1, key=k))(keys), "data")

    @eqx.filter_jit
    @eqx.filter_vmap(in_axes=(eqx.if_array(0), None))
    def evaluate(model, x):
        return jax.vmap(model)(x)

    return evaluate(models, normal(1, 32, 16))


@check
def bounded_while_loop():
    """equinox.internal.while_loop with checkpoints, and its gradient"""

    @eqx.filter_jit
    @jax.grad
    def f(x):
        def step(c):
            return (c[0] + 1, jnp.sin(c[1]) * 1.1)

        loop = eqxi.while_loop(lambda c: c[0] < 5, step, (0, x), max_steps=8, kind="checkpointed")
        return loop[1].sum()

    return f(batch()[0])


@check
def errors_at_run_time():
    """error_if: its error and its words, on one device"""
    f = eqx.filter_jit(lambda x: eqx.error_if(x, x > 10, "too large"))
    assert f(jnp.float32(3)) == 3
    try:
        jax.block_until_ready(f(jnp.float32(30)))
    except Exception as error:
        assert "too large" in str(error), str(error)
        return type(error).__name__
    raise AssertionError("error_if let 30 pass")


@check
def saved_and_loaded():
    """tree_serialise_leaves of a sharded model"""
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, shard(mlp(), "data", over=mesh(data=4)))
    file.seek(0)
    model = eqx.tree_deserialise_leaves(file, mlp())
    assert eqx.tree_equal(model, mlp())
    return eqx.filter_jit(lambda m, x: jax.vmap(m)(x))(shard(model), batch()[0])

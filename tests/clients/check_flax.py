"""Flax: the state of nnx and linen models, placed by shardings and by rules."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from common import check, mesh, normal, shard, where
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec as P

OWN = None


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(16, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.second = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        return self.second(self.dropout(nnx.relu(self.norm(self.first(x)))))


def batch(over):
    return shard((normal(1, 32, 16), normal(2, 32, 8)), "data", over=over)


SPECS = {"first.kernel": P(None, "model")}


@check
def nnx_state():
    """an nnx model's state, split off, sharded over 4x2, and put together again"""
    over = mesh(data=4, model=2)
    graph, state = nnx.split(Net(nnx.Rngs(0)))
    state = eqx.filter_shard(state, where(state, SPECS, over))
    kernel = state["first"]["kernel"]
    kernel = kernel.get_value() if hasattr(kernel, "get_value") else kernel.value
    assert kernel.sharding.spec == P(None, "model")

    @eqx.filter_jit
    def f(state, x):
        model = nnx.merge(graph, state)
        model.eval()
        return model(x)

    return f(state, batch(over)[0]), state


@check
def nnx_training():
    """nnx, its parameters trained and its statistics and keys carried, all donated"""
    over, optimiser = mesh(data=4, model=2), optax.adamw(0.01)
    graph, parameters, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, parameters, rest, moments):
        model = nnx.merge(graph, parameters, rest)

        def loss(model):
            return jnp.mean((model(batch[0]) - batch[1]) ** 2)

        value, gradient = nnx.value_and_grad(loss)(model)
        now = nnx.split(model, nnx.Param, ...)[2]
        updates, moments = optimiser.update(gradient, moments, parameters)
        return optax.apply_updates(parameters, updates), now, moments, value

    parameters = eqx.filter_shard(parameters, where(parameters, SPECS, over))
    moments = optimiser.init(parameters)
    moments = eqx.filter_shard(moments, where(moments, SPECS, over))
    rest = shard(rest, over=over)
    values = []
    for _ in range(5):
        parameters, rest, moments, value = step(batch(over), parameters, rest, moments)
        values.append(value)
    assert values[-1] < values[0]
    return parameters, values


class Blocks(nn.Module):
    @nn.compact
    def __call__(self, x):
        split = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        x = nn.relu(nn.Dense(32, kernel_init=split)(x))
        return nn.Dense(8)(nn.LayerNorm()(x))


@check
def linen_training():
    """a linen TrainState, placed by the specs that its own annotations give, trained"""
    over, model = mesh(data=4, model=2), Blocks()
    boxed = model.init(jax.random.key(0), jnp.ones((1, 16)))
    specs = nn.get_partition_spec(boxed)

    def is_spec(x):
        return isinstance(x, P)

    shardings = jax.tree.map(lambda spec: NamedSharding(over, spec), specs, is_leaf=is_spec)
    variables = eqx.filter_shard(nn.unbox(boxed), shardings)
    assert variables["params"]["Dense_0"]["kernel"].sharding.spec == P(None, "model")
    state = TrainState.create(apply_fn=model.apply, params=variables["params"], tx=optax.adam(0.01))
    state = eqx.filter_shard(state, where(state, {"Dense_0.kernel": P(None, "model")}, over))

    @eqx.filter_jit
    def step(state, batch):
        def loss(p):
            return jnp.mean((state.apply_fn({"params": p}, batch[0]) - batch[1]) ** 2)

        value, gradient = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradient), value

    values = []
    for _ in range(5):
        state, value = step(state, batch(over))
        values.append(value)
    assert values[-1] < values[0]
    return state, values


@check
def linen_boxes():
    """variables still in linen's boxes (with_partitioning), placed and applied"""
    over, model = mesh(data=4, model=2), Blocks()
    boxed = shard(model.init(jax.random.key(0), jnp.ones((1, 16))), over=over)
    assert isinstance(boxed["params"]["Dense_0"]["kernel"], nn.Partitioned)
    return eqx.filter_jit(model.apply)(boxed, batch(over)[0])

"""Optax: optimisers' states that are placed with their parameters, updated, and donated."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from common import check, check_each, mesh, normal, shard
from jax.sharding import PartitionSpec as P
from optax import contrib

OWN = None

OPTIMISERS = [
    "adabelief",
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adamax",
    "adamaxw",
    "adamw",
    "amsgrad",
    "fromage",
    "lamb",
    "lars",
    "lion",
    "nadam",
    "nadamw",
    "noisy_sgd",
    "novograd",
    "optimistic_gradient_descent",
    "radam",
    "rmsprop",
    "rprop",
    "sgd",
    "sign_sgd",
    "sm3",
    "yogi",
]
CONTRIB = ["cocob", "dadapt_adamw", "dog", "dowg", "muon", "prodigy", "ademamix", "momo"]


def model():
    return eqx.nn.MLP(16, 8, 32, 1, key=jax.random.key(0))


def loss(parameters, static, batch):
    x, y = batch
    return jnp.mean((jax.vmap(eqx.combine(parameters, static))(x) - y) ** 2)


def trained(optimiser, steps=3):
    """The first dimension of every matrix and vector over devices, the state's as well."""
    over = mesh(data=4, model=2)
    parameters, static = eqx.partition(model(), eqx.is_array)
    batch = shard((normal(1, 32, 16), normal(2, 32, 8)), "data", over=over)

    def place(tree):
        arrays, rest = eqx.partition(tree, lambda x: eqx.is_array(x) and x.shape[:1] in ((32,),))
        arrays = shard(arrays, "model", over=over)
        return eqx.combine(arrays, shard(rest, over=over))

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, parameters, state):
        value, gradient = jax.value_and_grad(loss)(parameters, static, batch)
        extra = optax.with_extra_args_support(optimiser)
        updates, state = extra.update(gradient, state, parameters, value=value)
        return optax.apply_updates(parameters, updates), state, value

    parameters = place(parameters)
    state = place(optimiser.init(parameters))
    assert parameters.layers[0].weight.sharding.spec[0] == "model"
    for _ in range(steps):
        parameters, state, value = step(batch, parameters, state)
    assert jnp.isfinite(value)
    return parameters, state, value


@check_each(OPTIMISERS)
def optimiser(name):
    """25 optimisers, from adabelief to yogi: three steps, all sharded and donated"""
    options = {"lars": (0.01,), "lion": (0.01,)}
    keywords = {"key": jax.random.key(0)} if name == "noisy_sgd" else {}
    return trained(getattr(optax, name)(*options.get(name, (0.01,)), **keywords))


@check_each(CONTRIB)
def contributed(name):
    """optax.contrib: cocob, dadapt_adamw, dog, dowg, muon, prodigy, ademamix, momo"""
    options = {"cocob": (), "dadapt_adamw": (), "dog": (), "dowg": (), "prodigy": ()}
    return trained(getattr(contrib, name)(*options.get(name, (0.01,))))


@check
def chains():
    """clipping, schedules, masks, multi_transform and MultiSteps in one chain"""

    def decay(tree):
        return jax.tree.map(lambda x: x.ndim > 1, tree)

    def labels(tree):
        return jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", tree)

    inner = optax.multi_transform(
        {"matrix": optax.adamw(optax.cosine_decay_schedule(0.01, 10)), "vector": optax.sgd(0.01)},
        labels,
    )
    chain = optax.chain(optax.clip_by_global_norm(1), inner, optax.add_decayed_weights(1e-4, decay))
    return trained(optax.MultiSteps(chain, 2).gradient_transformation(), steps=4)


@check
def line_search():
    """L-BFGS with its line search, its value kept in the state"""
    parameters, static = eqx.partition(model(), eqx.is_array)
    batch = shard((normal(1, 32, 16), normal(2, 32, 8)), "data")
    optimiser = optax.lbfgs()

    def value_of(parameters):
        return loss(parameters, static, batch)

    @eqx.filter_jit
    def step(parameters, state):
        value, gradient = optax.value_and_grad_from_state(value_of)(parameters, state=state)
        updates, state = optimiser.update(
            gradient, state, parameters, value=value, grad=gradient, value_fn=value_of
        )
        return optax.apply_updates(parameters, updates), state, value

    parameters = shard(parameters)
    state, values = optimiser.init(parameters), []
    for _ in range(3):
        parameters, state, value = step(parameters, state)
        values.append(value)
    assert values[-1] < values[0]
    return values


@check
def state_inside_jit():
    """the state born in filter_jit, with filter_shard inside"""
    optimiser = optax.adam(0.01)
    over = mesh()

    @eqx.filter_jit
    def init(parameters):
        state = optimiser.init(parameters)
        where = jax.sharding.NamedSharding(over, P("data"))
        return eqx.tree_at(lambda s: s[0].mu, state, eqx.filter_shard(state[0].mu, where))

    weights = shard({"a": normal(0, 16, 4), "b": normal(1, 8)}, over=over)
    state = init(weights)
    assert state[0].mu["a"].sharding.spec[0] == "data"
    return state

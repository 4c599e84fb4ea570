"""Real models under the strategies that people train with: the same numbers as on one device, and
no communication but what the strategy needs."""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import _hlo
import equinox as eqx
import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import mylib
from mylib.rules import Rule, batch, by_axes, by_path, fsdp, like, replicated, where_even
from mylib.testing import verify

MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
KEY = jax.random.key(0)
SHARDED = fsdp("data", min_size=256)


class Case(NamedTuple):
    """A model and its layers, a batch and a loss, and how it is split over the axis "model"."""

    make: Callable[[], Any]
    layers: type | tuple[type, ...]
    batch: Callable[[], Any]
    loss: Callable[[Any, Any], jax.Array]
    tensor_parallel: Rule


def tokens():
    return np.random.default_rng(0).integers(0, models.VOCAB, (8, models.LENGTH + 1))


def pairs(*shape):
    rng = np.random.default_rng(0)
    return rng.normal(size=(8, *shape)), rng.normal(size=(8, 8))


def next_token_loss(model, tokens):
    logits = jax.vmap(model)(tokens[:, :-1])
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
    return -jnp.mean(chosen)


def square_loss(model, pair):
    x, y = pair
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


TRANSFORMER_NAMES = {
    models.Block: {"up.weight": "mlp embed", "up.bias": "mlp", "down.weight": "embed mlp"}
}
TRANSFORMER = (
    by_axes({"heads": "model", "mlp": "model", "vocab": "model"}, names=TRANSFORMER_NAMES)
    | replicated()
)
CASES = {
    "mlp": Case(
        lambda: eqx.nn.MLP(16, 8, 64, 1, key=KEY),
        eqx.nn.Linear,
        lambda: pairs(16),
        square_loss,
        by_path({"0.weight": P("model"), "0.bias": P("model"), "1.weight": P(None, "model")})
        | replicated(),
    ),
    "convolutions": Case(
        lambda: models.ConvNet(key=KEY),
        (eqx.nn.Conv2d, eqx.nn.Linear),
        lambda: pairs(8, 6, 6),
        square_loss,
        by_path({"convs.0.*": P("model"), "convs.1.weight": P(None, "model"), "convs.1.bias": P()})
        | replicated(),
    ),
    "transformer": Case(
        lambda: models.Transformer(key=KEY), models.Block, tokens, next_token_loss, TRANSFORMER
    ),
    "scanned": Case(
        lambda: models.Transformer(scanned=True, key=KEY),
        models.Block,
        tokens,
        next_token_loss,
        TRANSFORMER,
    ),
}


def strategies(case: Case) -> dict[str, tuple[Rule, Rule]]:
    """How the weights are kept, and how they are used: gathered, but for tensor parallelism."""
    return {
        "data parallel": (replicated(), replicated()),
        "fsdp": (SHARDED, replicated()),
        "tensor parallel": (case.tensor_parallel, case.tensor_parallel),
        "both": (case.tensor_parallel & SHARDED, case.tensor_parallel),
    }


STRATEGIES = list(strategies(CASES["mlp"]))


def weights_apart(tree):
    return jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", tree)


# A larger `eps` than usual: the tiniest gradients are rounding errors, which Adam would blow up.
OPTIMISERS = {
    "adamw": optax.adamw(1e-2, eps=1e-4),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=32, eps=1e-4),
    "multi_transform": optax.multi_transform(
        {"matrix": optax.adamw(1e-2, eps=1e-4), "vector": optax.sgd(1e-2, momentum=0.9)},
        weights_apart,
    ),
}


def kept_where(kept: Rule, optimiser: str) -> Rule:
    # A factored moment has lost a dimension, and what is not factored leaves a placeholder of one.
    return where_even(kept) | replicated() if optimiser == "adafactor" else kept


def step(data, case, optimiser, strategy, model, state):
    def loss(model):
        return case.loss(mylib.fully_shard(model, case.layers, *strategy), data)

    value, grads = eqx.filter_value_and_grad(loss)(model)
    updates, state = optimiser.update(grads, state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), state, value


@functools.cache
def untrained(make):
    """A model of NumPy arrays: what is trained on may be donated."""
    return jax.tree.map(lambda x: np.asarray(x) if eqx.is_array(x) else x, make())


def start(case, optimiser, kept):
    model = untrained(case.make)
    state = optimiser.init(eqx.filter(model, eqx.is_array))
    return *mylib.filter_shard((model, state), kept), mylib.filter_shard(
        case.batch(), batch("data")
    )


def train(case, optimiser, kept, used):
    model, state, data = start(case, optimiser, kept)
    traces = []

    def counted(*args):
        traces.append(args)
        return step(*args)

    out = (kept, kept, None)
    taken = mylib.filter_jit(counted, out_shardings=out, donate="all-except-first")
    losses = []
    for _ in range(3):
        before = arrays((model, state))
        model, state, loss = taken(data, case, optimiser, (kept, used), model, state)
        # Of what is not factored Adafactor has a placeholder, and makes no use of it.
        assert all(x.is_deleted() for x in before if x.shape != (1,))
        losses.append(float(loss))
    assert len(traces) == 1
    return model, state, losses


def as_shape(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def arrays(tree):
    return jax.tree.leaves(eqx.filter(tree, eqx.is_array))


# Every model under every strategy, and the transformer with every optimiser, too. Every day a few
# of them; the programs of the scanned transformer are looked at below.
TRAINING = [(name, strategy, "adamw") for name in CASES for strategy in STRATEGIES] + [
    ("transformer", "both", optimiser) for optimiser in ("adafactor", "multi_transform")
]
WHEN = {("mlp", "fsdp", "adamw"): [], ("transformer", "both", "adamw"): [pytest.mark.slow]}
TRAINED = [
    pytest.param(
        name,
        strategy,
        optimiser,
        marks=WHEN.get((name, strategy, optimiser), pytest.mark.thorough),
    )
    for name, strategy, optimiser in TRAINING
]


@pytest.mark.parametrize(("name", "strategy", "optimiser"), TRAINED)
def test_the_numbers_are_those_of_one_device(name, strategy, optimiser):
    case, transform = CASES[name], OPTIMISERS[optimiser]
    kept, used = strategies(case)[strategy]
    kept = kept_where(kept, optimiser)
    placed_step = mylib.filter_jit(step, out_shardings=(kept, kept, None))
    with jax.set_mesh(MESH):
        model, state, data = start(case, transform, kept)
        # Random weights and moments: zeros and ones hide mistakes.
        drawn = jax.tree.map(lambda x: as_shape(x) if eqx.is_array(x) else x, (model, state))
        verify(placed_step, data, case, transform, (kept, used), *drawn)


@pytest.mark.parametrize(("name", "strategy", "optimiser"), TRAINED)
def test_trains_where_it_is_kept(name, strategy, optimiser):
    kept, used = strategies(CASES[name])[strategy]
    kept = kept_where(kept, optimiser)
    with jax.set_mesh(MESH):
        model, state, losses = train(CASES[name], OPTIMISERS[optimiser], kept, used)
        wanted = mylib.resolve((model, state), kept)
    assert losses[-1] < losses[0]
    for x, target in zip(arrays((model, state)), jax.tree.leaves(wanted), strict=True):
        assert x.sharding.is_equivalent_to(target, x.ndim)


@pytest.mark.parametrize("strategy", ["fsdp", "tensor parallel", "both"])
@pytest.mark.parametrize("name", list(CASES))
def test_the_strategy_shards(name, strategy):
    """That the rules above do something: most of the model is split, and its state with it."""
    case = CASES[name]
    kept, _ = strategies(case)[strategy]
    model = untrained(case.make)
    state = OPTIMISERS["adamw"].init(eqx.filter(model, eqx.is_array))
    explanation = mylib.explain((model, state), kept, MESH)
    assert not explanation.faults
    (per_device,) = set(explanation.bytes_by_device.values())
    # 4, 2 and 8 ways at best.
    limit = {"fsdp": 0.35, "tensor parallel": 0.8, "both": 0.4}[strategy]
    assert per_device < limit * explanation.nbytes
    moments = [row.target for row in explanation.rows if ".mu" in row.leaf.name]
    assert moments == [row.target for row in explanation.rows if row.leaf.name.startswith("[0]")]


def forward_pass(name, strategy):
    """What the loss alone communicates."""
    case = CASES[name]
    kept, used = strategies(case)[strategy]

    def forward(model, batch):
        return case.loss(mylib.fully_shard(model, case.layers, kept, used), batch)

    with jax.set_mesh(MESH):
        model, _, data = start(case, OPTIMISERS["adamw"], kept)
        return _hlo.collectives(_hlo.compiled_text(forward, model, data))


def training_step(name, strategy):
    """What a step of training communicates, and the model as it is kept."""
    case = CASES[name]
    kept, used = strategies(case)[strategy]
    whole = mylib.filter_jit(step, out_shardings=(kept, kept, None))
    with jax.set_mesh(MESH):
        model, state, data = start(case, OPTIMISERS["adamw"], kept)
        compiled = whole.lower(data, case, OPTIMISERS["adamw"], (kept, used), model, state)
        compiled = compiled.compile()
    return _hlo.collectives(compiled.as_text()), model


def kinds(collectives):
    return {collective.kind for collective in collectives}


def gathered(collectives):
    """The shapes of what is gathered, in order."""
    return sorted(s for c in collectives if c.kind == "all-gather" for s in c.shapes)


def local_shapes(model, rule, only=""):
    """The shapes under `rule`, on one device, of the leaves that are stored otherwise."""
    with jax.set_mesh(MESH):
        used = mylib.resolve(model, rule)
    leaves = [jax.tree.leaves_with_path(t) for t in (eqx.filter(model, eqx.is_array), used)]
    return sorted(
        target.shard_shape(x.shape)
        for (path, x), (_, target) in zip(*leaves, strict=True)
        if only in jax.tree_util.keystr(path) and not x.sharding.is_equivalent_to(target, x.ndim)
    )


def weights_gathered(collectives, shapes):
    return Counter(shape for shape in gathered(collectives) if shape in shapes)


def twice(shapes, model, rule):
    """Those of layers are gathered in the backward pass, too."""
    return Counter(shapes) + Counter(local_shapes(model, rule, ".layers"))


@pytest.mark.slow
class TestCommunication:
    def test_data_parallel_reduces_gradients_and_the_loss_only(self):
        forward = forward_pass("transformer", "data parallel")
        whole, model = training_step("transformer", "data parallel")
        assert kinds(forward) == kinds(whole) == {"all-reduce"}
        assert [c.shapes for c in forward] == [((),)]
        # Each gradient once.
        reduced = sum(np.prod(s, dtype=int) for c in whole for s in c.shapes)
        assert reduced == sum(x.size for x in arrays(model)) + 1

    def test_fsdp_gathers_each_weight_once_and_those_of_layers_twice(self):
        forward = forward_pass("transformer", "fsdp")
        whole, model = training_step("transformer", "fsdp")
        split = local_shapes(model, replicated())
        assert len(split) == 15
        assert gathered(forward) == split
        assert weights_gathered(whole, split) == twice(split, model, replicated())
        # Reduced and cut where other backends scatter: XLA's CPU backend has no reduce-scatter.
        # What is permuted is a gradient: the embedding is smaller here than a batch.
        assert kinds(whole) == {"all-gather", "all-reduce", "collective-permute"}

    def test_megatron_reduces_once_for_a_layer_forward(self):
        case = CASES["mlp"]
        with jax.set_mesh(MESH):
            model = mylib.filter_shard(untrained(case.make), case.tensor_parallel)
            x = mylib.filter_shard(case.batch()[0], batch("data"))
            text = _hlo.compiled_text(lambda m, x: jax.vmap(m)(x), model, x)
        (only,) = _hlo.collectives(text)
        assert only.kind == "all-reduce" and only.shapes[0] in [(2, 8), (8, 2)]

    @pytest.mark.slow
    def test_megatron_transformer(self):
        forward = forward_pass("transformer", "tensor parallel")
        whole, _ = training_step("transformer", "tensor parallel")
        assert kinds(forward) == kinds(whole) == {"all-reduce"}
        # Two for each of two blocks, one for the embedding, one for the loss.
        assert len(forward) == 2 * 2 + 1 + 1

    def test_both_gather_over_data_and_reduce_over_model(self):
        forward = forward_pass("transformer", "both")
        whole, model = training_step("transformer", "both")
        shards = local_shapes(model, TRANSFORMER)
        assert gathered(forward) == shards
        assert weights_gathered(whole, shards) == twice(shards, model, TRANSFORMER)
        # What attention computes per head: jax 0.12 gathers it.
        heads = {"all-to-all"} if jax.__version_info__ < (0, 11) else set()
        assert kinds(whole) == {"all-gather", "all-reduce", "collective-permute"} | heads
        assert sum(c.kind == "all-reduce" for c in forward) == 2 * 2 + 1 + 1

    @pytest.mark.thorough
    def test_the_scanned_transformer_gathers_no_stack(self):
        for strategy in ("fsdp", "both"):
            whole, model = training_step("scanned", strategy)
            stack = len(model.layers.up.weight)
            assert not [shape for shape in gathered(whole) if len(shape) == 3 and shape[0] == stack]


@pytest.mark.thorough
def test_a_restored_run_goes_on_where_it_was():
    """`like` a running tree, or an abstract one: values from the host go where they were."""
    case = CASES["transformer"]
    kept, used = strategies(case)["both"]
    with jax.set_mesh(MESH):
        model, state, _ = train(case, OPTIMISERS["adamw"], kept, used)
    running = (model, state)
    saved = jax.tree.map(lambda x: np.asarray(x) if eqx.is_array(x) else x, running)
    abstract = mylib.filter_device_put(eqx.filter_eval_shape(lambda: running), kept, mesh=MESH)
    for rule in (like(running), like(abstract)):
        restored = mylib.filter_shard(saved, rule)
        for x, y in zip(arrays(restored), arrays(running), strict=True):
            assert x.sharding == y.sharding
            np.testing.assert_array_equal(x, y)


class StatefulNet(eqx.Module):
    conv: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 2)
        self.conv = eqx.nn.Conv2d(8, 32, 3, padding=1, key=keys[0])
        self.norm = eqx.nn.BatchNorm(32, "batch", mode="batch")
        self.head = eqx.nn.Linear(32, 8, key=keys[1])

    def __call__(self, image, state):
        image, state = self.norm(jax.nn.relu(self.conv(image)), state)
        return self.head(jnp.mean(image, axis=(1, 2))), state


@pytest.mark.slow
@pytest.mark.parametrize(
    "kept",
    [pytest.param(replicated(), marks=pytest.mark.thorough), SHARDED],
    ids=["data parallel", "fsdp"],
)
def test_a_net_with_state(kept):
    optim = optax.adamw(1e-2, eps=1e-4)

    def make():
        model, state = eqx.nn.make_with_state(StatefulNet)(KEY)
        return model, state, optim.init(eqx.filter(model, eqx.is_inexact_array))

    def step(data, model, state, optimiser):
        def loss(model, state):
            x, y = data
            model = mylib.fully_shard(model, eqx.nn.Conv2d, kept)
            run = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
            predicted, state = run(x, state)
            return jnp.mean((predicted - y) ** 2), state

        (value, state), grads = eqx.filter_value_and_grad(loss, has_aux=True)(model, state)
        updates, optimiser = optim.update(grads, optimiser, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, optimiser, value

    def run(mesh, kept):
        with jax.set_mesh(mesh):
            trained = mylib.filter_jit(make, out_shardings=kept)()
            data = mylib.filter_shard(pairs(8, 6, 6), batch("data"))
            out = (kept, replicated(), kept, None)
            jitted = mylib.filter_jit(step, out_shardings=out, donate="all-except-first")
            for _ in range(3):
                *trained, loss = jitted(data, *trained)
        return arrays(trained), float(loss)

    one = jax.make_mesh(
        (1, 1), ("data", "model"), devices=jax.devices()[:1], axis_types=(AxisType.Auto,) * 2
    )
    (ours, loss), (theirs, expected) = run(MESH, kept), run(one, replicated())
    assert loss == pytest.approx(expected, rel=1e-4)
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_partial_model():
    """Low-rank adapters: the frozen weights are split, what is trained is copied."""

    class Adapted(eqx.Module):
        frozen: eqx.nn.Linear
        a: jax.Array
        b: jax.Array

        def __call__(self, x):
            return self.frozen(x) + self.a @ (self.b @ x)

    model = Adapted(eqx.nn.Linear(64, 64, key=KEY), jnp.zeros((64, 4)), jnp.ones((4, 64)))
    trained = eqx.tree_at(lambda m: (m.a, m.b), jax.tree.map(lambda _: False, model), (True, True))
    rule = by_path({"frozen.**": fsdp("data", min_size=0), "a": P(), "b": P()})
    model = mylib.filter_shard(model, rule, mesh=MESH)
    parts = eqx.partition(model, trained)
    state = mylib.filter_shard(optax.adamw(1e-3).init(parts[0]), like(parts[0]))

    @mylib.filter_jit
    def step(parts, state, x):
        def loss(trained, frozen):
            return jnp.mean(jax.vmap(eqx.combine(trained, frozen))(x) ** 2)

        grads = eqx.filter_grad(loss)(*parts)
        updates, state = optax.adamw(1e-3).update(grads, state, parts[0])
        pinned = mylib.filter_shard((eqx.apply_updates(parts[0], updates), state), replicated())
        return (pinned[0], parts[1]), pinned[1]

    x = mylib.filter_shard(np.ones((8, 64), np.float32), batch("data"), mesh=MESH)
    with jax.set_mesh(MESH):
        (trained, frozen), state = step(parts, state, x)
    assert frozen.frozen.weight.sharding.spec == P("data")
    assert trained.a.sharding.is_fully_replicated and state[0].mu.a.sharding.is_fully_replicated
    assert not jnp.array_equal(trained.a, jnp.zeros((64, 4)))

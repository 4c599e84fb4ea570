"""`equinox.nn` layers on a mesh do what the table in docs/layers.md says, no more and no less."""

import inspect
import re
from functools import cache, partial
from typing import Any, NamedTuple

import _pages
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equinox import nn
from jax.sharding import AxisType, PartitionSpec as P

import mylib

KEY = jax.random.key(0)
AXES = ("data", "model")
AUTO = jax.make_mesh((2, 4), AXES, axis_types=(AxisType.Auto,) * 2)
EXPLICIT = jax.make_mesh((2, 4), AXES)
UPDATE = "docs/layers.md says otherwise: update its table"


def floats(*shape):
    return np.random.default_rng(0).standard_normal((8, *shape)).astype(np.float32)


def each(call):
    """A batched call of a layer without state."""
    return lambda layer, state, x: (jax.vmap(partial(call, layer))(x), state)


def stateful(layer, state, x):
    batched = jax.vmap(layer, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    return batched(x, state)


class Layer(NamedTuple):
    make: Any  # returns the layer, or the layer and its state
    x: Any
    call: Any = each(lambda layer, x: layer(x))


def batch_norm(mode, inference=False):
    norm, state = nn.make_with_state(nn.BatchNorm)(16, "batch", mode=mode)
    return nn.inference_mode(norm, inference), state


def tied():
    pair = nn.Linear(8, 8, key=KEY), nn.Linear(8, 8, key=jax.random.key(1))
    return nn.Shared(pair, lambda pair: pair[1].weight, lambda pair: pair[0].weight)


def both(shared, x):
    first, second = shared()
    return second(first(x))


def attend(layer, x, key=None):
    return layer(x, x, x, key=key)


def loop(cell, xs):
    return jax.lax.scan(lambda h, x: (cell(x, h), None), jnp.zeros(16), xs)[0]


LAYERS = {
    "`Linear`": Layer(lambda: nn.Linear(8, 4, key=KEY), floats(8)),
    "`Identity`": Layer(nn.Identity, floats(8)),
    "`MLP`": Layer(lambda: nn.MLP(8, 4, 16, 2, key=KEY), floats(8)),
    "`Sequential`": Layer(
        lambda: nn.Sequential([nn.Linear(8, 16, key=KEY), nn.LayerNorm(16)]), floats(8)
    ),
    "`Lambda`": Layer(lambda: nn.Lambda(jax.nn.relu), floats(8)),
    "`Shared`": Layer(tied, floats(8), each(both)),
    "`MultiheadAttention`": Layer(
        lambda: nn.MultiheadAttention(4, 16, key=KEY), floats(5, 16), each(attend)
    ),
    "`MultiheadAttention` with dropout": Layer(
        lambda: nn.MultiheadAttention(4, 16, dropout_p=0.5, key=KEY),
        floats(5, 16),
        each(partial(attend, key=KEY)),
    ),
    "`GRUCell`": Layer(
        lambda: nn.GRUCell(8, 16, key=KEY), floats(8), each(lambda f, x: f(x, jnp.zeros(16)))
    ),
    "`GRUCell` in `jax.lax.scan`": Layer(
        lambda: nn.GRUCell(8, 16, key=KEY), floats(5, 8), each(loop)
    ),
    "`LSTMCell`": Layer(
        lambda: nn.LSTMCell(8, 16, key=KEY),
        floats(8),
        each(lambda f, x: f(x, (jnp.zeros(16),) * 2)),
    ),
    "`LayerNorm`": Layer(lambda: nn.LayerNorm(16), floats(16)),
    "`RMSNorm`": Layer(lambda: nn.RMSNorm(16), floats(16)),
    "`GroupNorm`": Layer(lambda: nn.GroupNorm(4, 16), floats(16, 3)),
    '`BatchNorm`, `mode="batch"`': Layer(partial(batch_norm, "batch"), floats(16), stateful),
    '`BatchNorm`, `mode="ema"`': Layer(partial(batch_norm, "ema"), floats(16), stateful),
    "`BatchNorm` in inference": Layer(partial(batch_norm, "batch", True), floats(16), stateful),
    "`WeightNorm`": Layer(lambda: nn.WeightNorm(nn.Linear(8, 4, key=KEY)), floats(8)),
    "`SpectralNorm`": Layer(
        lambda: nn.make_with_state(nn.SpectralNorm)(nn.Linear(8, 4, key=KEY), "weight", key=KEY),
        floats(8),
        stateful,
    ),
    "`Embedding`": Layer(lambda: nn.Embedding(16, 8, key=KEY), np.arange(8) * 3 % 16),
    "`RotaryPositionalEmbedding`": Layer(lambda: nn.RotaryPositionalEmbedding(16), floats(5, 16)),
    "`Dropout`": Layer(lambda: nn.Dropout(0.5), floats(16), each(lambda f, x: f(x, key=KEY))),
    "`PReLU`": Layer(nn.PReLU, floats(16)),
    "`Conv2d`, `groups=4`": Layer(lambda: nn.Conv2d(4, 8, 3, groups=4, key=KEY), floats(4, 6, 6)),
}
for dims in (1, 2, 3):
    for name in (f"Conv{dims}d", f"ConvTranspose{dims}d"):
        conv = partial(getattr(nn, name), 4, 8, 3, key=KEY)
        LAYERS[f"`{name}`"] = Layer(conv, floats(4, *[4] * dims))
    for name in (f"AvgPool{dims}d", f"MaxPool{dims}d"):
        LAYERS[f"`{name}`"] = Layer(partial(getattr(nn, name), 2, 2), floats(4, *[4] * dims))
    for name in (f"AdaptiveAvgPool{dims}d", f"AdaptiveMaxPool{dims}d"):
        LAYERS[f"`{name}`"] = Layer(partial(getattr(nn, name), 2), floats(4, *[4] * dims))


def by_rows(leaf):
    return P("model") if leaf.ndim and leaf.shape[0] % 4 == 0 else P()


def gather(call):
    return lambda layer, state, x: call(mylib.filter_shard(layer, P()), state, x)


def auto(call):
    def with_auto_axes(*args):
        arrays, static = eqx.partition(args, eqx.is_array)
        inside = jax.sharding.auto_axes(
            lambda arrays: call(*eqx.combine(arrays, static)), out_sharding=(P("data"), P())
        )
        return inside(arrays)

    return with_auto_axes


def specify(call):
    del call
    return lambda layer, state, ids: (
        layer.weight.at[ids].get(out_sharding=P("data")),
        state,
    )


# What the table calls a fix: what becomes of the call, and how the batch is split.
FIXES = {
    "gather": (gather, "data"),
    "auto": (auto, "data"),
    "specify": (specify, "data"),
    "all axes": (lambda call: call, AXES),
}


def make(layer):
    made = layer.make()
    return made if isinstance(made, tuple) else (made, ())


def step(call, model, state, x):
    """Values, new state and gradients of a layer on a batch, compiled."""

    @eqx.filter_jit
    def run(model, state, x):
        @partial(eqx.filter_grad, has_aux=True)
        def gradients(inputs, state):
            out, state = call(inputs[0], state, inputs[1])
            return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(out)), (out, state)

        return gradients((model, x), state)

    return run(model, state, x)


def close(tree, expected):
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True)
    return all(np.allclose(x, y, rtol=1e-4, atol=1e-4) for x, y in pairs)


@cache
def on_one_device(name):
    layer = LAYERS[name]
    return step(layer.call, *make(layer), layer.x)


def outcome(name, mesh, weights, batch="data", fix=lambda call: call):
    # Before any mesh: RotaryPositionalEmbedding keeps the tables of its first call.
    expected = on_one_device(name)
    layer = LAYERS[name]
    with jax.set_mesh(mesh):
        model, state = mylib.filter_shard(make(layer), (weights, P()))
        x = mylib.filter_shard(layer.x, P(batch))
        try:
            found = step(fix(layer.call), model, state, x)
        except Exception:  # whatever JAX and Equinox raise
            return "fails"
    (gradients, _), (out, _) = found
    if mesh == EXPLICIT:
        for y in jax.tree.leaves(out):
            assert y.sharding.spec[0] == batch
        trainable = eqx.filter(model, eqx.is_inexact_array)
        for g, w in zip(jax.tree.leaves(gradients), jax.tree.leaves(trainable), strict=True):
            assert g.sharding.is_equivalent_to(w.sharding, w.ndim)
    return "runs" if close(found, expected) else "wrong"


def table():
    text = (_pages.ROOT / "docs" / "layers.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    head, _, *body = rows
    return {row[0]: dict(zip(head, row, strict=True)) for row in body}


TABLE = table()
LINK = re.compile(r"\[([^]]+)\]")
FIXED = [(name, fix) for name, row in TABLE.items() for fix in LINK.findall(row["fix"])]
VERSION = re.compile(r"jax (\d+)\.(\d+)$")


def column_of_this_jax(row):
    """The heading of the newest JAX in the table that is not newer than this one."""
    versions = {tuple(map(int, found)): head for head in row for found in VERSION.findall(head)}
    return versions[max(v for v in versions if v <= jax.__version_info__)]


def test_the_table_has_every_layer():
    assert TABLE.keys() == LAYERS.keys()
    abstract = {"Conv", "ConvTranspose", "Pool", "AdaptivePool", "StatefulLayer", "StateIndex"}
    public = {
        name
        for name, layer in vars(nn).items()
        if inspect.isclass(layer) and issubclass(layer, eqx.Module)
    }
    assert public - abstract == {re.match(r"`(\w+)`", name)[1] for name in TABLE}


def every_third(names, first):
    """Every layer is in one column of the table, and a thorough run tries them all."""
    return [
        pytest.param(name, marks=[] if i % 3 == first and not is_as_in_2d(name) else THOROUGH)
        for i, name in enumerate(names)
    ]


THOROUGH = pytest.mark.thorough


def is_as_in_2d(name):
    """Convolutions and pools of one and of three dimensions."""
    return "1d`" in name or "3d`" in name


@pytest.mark.parametrize("name", every_third(LAYERS, 0))
@pytest.mark.everyday("`Linear`", "`RMSNorm`", "`Dropout`", "`Conv2d`", rest="thorough")
def test_auto_axes(name):
    for weights in (P(), by_rows):
        assert outcome(name, AUTO, weights) == TABLE[name]["Auto axes"], UPDATE


@pytest.mark.slow
@pytest.mark.parametrize("name", every_third(LAYERS, 1))
def test_explicit_axes(name):
    said = TABLE[name][column_of_this_jax(TABLE[name])]
    assert outcome(name, EXPLICIT, P()) == said, UPDATE


@pytest.mark.slow
@pytest.mark.parametrize("name", every_third(LAYERS, 2))
def test_explicit_axes_and_sharded_weights(name):
    said = TABLE[name]["Explicit axes, sharded weights"]
    assert outcome(name, EXPLICIT, by_rows) == said, UPDATE


@pytest.mark.parametrize(
    "name, fix",
    [pytest.param(*each, marks=THOROUGH if is_as_in_2d(each[0]) else []) for each in FIXED],
)
@pytest.mark.everyday(
    '`BatchNorm`, `mode="ema"`-auto',
    "`BatchNorm` in inference-gather",
    "`Embedding`-auto",
    "`Embedding`-specify",
    "`Conv2d`-gather",
    rest="thorough",
)
def test_fixes(name, fix):
    change, batch = FIXES[fix]
    weights = P() if fix == "all axes" else by_rows
    assert outcome(name, EXPLICIT, weights, batch, change) == "runs", UPDATE


def test_every_layer_that_does_not_run_has_a_fix():
    for name, row in TABLE.items():
        assert bool(row["fix"]) == (not {"fails", "wrong"}.isdisjoint(row.values())), name

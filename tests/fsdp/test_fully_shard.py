"""`fully_shard`: the numbers of one device, the programs of FSDP, and what is refused."""

import io

import _hlo
import equinox as eqx
import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from close import assert_close
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float

import mylib
from mylib.rules import batch, by_axes, fsdp, replicated

WIDTH, HIDDEN, DEPTH = 32, 64, 4
AUTO = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
EXPLICIT = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
GRID = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
KEPT = fsdp("data", min_size=128)
KEY = jax.random.key(0)


class Layer(eqx.Module):
    up: Float[Array, "embed mlp"]
    down: Float[Array, "mlp embed"]
    scale: Float[Array, ""]
    name: str = eqx.field(static=True)

    def __init__(self, rng):
        # NumPy's numbers: JAX would compile programs for its own whenever this file is collected.
        self.up = jnp.asarray(rng.normal(size=(WIDTH, HIDDEN)) / WIDTH**0.5, jnp.float32)
        self.down = jnp.asarray(rng.normal(size=(HIDDEN, WIDTH)) / HIDDEN**0.5, jnp.float32)
        self.scale = jnp.asarray(1.0)
        self.name = "a layer"

    def __call__(self, x):
        return x + self.scale * jax.nn.relu(x @ self.up) @ self.down

    def halved(self, x):
        return self(x) / 2


class Net(eqx.Module):
    """Layers in a list, or stacked."""

    layers: list[Layer] | Layer
    head: eqx.nn.Linear

    def __init__(self, stacked=False):
        rng = np.random.default_rng(2)
        layers = [Layer(rng) for _ in range(DEPTH)]
        stack = lambda *xs: jnp.asarray(np.stack(xs))  # noqa: E731
        self.layers = jax.tree.map(stack, *layers) if stacked else layers
        self.head = eqx.nn.Linear(WIDTH, 8, key=KEY)

    def __call__(self, x):
        if isinstance(self.layers, list):
            for layer in self.layers:
                x = layer(x)
        else:
            arrays, rest = eqx.partition(self.layers, eqx.is_array)
            x, _ = jax.lax.scan(lambda x, a: (eqx.combine(a, rest)(x), None), x, arrays)
        return x @ self.head.weight.T + self.head.bias


LISTED, STACKED = Net(), Net(stacked=True)
NETS = pytest.mark.parametrize("net", [LISTED, STACKED], ids=["list", "scan"])
X = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32)


def loss_of(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def loss_by_example(model, x, y):
    return loss_of(jax.vmap(model), x, y)


COPIED = replicated()


def step(loss, layers, kept, used=COPIED, **options):
    """A value and gradient, as the guide tells to write it."""

    @mylib.filter_jit(out_shardings=(None, kept))
    def run(model, *data):
        def sharded(model):
            return loss(mylib.fully_shard(model, layers, kept, used, **options), *data)

        return eqx.filter_value_and_grad(sharded)(model)

    return run


def placed(mesh, kept, model, *data):
    return mylib.filter_shard(model, kept, mesh=mesh), *(
        mylib.filter_shard(x, batch("data"), mesh=mesh) for x in data
    )


@NETS
@pytest.mark.parametrize(
    "mesh, loss",
    [
        pytest.param(AUTO, loss_of, id="auto"),
        pytest.param(EXPLICIT, loss_by_example, id="explicit, vmap"),
        pytest.param(AUTO, loss_by_example, id="auto, vmap", marks=pytest.mark.thorough),
        pytest.param(EXPLICIT, loss_of, id="explicit", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.everyday("auto-scan", "explicit, vmap-list")
def test_numbers_are_those_of_one_device(net, mesh, loss):
    run, given = step(loss, Layer, KEPT), placed(mesh, KEPT, net, X, Y)
    with jax.set_mesh(mesh):
        mylib.testing.verify(run, *given)
        mylib.testing.assert_placed(run(*given)[1], KEPT, mesh=mesh)


OPTIONS = {
    "no checkpoint": {"checkpoint": False},
    "all is saved but the weights": {"policy": jax.checkpoint_policies.everything_saveable},
    "not in turn": {"in_turn": False},
    "nothing forced": {"used": None},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.everyday("no checkpoint", "not in turn")
def test_options_change_no_number(option, net=LISTED):
    options = {"used": replicated(), **OPTIONS[option]}
    run = step(loss_of, Layer, KEPT, options.pop("used"), mesh=AUTO, **options)
    with jax.set_mesh(AUTO):
        mylib.testing.verify(run, *placed(AUTO, KEPT, net, X, Y))


def vmap_of_jvp(f, w):
    """`vmap` over tangents of weights that it doesn't map."""

    def along(n):
        return jax.jvp(f, (w,), (jax.tree.map(lambda x: n * x, w),))[1]

    return jax.vmap(along)(jnp.arange(3.0))


DERIVATIVES = {
    "jvp": lambda f, w: jax.jvp(f, (w,), (w,))[1],
    "vmap of jvp": vmap_of_jvp,
    "forward over reverse": lambda f, w: jax.jvp(jax.grad(f), (w,), (w,))[1],
    "reverse over forward": lambda f, w: jax.grad(lambda w: jax.jvp(f, (w,), (w,))[1])(w),
    "reverse over vmap of jvp": lambda f, w: jax.grad(lambda w: vmap_of_jvp(f, w).sum())(w),
}


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
@pytest.mark.parametrize(
    "net", [STACKED, pytest.param(LISTED, marks=pytest.mark.thorough)], ids=["scan", "list"]
)
@pytest.mark.everyday("scan-jvp", "scan-vmap of jvp", "list-jvp", "list-vmap of jvp")
def test_other_derivatives(net, derivative):
    """In a bare `jax.jit`: forward mode needs nothing of `filter_jit`."""
    weights, rest = eqx.partition(net, eqx.is_inexact_array)

    def smooth(model):
        return jnp.mean(jnp.sin(model(X)) ** 2)

    def sharded(weights):
        return smooth(mylib.fully_shard(eqx.combine(weights, rest), Layer, KEPT, mesh=AUTO))

    found = jax.jit(lambda w: derivative(sharded, w))(placed(AUTO, KEPT, weights)[0])
    expected = jax.jit(lambda w: derivative(lambda w: smooth(eqx.combine(w, rest)), w))(weights)
    assert_close(found, expected, rtol=1e-4)


TENSOR_PARALLEL = by_axes({"mlp": "model"}) | replicated()
PARALLEL = {
    "tensor parallel": (TENSOR_PARALLEL & KEPT, TENSOR_PARALLEL),
    "copied over an axis": (KEPT, replicated()),  # HSDP: "model" has copies
    "over both axes": (fsdp(("data", "model"), min_size=128), replicated()),
}


@pytest.mark.parametrize("strategy", PARALLEL)
@pytest.mark.everyday("tensor parallel", "over both axes", rest="thorough")
def test_two_axes(strategy):
    net = LISTED if strategy == "over both axes" else STACKED
    kept, used = PARALLEL[strategy]
    run, given = step(loss_of, Layer, kept, used), placed(GRID, kept, net, X, Y)
    with jax.set_mesh(GRID):
        mylib.testing.verify(run, *given)
        mylib.testing.assert_placed(run(*given)[1], kept, mesh=GRID)


def image_pairs():
    rng = np.random.default_rng(0)
    pair = rng.normal(size=(8, 8, 6, 6)), rng.normal(size=(8, 8))
    return [x.astype(np.float32) for x in pair]


def tokens():
    rng = np.random.default_rng(0)
    return [rng.integers(0, models.VOCAB, (8, models.LENGTH + 1)).astype(np.int32)]


def next_token_loss(model, tokens):
    logits = jax.nn.log_softmax(jax.vmap(model)(tokens[:, :-1]))
    return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], -1))


MODELS = {
    "convolutions": (
        lambda: models.ConvNet(key=KEY), eqx.nn.Conv2d, loss_by_example, image_pairs
    ),
    "transformer": (
        lambda: models.Transformer(key=KEY), models.Block, next_token_loss, tokens
    ),
    "scanned": (
        lambda: models.Transformer(scanned=True, key=KEY), models.Block, next_token_loss, tokens
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        "convolutions",
        pytest.param("transformer", marks=pytest.mark.thorough),
        pytest.param("scanned", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.slow
def test_ten_steps_of_training(case):
    make, layers, loss, data = MODELS[case]
    # A larger `eps` than usual: the tiniest gradients are rounding errors, which Adam blows up.
    optimiser = optax.adamw(1e-2, eps=1e-4)

    def train(mesh, kept, shard):
        model = make()
        state = optimiser.init(eqx.filter(model, eqx.is_array))
        model, state = mylib.filter_shard((model, state), kept, mesh=mesh)
        batches = mylib.filter_shard(data(), batch("data"), mesh=mesh)

        @mylib.filter_jit(out_shardings=(kept, kept, None), mesh=mesh)
        def update(batches, model, state):
            value, grads = eqx.filter_value_and_grad(lambda m: loss(shard(m), *batches))(model)
            updates, state = optimiser.update(grads, state, eqx.filter(model, eqx.is_array))
            return eqx.apply_updates(model, updates), state, value

        losses = []
        for _ in range(10):
            model, state, value = update(batches, model, state)
            losses.append(float(value))
        return losses, model

    one = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1], axis_types=(AxisType.Auto,))
    reference, _ = train(one, replicated(), lambda model: model)
    losses, model = train(AUTO, KEPT, lambda m: mylib.fully_shard(m, layers, KEPT, mesh=AUTO))
    np.testing.assert_allclose(losses, reference, rtol=2e-5)
    assert losses[-1] < losses[0]
    mylib.testing.assert_placed(model, KEPT, mesh=AUTO)


def lowered(net, layers=Layer, **options):
    with jax.set_mesh(AUTO):
        return step(loss_of, layers, KEPT, **options).lower(*placed(AUTO, KEPT, net, X, Y))


def program(net, layers=Layer, **options):
    return lowered(net, layers, **options).compile()


@NETS
def test_each_layer_gathers_its_weights_twice_and_no_stack_is_gathered(net):
    ran = _hlo.executed(program(net).as_text())
    gathers = {c: n for c, n in ran.items() if c.kind == "all-gather"}
    # As parts of the CPU's program they may have a dimension of size 1 in front.
    shapes = [
        tuple(d for d in shape if d != 1) for c, n in gathers.items() for shape in c.shapes * n
    ]
    of_layers = [shape for shape in shapes if set(shape) == {WIDTH, HIDDEN}]
    assert len(of_layers) == 2 * 2 * DEPTH
    assert not [shape for shape in shapes if DEPTH in shape]


@NETS
def test_gathered_weights_are_not_saved(net):
    everything = jax.checkpoint_policies.everything_saveable
    saved = program(net, checkpoint=False), program(net, policy=everything)
    kept_whole, recomputed = (_hlo.gathered(p.as_text())[0] for p in saved)
    # Out of a loop, `up` of the first layer is not needed on the way back.
    assert recomputed - kept_whole in (2 * DEPTH, 2 * DEPTH - 1)


def test_sent_in_the_dtype_of_computing():
    # XLA's CPU compiler sends bf16 as f32, so the program is read before it. What is sent of the
    # gradients is a test for real compilers.
    lines = lowered(STACKED, dtype=jnp.bfloat16).as_text().splitlines()
    whole = [line for line in lines if "sharding_constraint" in line and "[{}, {}]>" in line]
    assert any("tensor<32x64xbf16>" in line for line in whole)
    assert all(line.endswith("bf16>") for line in whole)
    model = placed(AUTO, KEPT, STACKED)[0]
    grads = eqx.filter_grad(
        lambda m: jnp.sum(mylib.fully_shard(m, Layer, KEPT, mesh=AUTO, dtype=jnp.bfloat16)(X))
    )(model)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


def test_bf16_is_what_the_same_casts_are_on_one_device():
    def cast(model):
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_array(x) else x, model)

    expected = eqx.filter_value_and_grad(lambda m: loss_of(cast(m), X, Y))(LISTED)
    with jax.set_mesh(AUTO):
        run = step(loss_of, Layer, KEPT, dtype=jnp.bfloat16)
        found = run(*placed(AUTO, KEPT, LISTED, X, Y))
    assert_close(found[0], expected[0], rtol=1e-2)
    assert_close(found[1], expected[1], rtol=3e-2)


class Odd(eqx.Module):
    weight: Array
    table: Array
    key: Array

    def __call__(self, x):
        assert self.weight.dtype == jnp.bfloat16 and self.table.dtype == jnp.int32
        noise = jax.random.normal(self.key, x.shape)
        return (x @ self.weight)[:, self.table] + noise


def test_integers_and_keys_are_left_as_they_are():
    odd = Odd(jnp.ones((64, 64)), jnp.arange(64), jax.random.key(3))
    kept = {"float": fsdp("data"), "rest": P()}
    rule = lambda leaf: kept["float" if leaf.ndim == 2 else "rest"]  # noqa: E731
    x = np.ones((8, 64), np.float32)
    grads = eqx.filter_jit(
        eqx.filter_grad(
            lambda odd, x: jnp.sum(
                mylib.fully_shard(odd, Odd, rule, mesh=AUTO, dtype=jnp.bfloat16)(x)
            )
        )
    )(odd, x)
    np.testing.assert_array_equal(grads.weight, np.full((64, 64), 8.0))


class Dropping(eqx.Module):
    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __call__(self, x, *, key):
        return self.dropout(jax.vmap(self.linear)(x), key=key)


def test_dropout_is_that_of_one_device():
    model = Dropping(eqx.nn.Linear(64, 64, key=KEY), eqx.nn.Dropout(0.5))
    x, key = np.ones((8, 64), np.float32), jax.random.key(5)

    def loss(model, x):
        return jnp.sum(model(x, key=key) ** 2)

    with jax.set_mesh(AUTO):
        mylib.testing.verify(step(loss, Dropping, KEPT), *placed(AUTO, KEPT, model, x))


class Normed(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __call__(self, x, state):
        return self.norm(self.linear(x), state)


def test_state():
    def make():
        norm = eqx.nn.BatchNorm(64, "batch", mode="batch")
        return Normed(eqx.nn.Linear(64, 64, key=KEY), norm)

    model, state = eqx.nn.make_with_state(make)()
    x = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)

    def value(model, state, x, shard):
        apply = jax.vmap(shard(model), axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        y, state = apply(x, state)
        return jnp.sum(jnp.sin(y)), state

    @eqx.filter_jit
    def run(model, state, x, shard):
        return eqx.filter_value_and_grad(value, has_aux=True)(model, state, x, shard)

    expected = run(model, state, x, lambda m: m)
    found = run(model, state, x, lambda m: mylib.fully_shard(m, Normed, KEPT, mesh=AUTO))
    assert_close(found, expected, rtol=1e-5)


# What it returns is an ordinary model.


def sharded(net=LISTED, layers=Layer, **options):
    return mylib.fully_shard(net, layers, KEPT, mesh=AUTO, **options)


def test_classes_paths_and_static_fields_stay():
    model = sharded()
    assert isinstance(model.layers[0], Layer) and model.layers[0].name == "a layer"
    assert type(model.layers[0]).__qualname__ == "Layer" and "Layer(" in repr(model)
    assert repr(model) == repr(mylib.filter_shard(LISTED, KEPT, mesh=AUTO))
    paths = [path for path, _ in jax.tree.leaves_with_path(LISTED)]
    assert [path for path, _ in jax.tree.leaves_with_path(model)] == paths
    rows = mylib.explain(model, KEPT, AUTO).rows
    assert [row.spec for row in rows] == [
        row.spec for row in mylib.explain(LISTED, KEPT, AUTO).rows
    ]


def test_layers_of_equal_shapes_stay_of_one_structure():
    first, second = sharded().layers[:2]
    assert jax.tree.structure(first) == jax.tree.structure(second)
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *sharded().layers)
    y = jax.lax.scan(lambda x, layer: (layer(x), None), X, stacked)[0]
    np.testing.assert_allclose(y @ LISTED.head.weight.T + LISTED.head.bias, LISTED(X), rtol=1e-5)


def test_tree_at_and_serialisation(tmp_path):
    model = eqx.tree_at(lambda m: m.layers[0].down, sharded(), jnp.zeros((HIDDEN, WIDTH)))
    expected = eqx.tree_at(lambda m: m.layers[0].down, LISTED, jnp.zeros((HIDDEN, WIDTH)))
    np.testing.assert_allclose(model(X), expected(X), rtol=1e-5)
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, model)
    file.seek(0)
    loaded = eqx.tree_deserialise_leaves(file, LISTED)
    np.testing.assert_array_equal(loaded.layers[0].up, LISTED.layers[0].up)


def test_through_our_functions():
    model = sharded(STACKED)
    for wrap in (mylib.filter_jit, mylib.filter_checkpoint, eqx.filter_jit, eqx.filter_checkpoint):
        np.testing.assert_allclose(wrap(lambda m, x: m(x))(model, X), STACKED(X), rtol=1e-5)


@pytest.mark.parametrize(
    "layers",
    [
        [Layer, eqx.nn.Linear],
        {Layer: ["__call__", "halved"]},
        {Layer: "__call__"},
        lambda module, path: path.startswith(".layers["),
    ],
    ids=["list", "methods", "method", "predicate"],
)
def test_ways_to_name_layers(layers):
    text = program(LISTED, layers).as_text()
    assert _hlo.gathered(text)[0] >= 4 * DEPTH


def test_methods_that_gather():
    layer = mylib.fully_shard(LISTED.layers[0], {Layer: ["halved"]}, KEPT, mesh=AUTO)
    halved, called = (
        str(jax.make_jaxpr(lambda x, f=f: f(x))(X)) for f in (layer.halved, layer.__call__)
    )
    assert "remat" in halved and "remat" not in called


class Tying(eqx.Module):
    """Its head is the layer, transposed."""

    layer: Layer

    def __call__(self, x):
        return self.layer(x) @ self.layer.down.T @ self.layer.up.T


def test_weights_read_outside_of_a_call_are_as_they_are_kept():
    model = Tying(LISTED.layers[0])

    def loss(model, x):
        return jnp.sum(model(x) ** 2)

    with jax.set_mesh(AUTO):
        model_there, x = placed(AUTO, KEPT, model, X)
        mylib.testing.verify(step(loss, Layer, KEPT), model_there, x)
    layer = mylib.fully_shard(model_there, Layer, KEPT, mesh=AUTO, dtype=jnp.bfloat16).layer
    assert layer.down is model_there.layer.down


# What it refuses.


class Bare(eqx.Module):
    """Without annotations."""

    weight: Array

    def __call__(self, x):
        return x @ self.weight


def through(bare, x):
    return jax.lax.scan(lambda x, layer: (layer(x), None), x, bare)[0]


def test_a_stack_split_by_layer_is_refused():
    stack = Bare(jnp.ones((64, 32, 32)))
    with pytest.raises(mylib.PlacementError) as caught:
        through(mylib.fully_shard(stack, Bare, fsdp("data"), mesh=AUTO), X)
    (fault,) = caught.value.faults
    assert fault.path == "Bare.weight" and fault.shape == (32, 32)
    assert "'data' splits them by layer" in fault.reason and "stacked=" in fault.fix
    kept = fsdp("data", stacked=Bare)
    assert mylib.resolve(stack, kept, mesh=AUTO).weight.spec == P(None, "data")
    through(mylib.fully_shard(stack, Bare, kept, mesh=AUTO), X)


def test_layers_that_are_not_there():
    with pytest.raises(mylib.PlacementError, match="no Module of the model matches") as caught:
        sharded(layers=(Layer, eqx.nn.Conv2d))
    (fault,) = caught.value.faults
    assert "Conv2d" in fault.request and "Net, Layer, Linear" in fault.fix
    with pytest.raises(mylib.PlacementError, match="no Module of the model matches"):
        sharded(layers=lambda module, path: False)
    with pytest.raises(mylib.PlacementError) as caught:
        sharded(layers=(Net, Layer))
    (fault,) = caught.value.faults
    assert "Layer" in fault.request and "inside other layers" in fault.reason


def test_all_faults_at_once():
    with pytest.raises(mylib.PlacementError) as caught:
        mylib.fully_shard(LISTED, eqx.nn.Conv2d, P("nowhere"), P("dat"), mesh=AUTO)
    told = str(caught.value)
    assert "'nowhere'" in told and "'dat'" in told and "no Module" in told


def test_twice():
    with pytest.raises(mylib.PlacementError, match="it gathers its weights already"):
        mylib.fully_shard(sharded(), Layer, KEPT, mesh=AUTO)


class Tied(eqx.Module):
    shared: eqx.nn.Shared

    def __init__(self):
        pair = eqx.nn.Embedding(64, 32, key=KEY), eqx.nn.Linear(32, 64, use_bias=False, key=KEY)
        self.shared = eqx.nn.Shared(pair, lambda pair: pair[1].weight, lambda pair: pair[0].weight)

    def __call__(self, token):
        embed, unembed = self.shared()
        return unembed(embed(token))


def test_tied_weights():
    with pytest.raises(mylib.PlacementError, match="tied") as caught:
        mylib.fully_shard(Tied(), eqx.nn.Embedding, KEPT, mesh=AUTO)
    assert caught.value.faults[0].path == ".shared.pytree[0]"
    model = mylib.fully_shard(Tied(), Tied, KEPT, mesh=AUTO)
    np.testing.assert_allclose(model(jnp.array(3)), Tied()(jnp.array(3)), rtol=1e-6)


def test_manual_axes():
    model = sharded()
    run = mylib.filter_shard_map(
        lambda x: model.layers[0](x), mesh=AUTO, in_specs=P("data"), out_specs=P("data")
    )
    with pytest.raises(mylib.PlacementError, match="'data' is Manual"):
        run(X)


def test_another_number_of_arrays():
    model = eqx.tree_at(lambda m: m.layers[0].scale, sharded(), None)
    with pytest.raises(mylib.PlacementError, match="not those of the model that"):
        model(X)


def test_host_memory_is_for_what_is_kept():
    host = NamedSharding(AUTO, P(), memory_kind="pinned_host")
    with pytest.raises(mylib.PlacementError, match="programs can't compute in"):
        mylib.fully_shard(LISTED, Layer, KEPT, host, mesh=AUTO)


def test_wrong_arguments():
    cases = [
        ((LISTED, LISTED, KEPT), {}, "does not select Modules"),
        ((LISTED, (), KEPT), {}, "does not select Modules"),
        ((LISTED, [], KEPT), {}, "does not select Modules"),
        ((LISTED, KEPT, Layer), {}, r"the layers \(Layer\) come before where weights are kept"),
        ((LISTED, KEPT, [Layer, Net]), {}, r"the layers \(Layer, Net\) come before"),
        ((LISTED, {}, KEPT), {}, "does not select Modules"),
        ((LISTED, {Layer: []}, KEPT), {}, "Layer has no method"),
        ((LISTED, Layer, KEPT), {"dtype": jnp.int32}, "not a floating dtype"),
        ((LISTED, Layer, KEPT), {"reduce_dtype": jnp.int32}, "not a floating dtype"),
        (
            (LISTED, Layer, KEPT),
            {"policy": print, "checkpoint": False},
            "checkpoint=False can't be combined with policy=",
        ),
    ]
    for args, options, told in cases:
        with pytest.raises(TypeError, match=told):
            mylib.fully_shard(*args, mesh=AUTO, **options)


def test_what_is_kept_in_host_memory():
    kept = jax.tree.map(
        lambda s: s.with_memory_kind("pinned_host"), mylib.resolve(STACKED, KEPT, mesh=AUTO)
    )
    model = mylib.filter_device_put(STACKED, kept)
    assert model.layers.up.sharding.memory_kind == "pinned_host"

    @eqx.filter_jit
    def run(model, x, y):
        def loss(model):
            return loss_of(mylib.fully_shard(model, Layer, kept, mesh=AUTO), x, y)

        return eqx.filter_value_and_grad(loss)(model)

    _, x, y = placed(AUTO, KEPT, STACKED, X, Y)
    mylib.testing.verify(run, model, x, y)


# The rule.


def test_fsdp_never_takes_the_layers_of_a_stack():
    many = 128
    keys = jax.random.split(KEY, many)
    stacked = lambda x: jax.ShapeDtypeStruct((many, *x.shape), x.dtype)  # noqa: E731
    annotated = jax.tree.map(stacked, Layer(np.random.default_rng(0)))
    linear = eqx.filter_eval_shape(
        eqx.filter_vmap(lambda key: eqx.nn.Linear(32, 32, key=key)), keys
    )
    found = mylib.resolve((annotated, linear), fsdp("data"), mesh=AUTO)
    assert found[0].up.spec == P(None, None, "data") and found[0].scale.spec == P()
    assert (found[1].weight.spec, found[1].bias.spec) == (P(None, "data"), P(None, "data"))
    told = mylib.explain(annotated, fsdp("data"), AUTO).rows[0].why
    assert "behind that of the stacked layers" in told
    assert mylib.explain(annotated, fsdp("data"), AUTO).rows[2].spec == "P()"


def test_fsdp_of_stacks_without_annotations():
    stack = {"m": Bare(jax.ShapeDtypeStruct((64, 32, 32), jnp.float32))}
    assert mylib.resolve(stack, fsdp("data"), mesh=AUTO)["m"].weight.spec == P("data")
    rule = fsdp("data", stacked=(Bare,))
    assert mylib.resolve(stack, rule, mesh=AUTO)["m"].weight.spec == P(None, "data")
    assert repr(rule) == "fsdp('data', stacked=(Bare))"
    with pytest.raises(TypeError, match="not a class"):
        fsdp("data", stacked="Bare")

"""`fully_shard(reduce_dtype=...)`: gradients of products are wide. All else is as without it."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jaxtyping import Array

import mylib
from mylib.rules import batch, fsdp

AUTO = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
EXPLICIT = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
KEPT = fsdp("data", min_size=64)
KEY = jax.random.key(0)
WIDTH, ROWS = 16, 8 * 257  # a sum of 257 ones on each device: bf16 has 256 and 258
X = np.ones((ROWS, WIDTH), np.float32)


class Cell(eqx.Module):
    """Weights used in many ways."""

    square: Array
    halves: Array
    bias: Array
    rate: Array
    low: Array
    rank: Array
    kernel: Array
    table: Array
    turns: Array
    name: str = eqx.field(static=True, default="cell")

    def __call__(self, x):
        up, down = jnp.split(self.halves, 2, -1)
        y = jax.nn.relu(x) @ self.square.T + self.bias
        y = y + x @ up + (x @ down) * jnp.exp(-jax.nn.softplus(self.rate)).astype(x.dtype)
        y = y + x @ (self.low @ self.rank)
        y = y + jax.checkpoint(lambda x, w: jnp.einsum("...i,ij->...j", x, w))(x, self.square)
        image = x.reshape(-1, 1, 4, 4)
        y = y + jax.lax.conv_general_dilated(image, self.kernel, (1, 1), "SAME").reshape(x.shape)
        y = y + self.table[jnp.zeros(x.shape[:-1], jnp.int32)]
        return jax.lax.scan(lambda y, w: (y + x * w, None), y, self.turns)[0]


def cell(key=KEY):
    shapes = [(WIDTH, WIDTH), (WIDTH, 2 * WIDTH), (WIDTH,), (WIDTH,), (WIDTH, 4), (4, WIDTH)]
    shapes += [(1, 1, 3, 3), (8, WIDTH), (2, WIDTH)]
    keys = jax.random.split(key, len(shapes))
    return Cell(*(jax.random.normal(k, s) / 4 for k, s in zip(keys, shapes, strict=True)))


def gradient(model, x, mesh=AUTO, by_example=False, dtype=jnp.bfloat16, reduce_dtype=jnp.float32):
    """Of the sum of what `model` returns."""

    @mylib.filter_jit(out_shardings=KEPT, mesh=mesh)
    def run(model, x):
        def loss(model):
            model = mylib.fully_shard(
                model, type(model), KEPT, mesh=mesh, dtype=dtype, reduce_dtype=reduce_dtype
            )
            call = jax.vmap(model) if by_example else model
            return jnp.sum(call(x.astype(dtype or x.dtype)).astype(jnp.float32))

        return eqx.filter_grad(loss)(model)

    model = mylib.filter_shard(model, KEPT, mesh=mesh)
    return run(model, mylib.filter_shard(x, batch("data"), mesh=mesh))


def assert_close(found, expected, rtol):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * np.max(np.abs(y)))


class Plain(eqx.Module):
    weight: Array
    bias: Array

    def __call__(self, x):
        return x @ self.weight.T + self.bias


def test_gradients_are_not_rounded():
    zeros = Plain(jnp.zeros((WIDTH, WIDTH)), jnp.zeros(WIDTH))
    found = gradient(zeros, X)
    np.testing.assert_array_equal(found.weight, np.full((WIDTH, WIDTH), ROWS))
    assert np.all(gradient(zeros, X, reduce_dtype=None).weight != ROWS)


class Views(eqx.Module):
    """Products with parts of weights, on the way to which there are no sums."""

    square: Array
    halves: Array
    turns: Array

    def __call__(self, x):
        up, down = jnp.split(self.halves, 2, -1)
        y = x @ up + x @ down.T.reshape(4, 4, WIDTH).reshape(WIDTH, WIDTH)
        y = y + jax.checkpoint(lambda x, w: jnp.einsum("...i,ij->...j", x, w))(x, self.square)
        y = y + jax.jit(lambda x, w: x @ w.T)(x, checkpoint_name(self.square, "square"))
        return jax.lax.scan(lambda y, w: (y + x @ w, None), y, self.turns)[0]


@pytest.mark.thorough
def test_gradients_of_parts_are_not_rounded():
    shapes = [(WIDTH, WIDTH), (WIDTH, 2 * WIDTH), (2, WIDTH, WIDTH)]
    found = gradient(Views(*map(jnp.zeros, shapes)), X)
    np.testing.assert_array_equal(found.square, np.full((WIDTH, WIDTH), 2.0 * ROWS))
    np.testing.assert_array_equal(found.halves, np.full((WIDTH, 2 * WIDTH), ROWS))
    np.testing.assert_array_equal(found.turns, np.full((2, WIDTH, WIDTH), ROWS))


@pytest.mark.thorough
@pytest.mark.parametrize("by_example", [False, True], ids=["", "vmap"])
@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_numbers_are_those_of_one_device(mesh, by_example):
    x = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)
    expected = eqx.filter_grad(lambda m: jnp.sum(m(x)))(cell())
    with jax.set_mesh(mesh):
        found = gradient(cell(), x, mesh, by_example, dtype=None)
    assert_close(found, expected, 1e-5)


def sharded(model, **options):
    return mylib.fully_shard(model, Cell, KEPT, mesh=AUTO, reduce_dtype=jnp.float32, **options)


@pytest.mark.thorough
def test_gradients_of_each_example():
    x = np.random.default_rng(0).normal(size=(3, WIDTH)).astype(np.float32)

    def of_each(shard):
        def one(model, x):
            return eqx.filter_grad(lambda model: jnp.sum(shard(model)(x)))(model)

        return jax.vmap(one, in_axes=(None, 0))(cell(), x)

    assert_close(eqx.filter_jit(of_each)(sharded), of_each(lambda model: model), 1e-5)


@pytest.mark.thorough
def test_an_ensemble():
    x = np.random.default_rng(0).normal(size=(3, 8, WIDTH)).astype(np.float32)
    several = eqx.filter_vmap(cell)(jax.random.split(KEY, 3))

    def of_each(shard):
        def loss(several):
            return jnp.sum(eqx.filter_vmap(lambda model, x: shard(model)(x))(several, x))

        return eqx.filter_grad(loss)(several)

    assert_close(eqx.filter_jit(of_each)(sharded), of_each(lambda model: model), 1e-5)


@pytest.mark.thorough
def test_layers_of_equinox():
    model = models.Transformer(key=KEY)
    tokens = np.random.default_rng(0).integers(0, models.VOCAB, (8, models.LENGTH))

    def loss(model):
        return jnp.mean(jax.vmap(model)(tokens) ** 2)

    def ours(model):
        options = {"mesh": AUTO, "reduce_dtype": jnp.float32}
        return loss(mylib.fully_shard(model, models.Block, KEPT, **options))

    expected = eqx.filter_jit(eqx.filter_grad(loss))(model)
    assert_close(eqx.filter_jit(eqx.filter_grad(ours))(model), expected, 2e-5)


class Layer(eqx.Module):
    """A layer that is a function of its weights."""

    weights: dict[str, Array]
    fun: Callable[..., Array] = eqx.field(static=True)

    def __call__(self, x):
        return self.fun(x, **self.weights)


def layer(fun, *names, shape=(8, 8)):
    keys = jax.random.split(KEY, len(names))
    return Layer(
        {n: jax.random.normal(k, shape) / 3 for n, k in zip(names, keys, strict=True)}, fun
    )


def state_space(x, nu, theta, w):
    decay = jnp.exp(-jnp.exp(nu[0]) + 1j * theta[0])

    def step(h, u):
        h = decay * h + u
        return h, h.real

    return jax.lax.scan(step, jnp.zeros(8, jnp.complex64), x @ w)[1]


SIZES = np.array([3, 5], np.int32)
# Most kinds of layers are in test_random_layers.py.
LAYERS = {
    "complex eigenvalues": layer(state_space, "nu", "theta", "w"),
    "complex sums": layer(lambda x, w: x @ jnp.abs(w + 1j * w.T), "w"),
    "fft": layer(lambda x, w: x * jnp.fft.fft(w).real + jnp.fft.fft(w).imag, "w"),
    "scatter": layer(lambda x, w: x.at[jnp.array([1, 1, 2])].add(w[:3]) @ w, "w"),
    "ragged": layer(lambda x, a, b: jax.lax.ragged_dot(x, jnp.stack([a, b]), SIZES), "a", "b"),
}
WAYS = {
    "plain": lambda model, x: model(x),
    "vmap": lambda model, x: jax.vmap(model)(jnp.stack([x, x + 1])),
    "scan": lambda model, x: jax.lax.scan(lambda x, m: (m(x), None), x, doubled(model))[0],
}


def doubled(model):
    return jax.tree.map(lambda x: jnp.stack([x, x / 2]), model)


def ours(model, **options):
    options = {"mesh": AUTO, "reduce_dtype": jnp.float32, **options}
    return mylib.fully_shard(model, Layer, fsdp("data", min_size=0), **options)


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("complex eigenvalues", "plain"),
        ("complex sums", "scan"),
        ("fft", "vmap"),
        ("scatter", "vmap"),
        # It can't be batched like this, with or without `fully_shard`.
        ("ragged", "plain"),
    ],
)
@pytest.mark.everyday("complex eigenvalues-plain", "fft-vmap", rest="thorough")
def test_gradients_are_those_without_it(kind, way):
    """Everything is in float32. They would differ if a use of a weight were left out."""
    x = jax.random.normal(jax.random.key(1), (8, 8))

    def loss(model, shard):
        return jnp.sum(jnp.sin(WAYS[way](shard(model), x)))

    def found(shard):
        return eqx.filter_jit(eqx.filter_grad(lambda model: loss(model, shard)))(LAYERS[kind])

    assert_close(found(ours), found(lambda model: model), 1e-4)


def test_callbacks_run_once():
    seen = []

    def fun(x, w):
        jax.debug.callback(lambda w: seen.append(1), w)
        return x @ w

    eqx.filter_jit(ours(layer(fun, "w"), checkpoint=False))(jnp.ones((8, 8)))
    jax.effects_barrier()
    assert seen == [1]


def test_nothing_leaks():
    model = layer(lambda x, w: x @ w * w, "w")
    with jax.checking_leaks():
        eqx.filter_jit(eqx.filter_grad(lambda m: jnp.sum(ours(m)(jnp.ones((8, 8))))))(model)


@pytest.mark.parametrize(
    "dtype", [pytest.param(jnp.float32, marks=pytest.mark.thorough), jnp.bfloat16]
)
def test_gradients_of_gradients(dtype):
    """Of two layers, one after the other."""
    several = [layer(lambda x, w: jnp.tanh(x @ w * w[0]), "w")] * 2
    x = jax.random.normal(jax.random.key(1), (8, 8))

    def found(shard):
        def loss(models, x):
            for model in shard(models):
                x = model(x)
            return jnp.sum(x.astype(jnp.float32))

        def penalty(models):
            grads = eqx.filter_grad(lambda models: loss(models, x))(models)
            return sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))

        return eqx.filter_jit(eqx.filter_grad(penalty))(several)

    expected = found(lambda models: models)
    tolerance = 1e-4 if dtype == jnp.float32 else 0.1
    assert_close(found(lambda models: ours(models, dtype=dtype)), expected, tolerance)


def test_weights_that_are_wider_keep_their_gradients():
    with jax.enable_x64(True):
        model = Layer({"w": jnp.eye(8, dtype=jnp.float64)}, lambda x, w: x @ w)
        x = jnp.full((8, 8), 1 + 1e-12)
        found = eqx.filter_grad(lambda model: jnp.sum(ours(model)(x)))(model)
        np.testing.assert_allclose(found.weights["w"], jnp.full((8, 8), jnp.sum(x[0])), rtol=1e-14)


@pytest.mark.compilers
@pytest.mark.compiles_for("h100 x 8", "v5e 2x4")
def test_narrow_numbers_are_multiplied_and_wide_ones_are_summed(machine):
    mesh = machine.mesh(data=-1)
    kept = fsdp("data")
    like = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    model = Layer({"w": like, "v": like}, lambda x, w, v: jax.nn.relu(x @ w) @ v.T)
    model = mylib.filter_shard(model, kept, mesh=mesh)

    def loss(model, x):
        options = {"dtype": jnp.bfloat16, "reduce_dtype": jnp.float32}
        model = mylib.fully_shard(model, Layer, kept, mesh=mesh, **options)
        return jnp.sum(model(x).astype(jnp.float32) ** 2)

    x = jax.ShapeDtypeStruct((8192, 1024), jnp.bfloat16)
    x = mylib.filter_shard(x, batch("data"), mesh=mesh)
    lowered = jax.jit(jax.grad(loss)).lower(model, x)
    products = [line for line in lowered.as_text().splitlines() if "dot_general" in line]
    assert products
    assert all(line.count("xbf16>") >= 2 for line in products)
    report = mylib.audit(lowered.compile(), mesh=mesh)
    large = [c for c in report.collectives if c.kind != "all-gather" and c.bytes >= 2**17]
    assert {c.dtype for c in large} == {"f32"}

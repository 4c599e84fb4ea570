"""`fully_shard(reduce_dtype=...)`: gradients are made, and summed, in a wider dtype."""

import equinox as eqx
import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
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
    """Weights used in many ways, each of whose gradients is a count that bf16 can't hold."""

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
    np.testing.assert_array_equal(found.bias, np.full(WIDTH, ROWS))
    assert np.all(gradient(zeros, X, reduce_dtype=None).bias != ROWS)


@pytest.mark.thorough
def test_gradients_of_all_uses_are_not_rounded():
    found = gradient(jax.tree.map(jnp.zeros_like, cell()), X)
    np.testing.assert_array_equal(found.square, np.full((WIDTH, WIDTH), 2.0 * ROWS))
    np.testing.assert_array_equal(found.table[0], np.full(WIDTH, ROWS))
    np.testing.assert_array_equal(found.turns, np.full((2, WIDTH), ROWS))


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


class Branching(eqx.Module):
    weight: Array

    def __call__(self, x):
        return jax.lax.cond(x[0, 0] > 0, lambda w: x @ w, lambda w: x @ w.T, self.weight)


def test_what_can_not_be_looked_into():
    model = Branching(jnp.ones((WIDTH, WIDTH)))
    model = mylib.fully_shard(model, Branching, KEPT, mesh=AUTO, reduce_dtype=jnp.float32)
    with pytest.raises(TypeError, match="pass weights and other values to a cond"):
        model(X)


def test_wrong_dtypes():
    for options, told in [
        ({"reduce_dtype": jnp.int32}, "not a floating dtype"),
        ({"dtype": jnp.float32, "reduce_dtype": jnp.bfloat16}, "narrower than dtype=float32"),
    ]:
        with pytest.raises(TypeError, match=told):
            mylib.fully_shard(cell(), Cell, KEPT, mesh=AUTO, **options)

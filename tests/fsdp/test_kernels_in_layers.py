"""Layers that call kernels."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import mylib
from mylib._core.kernels import Splits
from mylib._core.tree import outlined, split
from mylib._training.fsdp.kernel_axes import LayerAxes
from mylib.rules import by_path, fsdp, replicated

KEY = jax.random.key(0)
USED = by_path({"up.weight": P("model"), "down.weight": P(None, "model")}) | replicated()
shapes = []


def reference(x, scale):
    return jnp.tanh(x) * scale


@mylib.opaque(like=reference)
def kernel(x, scale):
    shapes.append((x.shape, scale.shape))
    return reference(x, scale)


class Block(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    scale: jax.Array

    def __init__(self, key):
        self.up = eqx.nn.Linear(16, 32, use_bias=False, key=key)
        self.down = eqx.nn.Linear(32, 16, use_bias=False, key=key)
        self.scale = jnp.linspace(0.5, 1.5, 32)

    def __call__(self, x):
        return x + kernel(x @ self.up.weight.T, self.scale) @ self.down.weight.T


def gradient(shard):
    def run(blocks, x):
        def loss(blocks):
            y = x
            for block in shard(blocks):
                y = block(y)
            return jnp.mean(y**2)

        return eqx.filter_grad(loss)(blocks)

    return run


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("dtype", [None, jnp.float32])
def test_gradients_are_those_of_one_device(kind, dtype):
    blocks = [Block(key) for key in jax.random.split(KEY, 2)]
    x = jax.random.normal(KEY, (16, 16))
    wanted = eqx.filter_jit(gradient(lambda blocks: blocks))(blocks, x)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    # On Explicit axes a product over "model" would ask for the sharding of its result.
    used = USED if kind == AxisType.Auto else replicated()
    kept = used & fsdp("data", min_size=16)

    def shard(blocks):
        return mylib.fully_shard(
            blocks, Block, kept, used, mesh=mesh, dtype=dtype, reduce_dtype=dtype
        )

    shapes.clear()
    with jax.set_mesh(mesh):
        step = mylib.filter_jit(gradient(shard), in_shardings=(kept, P("data")), out_shardings=kept)
        got = step(blocks, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert set(shapes) == {((4, 16), (16,)) if kind == AxisType.Auto else ((4, 32), (32,))}


def test_what_a_layer_knows():
    mesh = mylib.make_mesh(data=4, model=2)
    block = Block(KEY)
    used = mylib.resolve(block, USED, mesh)
    targets = jax.tree.leaves(used, is_leaf=lambda x: isinstance(x, jax.sharding.Sharding))
    inputs, arguments = outlined(((jnp.ones((8, 16)),), {}))
    known = LayerAxes.of(type(block).__call__, split(block), inputs, arguments, targets)
    splits = Splits((("a", "b"), ("b",)), (("a", "b"),), {"a": 8, "b": 32})
    wanted = {"a": ("data",), "b": ("model",)}
    assert known.axes_of("kernel", splits, [(8, 32), (32,)]) == wanted
    assert known.axes_of("another", splits, [(8, 32), (32,)]) is None

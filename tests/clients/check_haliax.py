"""haliax: named arrays and their models over devices."""

import typing

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax._src import tree_util

# haliax 1.3 wants it for one annotation and can't be imported without; JAX has dropped it.
if not hasattr(tree_util, "BuiltInKeyEntry"):
    tree_util.BuiltInKeyEntry = typing.Any

import haliax as hax
import haliax.nn as hnn
from common import assert_close, check, mesh, normal
from haliax.partitioning import named_jit, shard_with_axis_mapping

OWN = None

Batch, In, Hidden = hax.Axis("batch", 16), hax.Axis("in", 8), hax.Axis("hidden", 32)
Block, Position, Heads, HeadSize = (
    hax.Axis(name, size) for name, size in (("block", 4), ("position", 8), ("heads", 2), ("d", 4))
)
MAPPING = {"batch": "data", "hidden": "model"}


def over():
    return mesh(data=4, model=2)


def batch():
    return hax.named(jnp.asarray(normal(1, 16, 8)), (Batch, In))


@check
def named_arrays():
    """operations by the names of axes: sums, broadcasts, slices, dot"""
    x = batch()
    weight = hax.named(jnp.asarray(normal(2, 8, 32)), (In, Hidden))

    @eqx.filter_jit
    def f(x, weight):
        y = hax.dot(x, weight, axis=In)
        return hax.tanh(y - hax.mean(y, Batch)), hax.sum(x, In), x["in", 2:4], hax.max(y, Hidden)

    results = f(x, weight)
    y = normal(1, 16, 8) @ normal(2, 8, 32)
    assert_close(results[0].array, np.tanh(y - y.mean(0)))
    return results


@check
def einsum():
    """einsum and dot outside of jit: haliax compiles them itself, with inline=True"""
    weight = hax.named(jnp.asarray(normal(2, 8, 32)), (In, Hidden))
    product = hax.einsum("batch in, in hidden -> batch hidden", batch(), weight)
    return product, hax.dot(batch(), weight, axis=In), eqx.filter_jit(lambda x: x)(product)


@check
def sharded_by_names():
    """shard_with_axis_mapping outside of jit and inside"""
    with over() as devices:
        x = shard_with_axis_mapping(batch(), MAPPING, devices)
        assert x.array.sharding.spec[0] == "data"

        @eqx.filter_jit
        def f(x):
            wide = hax.broadcast_axis(x, Hidden)
            return hax.sum(shard_with_axis_mapping(wide, MAPPING, devices), In)

        return f(x), x


@check
def layers():
    """Linear, LayerNorm, Embedding and MLP, their gradients"""
    keys = jax.random.split(jax.random.key(0), 3)
    model = (
        hnn.Linear.init(In, Hidden, key=keys[0]),
        hnn.LayerNorm.init(Hidden),
        hnn.MLP.init(Hidden, In, 16, 1, key=keys[1]),
    )

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(model, x):
        first, norm, mlp = model
        return hax.mean(mlp(norm(first(x))) ** 2).scalar()

    return loss(model, batch())


class Layer(eqx.Module):
    linear: hnn.Linear

    @staticmethod
    def init(*, key):
        return Layer(hnn.Linear.init(Hidden, Hidden.alias("out"), key=key))

    def __call__(self, x):
        return hax.tanh(self.linear(x)).rename({"out": "hidden"})


def stack(gradient_checkpointing):
    keys = jax.random.split(jax.random.key(0), Block.size)
    make = hnn.Stacked.init(Block, Layer, gradient_checkpointing=gradient_checkpointing)
    return make(key=keys)


@check
def stacked_layers():
    """Stacked: fold over layers, with and without gradient checkpointing"""
    x = hax.named(jnp.asarray(normal(1, 16, 32)), (Batch, Hidden))
    results = []
    for kept in (False, True):

        @eqx.filter_jit
        @eqx.filter_value_and_grad
        def loss(model, x):
            return hax.sum(model.fold(x) ** 2).scalar()

        results.append(loss(stack(kept), x))
    assert_close(*results)
    return results


@check
def fold_and_scan():
    """hax.fold, hax.scan and hax.vmap over named axes"""
    x = hax.named(jnp.asarray(normal(1, 4, 16)), (Block, Batch))

    @eqx.filter_jit
    def f(x):
        total = hax.fold(lambda carry, y: carry + y**2, Block)(hax.zeros(Batch), x)
        last, each = hax.scan(lambda carry, y: (carry + y, carry), Block)(hax.zeros(Batch), x)
        return total, last, each, hax.vmap(lambda y: y * hax.sum(y, Batch), Block)(x)

    return f(x)


@check
def attention():
    """dot_product_attention with a causal mask"""
    shape = (Batch, Heads, Position, HeadSize)
    q, k, v = (hax.named(jnp.asarray(normal(i, *(a.size for a in shape))), shape) for i in range(3))
    keys = Position.alias("key_position")
    k, v = (x.rename({"position": "key_position"}) for x in (k, v))

    @eqx.filter_jit
    def f(q, k, v):
        mask = hnn.attention.causal_mask(Position, keys)
        return hnn.attention.dot_product_attention(keys, HeadSize, q, k, v, mask=mask)

    return f(q, k, v)


@check
def born_sharded():
    """named_jit that makes a model where its names say, then a step of ours on it"""
    with over():
        make = named_jit(
            lambda key: hnn.Linear.init(In, Hidden, key=key),
            axis_resources=MAPPING,
            out_axis_resources=MAPPING,
        )
        model = make(jax.random.key(0))
        return model, eqx.filter_jit(lambda m, x: m(x))(model, batch())

"""`fully_shard` of layers as they are written in many kinds of models."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jaxtyping import Array

import mylib
from mylib.rules import fsdp

AUTO = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
KEPT = fsdp("data", min_size=0)
WEIGHT = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
X = WEIGHT[::-1].copy()


class Jitted(eqx.Module):
    weight: Array

    @eqx.filter_jit
    def __call__(self, x, flag=True):
        return x @ self.weight if flag else x


class Abstract(eqx.Module):
    times: eqx.AbstractVar[int]

    def __call__(self, x, *, key=None):
        return {"y": x * self.times @ self.weight, "none": None, "static": "text"}


class Concrete(Abstract):
    weight: Array
    times: int = 3


class Branching(eqx.Module):
    """Its layer is called in a branch, and at each step of a loop."""

    layer: Jitted

    def __call__(self, x):
        x = jax.lax.cond(x[0, 0] > 0, lambda x: self.layer(x), lambda x: x, x)
        return jax.lax.scan(lambda h, x: (jnp.tanh(self.layer(h) + x), None), x[0], x)[0]


class Experts(eqx.Module):
    weight: Array

    def __call__(self, x):
        return jnp.einsum("nd,edf->enf", x, self.weight) * jax.nn.softmax(x)


class StateSpace(eqx.Module):
    decay: Array
    weight: Array

    def __call__(self, x):
        u = x @ self.weight
        a = jnp.broadcast_to(jnp.exp(-jax.nn.softplus(self.decay)), u.shape)
        return jax.lax.associative_scan(lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1]), (a, u))[1]


class Complex(eqx.Module):
    weight: Array

    def __call__(self, x):
        return jnp.abs(x @ self.weight)


def each(models):
    return eqx.filter_vmap(lambda model: model(X))(models)


weight = jnp.asarray(WEIGHT)
KINDS = {
    "a jitted method": (Jitted(weight), Jitted, lambda model: model(X, flag=True)),
    "an abstract class": (Concrete(weight), Abstract, lambda model: model(X, key=None)),
    "in branches and loops": (Branching(Jitted(weight)), Jitted, lambda model: model(X)),
    "experts": (Experts(jnp.stack([weight] * 4)), Experts, lambda model: model(X)),
    "state spaces": (StateSpace(weight[0], weight), StateSpace, lambda model: model(X)),
    "complex": (Complex(weight + 1j), Complex, lambda model: model(X)),
    "an ensemble": (Jitted(jnp.stack([weight] * 3)), Jitted, each),
}


@pytest.mark.thorough
@pytest.mark.parametrize("reduce_dtype", [None, jnp.float32], ids=["", "reduce_dtype"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_without_it(kind, reduce_dtype):
    model, layers, call = KINDS[kind]

    def gradient(shard):
        def loss(model):
            leaves = jax.tree.leaves(eqx.filter(call(shard(model)), eqx.is_inexact_array))
            return sum(jnp.sum(x) for x in leaves)

        return eqx.filter_jit(eqx.filter_grad(loss))(model)

    found = gradient(
        lambda model: mylib.fully_shard(model, layers, KEPT, mesh=AUTO, reduce_dtype=reduce_dtype)
    )
    expected = gradient(lambda model: model)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)

"""Random programs with `equinox.error_if` at random places, called with arrays of several sizes: at
once, ahead of time and under a gradient. They fail where Equinox's do, and return the same.
"""

import random

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import mylib

MESH = mylib.make_mesh(data=8)
SMALL, SIZES = 8, (8, 16, 32)


def checked(rng, inner):
    limit, message = rng.choice([0.2, 0.9, 3.0, 1e9]), f"check {rng.randrange(10**6)}"
    what = rng.choice(["result", "dead", "large"])

    def run(x):
        if what == "large" and x.size == SMALL:
            return inner(x)
        y = eqx.error_if(inner(x), jnp.abs(x) > limit, message)
        return inner(x) if what == "dead" else y

    return run


def with_own_jvp(rng, inner):
    slope = rng.uniform(0.5, 1.5)
    fun = jax.custom_jvp(inner)
    fun.defjvp(lambda primals, tangents: (fun(*primals), tangents[0] * slope))
    return fun


AROUND = [
    checked,
    checked,
    checked,
    with_own_jvp,
    lambda rng, inner: jax.jit(inner),
    lambda rng, inner: eqx.filter_jit(inner),
    lambda rng, inner: mylib.filter_jit(inner),
    lambda rng, inner: jax.checkpoint(inner),
    lambda rng, inner: lambda x: lax.cond(jnp.sum(x) > 0, inner, lambda x: 2 * x, x),
    lambda rng, inner: lambda x: lax.scan(lambda c, _: (inner(c) / 2, None), x, length=2)[0],
    lambda rng, inner: lambda x: lax.fori_loop(0, 2, lambda i, x: inner(x), x),
    lambda rng, inner: lambda x: jax.vmap(inner)(x.reshape(2, -1)).reshape(x.shape),
]


def program(rng, depth):
    if not depth:
        factor = rng.uniform(0.5, 1.5)
        return lambda x: jnp.sin(factor * x)
    first = rng.choice(AROUND)(rng, program(rng, depth - 1))
    if rng.random() < 0.5:
        return first
    second = program(rng, depth - 1)
    return lambda x: second(first(x))


def outcome(call):
    try:
        return np.asarray(jax.block_until_ready(call()))
    except eqx.EquinoxRuntimeError:
        return "failed"


def gradient(fun):
    return lambda x: jax.grad(lambda x: jnp.sum(fun(x)))(x)


def gradient_of(ours, fun):
    """The gradient, by what the error says to write where errors couldn't be returned."""

    def run(x):
        try:
            return gradient(ours)(x)
        except ValueError as error:
            if "Put filter_jit around the transformation" not in str(error):
                raise
            return mylib.filter_jit(gradient(fun))(x)

    return run


@pytest.mark.parametrize(
    "seed",
    [*range(8), 260287, *(pytest.param(i, marks=pytest.mark.thorough) for i in range(8, 150))],
)
def test_fails_where_equinox_does(seed):
    rng = random.Random(seed)
    fun = program(rng, rng.randrange(1, 5))
    placed = {"in_shardings": P("data"), "mesh": MESH}
    ours = mylib.filter_jit(fun, **(placed if rng.random() < 0.5 else {}))
    theirs = eqx.filter_jit(fun)
    for _ in range(5):
        values = np.random.default_rng(rng.randrange(10**6)).uniform(-1, 1, rng.choice(SIZES))
        x = jnp.asarray(values * rng.choice([0.1, 0.5, 1.0]), jnp.float32)
        how = rng.choice(["at once", "at once", "ahead", "gradient"])
        if how == "gradient":
            pair = (
                outcome(lambda x=x: gradient_of(ours, fun)(x)),
                outcome(lambda x=x: gradient(theirs)(x)),
            )
        elif how == "ahead":
            compiled = ours.lower(x).compile()
            pair = outcome(lambda x=x, f=compiled: f(x)), outcome(lambda x=x: theirs(x))
        else:
            pair = outcome(lambda x=x: ours(x)), outcome(lambda x=x: theirs(x))
        if "failed" in map(str, pair):
            assert str(pair[0]) == str(pair[1]), (how, x.size)
        else:
            np.testing.assert_allclose(*pair, rtol=1e-4, atol=1e-5)

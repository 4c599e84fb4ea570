"""A `filter_shard_map` inside of another one, of which each splits over its own axes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contexts import AUTO, AXES, CONTEXTS, crossed
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import mylib

X = np.arange(1.0, 65.0, dtype=np.float32).reshape(8, 8) / 64
W = np.linspace(0.5, 1.5, 8, dtype=np.float32)
CUBES = [
    jax.make_mesh((2, 2, 2), ("data", "model", "third"), axis_types=(kind,) * 3)
    for kind in (AxisType.Auto, AxisType.Explicit)
]


def whole(x):
    """What `outer` computes, on one device."""
    rows = x.reshape(4, 2, 8)
    squares = rows**2
    return (jnp.sin(rows) * squares.sum((1, 2), keepdims=True)).reshape(8, 8) + jnp.sum(x**2)


@mylib.filter_shard_map(in_specs=P(None, "model"), out_specs=P(None, "model"))
def inner(x):
    return jnp.sin(x) * lax.psum(jnp.sum(x**2), "model")


@mylib.filter_shard_map(in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
def outer(x):
    return inner(x) + lax.psum(jnp.sum(x**2), "data")


@crossed(context=["eager", "jit", "grad", "jit(grad)", "jvp", "linearize"], mesh=AXES)
def test_values_and_gradients(context, mesh):
    expected = CONTEXTS[context](whole, jnp.asarray(X))
    with jax.set_mesh(mesh):
        result = CONTEXTS[context](outer, mylib.filter_shard(X, P("data", "model")))
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


def scaled(w, x):
    return jnp.tanh(w * x) * 3.0


LINEAR = {
    "what is nonlinear": (scaled, scaled),
    "a constant": (lambda w, x: x * 2.0 + w, lambda w, x: x * 2.0 + w),
    "a sum": (lambda w, x: x * w + lax.psum(jnp.sum(x * w), "model"), None),
    "a scan": (
        lambda w, x: mylib.loops.scan(lambda c, _: (jnp.sin(c) * w, None), x, length=2)[0],
        lambda w, x: jnp.sin(jnp.sin(x) * w) * w,
    ),
    "a third": (
        lambda w, x: mylib.filter_shard_map(
            scaled, in_specs=P(), out_specs=P(), axis_names={"third"}
        )(w, x),
        scaled,
    ),
}


@crossed(case=[*LINEAR], mesh=dict(zip(["auto", "explicit"], CUBES, strict=True)))
def test_gradients_of_weights(case, mesh):
    """What JAX keeps for the gradient of the inner map varies over the axes of the outer one."""
    body, same = LINEAR[case]

    def reference(w, x):
        if same is not None:
            return same(w, x)
        return jnp.concatenate([x[i : i + 4] * w + jnp.sum(x[i : i + 4] * w) for i in (0, 4)])

    @mylib.filter_shard_map(in_specs=(P(), P("data")), out_specs=P("data"), axis_names={"data"})
    def f(w, x):
        specs = dict(in_specs=(P("model"), P(None, "model")), out_specs=P(None, "model"))
        return mylib.filter_shard_map(body, **specs, axis_names={"model"})(w, x)

    def loss(f):
        return lambda w, x: jnp.sum(f(w, x) ** 2)

    expected = jax.grad(loss(reference), (0, 1))(W, X)
    with jax.set_mesh(mesh):
        found = jax.jit(jax.grad(loss(f), (0, 1)))(W, X)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_a_gradient_taken_inside_of_the_outer_one():
    @mylib.filter_shard_map(in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
    def gradient(x):
        return jax.grad(lambda x: jnp.sum(inner(x)))(x)

    def reference(x):
        rows = x.reshape(4, 2, 8)
        return jnp.sum(jnp.sin(rows) * jnp.sum(rows**2, (1, 2), keepdims=True))

    with jax.set_mesh(AUTO):
        np.testing.assert_allclose(gradient(X), jax.grad(reference)(X), rtol=1e-4)


def test_nothing_is_split_over_twice():
    @mylib.filter_shard_map(mesh=AUTO, in_specs=P("data"), out_specs=P("data"))
    def both(x):
        return inner(x)

    with pytest.raises(mylib.PlacementError) as caught:
        both(X)
    (fault,) = caught.value.faults
    assert "splits over all axes of mesh ('data': 4, 'model': 2) already" in fault.reason
    assert fault.fix.startswith("call inner itself, or give the outer filter_shard_map axis_names")


def test_axes_that_are_split_over_already():
    @mylib.filter_shard_map(in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
    def f(x):
        specs = dict(in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
        return mylib.filter_shard_map(jnp.sin, **specs)(x)

    words = (
        r"axis_names are \('data',\).* not split over yet are \('model',\)\n.*name some of these"
    )
    with jax.set_mesh(AUTO), pytest.raises(mylib.PlacementError, match=words):
        f(X)


def nested(outer_checked, inner_checked):
    split = functools.partial(mylib.filter_shard_map, in_specs=P("data"), axis_names={"data"})

    @functools.partial(split, out_specs=P("data"), check_vma=outer_checked)
    def f(x):
        specs = dict(in_specs=P(None, "model"), out_specs=P(None, "model"))
        g = mylib.filter_shard_map(jnp.sin, **specs, check_vma=inner_checked)
        return g(x)

    return f


def test_checked_and_unchecked():
    """JAX lets an unchecked map forget along which axes its arguments vary: their values came back
    under P() then, other ones on other devices, and gradients failed.
    """
    with jax.set_mesh(AUTO):
        for f in (nested(True, True), nested(False, True), nested(False, False)):
            gradient = jax.jit(jax.grad(lambda x, f=f: jnp.sum(f(x))))
            np.testing.assert_allclose(gradient(X), np.cos(X), rtol=1e-5)
        words = (
            "differ between the devices of the outer filter_shard_map along 'data'\n"
            ".*give both of them the same check_vma"
        )
        with pytest.raises(mylib.PlacementError, match=words):
            nested(True, False)(X)


def test_jax_shard_map_inside():
    """In the table at the end of docs/shard-map.md, and to be taken out there when it passes."""

    def gradient(part):
        @mylib.filter_shard_map(in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
        def f(x):
            return jax.shard_map(part, in_specs=P(None, "model"), out_specs=P(None, "model"))(x)

        return jax.jit(jax.grad(lambda x: jnp.sum(f(x))))

    with jax.set_mesh(AUTO):
        with pytest.raises(ValueError, match="sdy.manual_computation|bound by a parent"):
            gradient(jnp.sin)(X)
        np.testing.assert_allclose(gradient(jax.checkpoint(jnp.sin))(X), np.cos(X), rtol=1e-5)

"""Nodes that look at their children: nothing else than arrays is ever put into them."""

import copy
import pickle
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from contexts import AUTO as MESH, MIXED
from jax import lax
from jax.sharding import PartitionSpec as P

import mylib


@jtu.register_pytree_with_keys_class
class Pair:
    """Its halves have one shape."""

    def __init__(self, a, b):
        assert a.shape == b.shape
        assert isinstance(a, jax.Array | np.ndarray)
        self.a, self.b = a, b

    def __call__(self, x):
        return x + self.a + self.b

    def tree_flatten_with_keys(self):
        return [(jtu.GetAttrKey("a"), self.a), (jtu.GetAttrKey("b"), self.b)], None

    def tree_flatten(self):
        return (self.a, self.b), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


class Layer(eqx.Module):
    w: jax.Array
    pair: Pair
    name: str

    def __check_init__(self):
        assert self.w.shape == self.pair.a.shape


@jtu.register_pytree_node_class
class Filled:
    """A node that is another one when it is made anew."""

    def __init__(self, x, more=None):
        self.x, self.more = x, more

    def tree_flatten(self):
        return ((self.x,) if self.more is None else (self.x, self.more)), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(children[0], children[0])


def pair(n=8):
    return Pair(jnp.ones(n), jnp.zeros(n))


def layer(n=8):
    return Layer(jnp.ones(n), pair(n), "layer")


def arrays_of(tree):
    return [x for x in jax.tree.leaves(tree) if eqx.is_array(x)]


def add(tree, x):
    return jax.tree.map(lambda y: y + x if eqx.is_array(y) else y, tree)


@pytest.mark.parametrize("make", [pair, layer])
@pytest.mark.parametrize("donate", ["none", "all", "warn"])
def test_filter_jit(make, donate):
    tree = mylib.filter_jit(lambda tree: add(tree, 1), donate=donate)(make())
    assert jnp.all(arrays_of(tree)[0] == 2)


def test_what_was_not_donated_is_named():
    with pytest.warns(mylib.errors.DonationWarning, match=r"was given p\.a \(8,\), p\.b \(8,\)"):
        assert mylib.filter_jit(lambda p: p.a.sum() + p.b.sum(), donate="warn")(pair()) == 8


def test_what_moved_is_named():
    def step(p, x):
        return Pair(p.a + x, p.b), x

    f = mylib.filter_jit(step, out_shardings=P("data"), mesh=MESH)
    p, _ = f(pair(), jnp.ones(8))
    with pytest.warns(mylib.errors.RecompilationWarning, match=r"p\.a, p\.b: "):
        f(p, jnp.ones(8))


def test_a_function_that_is_such_a_node():
    f = mylib.filter_jit(pair(), donate="warn")
    with pytest.warns(mylib.errors.DonationWarning, match=r"Pair\.b \(8,\)|the function\.b \(8,\)"):
        f(jnp.ones(8))


def test_copies():
    f = mylib.filter_jit(pair(), in_shardings=P("data"), mesh=MESH)
    f(jnp.ones(8))
    plain = mylib.filter_jit(pair())
    for g in (copy.copy(f), copy.deepcopy(f), pickle.loads(pickle.dumps(plain))):
        assert jnp.all(g(jnp.ones(8)) == 2)


def test_a_copy_is_not_compiled_again():
    traces = []

    def f(x):
        traces.append(1)
        return x

    jitted = mylib.filter_jit(f, in_shardings=P("data"), mesh=MESH)
    for g in (jitted, copy.copy(jitted), copy.deepcopy(jitted)):
        g(jnp.ones(8))
    assert len(traces) == 1


def test_a_node_that_is_another_one_when_it_is_made_anew():
    with pytest.warns(mylib.errors.DonationWarning, match=r"was given f\[<flat index 0>\] \(8,\)"):
        out = mylib.filter_jit(lambda f: f.x.sum() + f.more.sum(), donate="warn")(
            Filled(jnp.ones(8))
        )
    assert out == 16


@pytest.mark.parametrize("mesh", [MESH, MIXED], ids=["auto", "mixed"])
@pytest.mark.parametrize("make", [pair, layer])
def test_filter_shard_map(mesh, make):
    f = mylib.filter_shard_map(
        add, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )
    tree = f(make(), jnp.ones(8))
    assert jnp.all(arrays_of(tree)[0] == 2)
    with pytest.raises(mylib.PlacementError, match=r"the result\.(pair\.)?b"):
        mylib.filter_shard_map(
            add, mesh=mesh, in_specs=P("data"), out_specs=P(), axis_names={"data"}
        )(make(), jnp.ones(8))


@pytest.mark.parametrize("make", [pair, layer])
@pytest.mark.parametrize("given", [None, {"tree": P("data")}])
def test_filter_checkpoint(make, given):
    f = mylib.filter_checkpoint(add, in_shardings=given, mesh=MESH)

    def total(tree, x):
        return sum(jnp.sum(y**2) for y in arrays_of(f(tree, x)))

    tree = make()
    arrays = len(arrays_of(tree))
    grads = jax.grad(total, 1)(tree, jnp.ones(8))
    expected = 4.0 * (arrays - 1) + 2.0
    np.testing.assert_allclose(grads, np.full(8, expected))


@pytest.mark.parametrize("make", [pair, layer])
@pytest.mark.parametrize("mapped", [False, True])
def test_loops(make, mapped):
    def go(x):
        n = x.size

        tree, _ = mylib.loops.scan(lambda t, r: (add(t, r.sum()), t), make(n), x[None])
        tree = mylib.loops.while_loop(
            lambda state: state[0] < 3, lambda state: (state[0] + 1, add(state[1], x)), (0, tree)
        )[1]
        rows, _ = mylib.loops.scan(
            lambda c, pair: (c + pair.a, None), jnp.zeros(()), Pair(x, jnp.zeros_like(x))
        )
        return arrays_of(tree)[0] + rows

    if not mapped:
        np.testing.assert_array_equal(go(jnp.ones(8)), np.full(8, 1.0 + 8 + 3 + 8))
    else:
        f = mylib.filter_shard_map(go, mesh=MESH, in_specs=P("data"), out_specs=P("data"))
        np.testing.assert_array_equal(f(jnp.ones(8)), np.full(8, 1.0 + 2 + 3 + 2))


def test_faults_of_loops_name_the_leaf():
    with pytest.raises(TypeError, match=r"\.b"):
        ones = Pair(jnp.ones(2), jnp.ones(2))
        mylib.loops.while_loop(lambda p: True, lambda p: Pair(p.a, p.b.astype(int)), ones)
    with pytest.raises(TypeError, match=r"\['n'\]: an array, then 'x'"):
        mylib.loops.scan(lambda c, _: ({"n": "x"}, None), {"n": 1.0}, length=2)


def test_opaque():
    def on_host(x):
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    @mylib.opaque(
        fwd=lambda p: (on_host(p.a), p), bwd=lambda p, g: (Pair(g * jnp.cos(p.a), g * 0),)
    )
    def sine(p):
        return on_host(p.a)

    f = mylib.filter_shard_map(sine, mesh=MESH, in_specs=P("data"), out_specs=P("data"))
    x = jnp.arange(8.0)
    grads = jax.grad(lambda p: f(p).sum())(Pair(x, x))
    np.testing.assert_allclose(grads.a, np.cos(x), atol=1e-6)


def test_as_jax_does():
    """The nodes above work with JAX's own transformations, so they are fair."""
    p = pair()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jnp.all(jax.jit(add)(p, 1.0).a == 2)
        assert jnp.all(jax.checkpoint(add)(p, 1.0).a == 2)
        assert jnp.all(lax.while_loop(lambda p: p.a[0] < 3, lambda p: add(p, 1.0), p).a == 3)

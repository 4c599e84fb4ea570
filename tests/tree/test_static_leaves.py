"""What is no array to JAX is static to every decorator and loop, as it is to `filter_shard`."""

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import mylib
from mylib.loops import scan, while_loop

MESH = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
STATIC = {
    "strings": np.array(["a", "b"]),
    "new strings": np.array(["a", "b"], np.dtypes.StringDType()),
    "dates": np.array(["2026-01-01", "2026-01-02"], "M8[D]"),
    "a date": np.datetime64("2026-01-01"),
    "objects": np.array([{}, None]),
    "masked": np.ma.masked_array([1.0, 2.0], [True, False]),
    "on paper": jax.ShapeDtypeStruct((2,), jnp.float32),
}
# Each calls `f` with an array and a static leaf, and returns what `f` made of both.
CALLS = {
    "filter_checkpoint": lambda f, x, s: mylib.filter_checkpoint(f)(x, s),
    "while_loop": lambda f, x, s: while_loop(lambda c: c[0].sum() < 9, lambda c: f(*c), (x, s)),
    "scan, carried": lambda f, x, s: scan(lambda c, _: (f(*c), None), (x, s), length=3)[0],
    "scan, over it": lambda f, x, s: scan(lambda c, s: f(c, s), x, s, length=3),
    "gradients": lambda f, x, s: (
        jax.grad(lambda x: mylib.filter_checkpoint(f)(x, s)[0].sum())(x),
        mylib.filter_checkpoint(f)(x, s)[1],
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("static", STATIC.values(), ids=STATIC)
def test_static_leaves_pass_through(call, static):
    found = []

    def f(x, s):
        found.append(s)
        return x + 1, s

    x, returned = call(f, jnp.ones(3), static)
    assert isinstance(x, jax.Array)
    assert returned is static
    assert all(s is static for s in found)


@pytest.mark.parametrize(
    "decorate", [mylib.filter_jit, mylib.filter_shard_map(mesh=MESH, in_specs=P(), out_specs=P())]
)
@pytest.mark.parametrize("name", ["strings", "new strings", "masked"])
def test_programs_are_kept_by_what_is_static(decorate, name):
    """So it needs a hash; the error names the argument."""

    def f(x, s):
        return x

    with pytest.raises(TypeError, match="was given s, a (ndarray|MaskedArray)"):
        decorate(f)(jnp.ones(3), STATIC[name])


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_numbers_of_another_byte_order_are_arrays(call):
    s = np.arange(3, dtype=">f4")
    x, returned = call(lambda x, s: (x + 1, s), jnp.ones(3), s)
    assert isinstance(x, jax.Array) and returned.dtype.isnative
    np.testing.assert_array_equal(returned, s)
    np.testing.assert_array_equal(mylib.filter_jit(lambda s: s + 1)(s), s + 1)


def test_tangents_of_integers_are_arrays():
    """JAX traces `float0`, so rows are taken of it, although there is nothing in it."""
    zero = np.zeros((3,), jax.dtypes.float0)
    shapes = []

    def f(x, z):
        shapes.append(z.shape)
        return x + 1, z

    assert mylib.filter_checkpoint(f)(jnp.ones(3), zero)[1].dtype == jax.dtypes.float0
    assert scan(lambda c, z: (f(c, z)[0], None), jnp.ones(3), zero)[0].tolist() == [4, 4, 4]
    assert while_loop(lambda c: c[0].sum() < 9, lambda c: f(*c), (jnp.ones(3), zero))[1].size == 3
    assert set(shapes) == {(3,), ()}


@jtu.register_pytree_node_class
class Pair:
    """A node that looks at what it is made of, arrays and a function."""

    def __init__(self, a, b, combine):
        assert a.shape == b.shape and callable(combine)
        self.a, self.b, self.combine = a, b, combine

    def tree_flatten(self):
        return (self.a, self.b, self.combine), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_nodes_are_made_of_arrays_alone():
    pair = Pair(jnp.ones(3), jnp.arange(3.0), jnp.add)

    def turn(pair, row=None):
        return Pair(pair.a + 1, pair.b * 2, pair.combine), None

    def once(pair):
        return turn(pair)[0]

    for made in (
        mylib.filter_checkpoint(once)(pair),
        scan(turn, pair, length=1)[0],
        while_loop(lambda p: p.a[0] < 2, once, pair),
    ):
        assert made.combine is jnp.add
        assert made.a.tolist() == [2, 2, 2] and made.b.tolist() == [0, 2, 4]

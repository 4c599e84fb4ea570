"""What a rule sees of a leaf, and which leaves it sees."""

import dataclasses
from typing import NamedTuple

import _generate as generate
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given
from jax.sharding import AxisType

import mylib


def leaves(tree, **kwargs):
    """Every leaf that a rule is asked about."""
    seen = []

    def note(leaf):
        seen.append(leaf)

    mylib.resolve(tree, note, **kwargs)
    return seen


def the_leaf(x, **kwargs):
    (leaf,) = leaves(x, **kwargs)
    return leaf


def names(tree):
    return [leaf.name for leaf in leaves(tree)]


def mlp():
    return eqx.nn.MLP(2, 3, 4, 1, key=jax.random.key(0))


MLP = [
    ".layers[0].weight",
    ".layers[0].bias",
    ".layers[1].weight",
    ".layers[1].bias",
]


@pytest.mark.parametrize(
    "x",
    [
        np.zeros((2, 3), np.float32),
        np.zeros((2, 3), np.float64),
        np.zeros((0, 3), np.int64),
        np.float64(1.0),
        np.bool_(True),
        np.zeros(5, np.complex128),
        jnp.zeros((2, 3), jnp.bfloat16),
        np.zeros(4, jnp.int4),
        jnp.zeros(()),
        jnp.zeros((3, 0)),
        jax.random.PRNGKey(0),
    ],
    ids=lambda x: f"{x.dtype}{list(x.shape)}",
)
def test_leaf_is_as_jax_will_hold_it(x):
    held = jnp.asarray(x)
    leaf = the_leaf(x)
    assert leaf.shape == held.shape
    assert leaf.dtype == held.dtype
    assert leaf.ndim == held.ndim
    assert leaf.size == held.size
    assert leaf.nbytes == held.nbytes


def test_64_bits_stay_where_jax_keeps_them():
    with jax.enable_x64(True):
        leaf = the_leaf(np.zeros(3))
    assert leaf.dtype == np.float64
    assert leaf.nbytes == 24


@pytest.mark.parametrize("shape", [(), (3,), (2, 0)])
def test_typed_keys_have_the_shape_of_keys(shape):
    keys = jax.random.split(jax.random.key(0), shape)
    leaf = the_leaf(keys)
    assert leaf.shape == shape
    assert leaf.ndim == len(shape)
    assert leaf.dtype == keys.dtype
    assert leaf.nbytes == jax.random.key_data(keys).nbytes


def test_arrays_that_exist_on_paper_only_may_be_of_any_size():
    leaf = the_leaf(jax.ShapeDtypeStruct((2**20, 2**20, 3), jnp.bfloat16))
    assert leaf.size == 3 * 2**40
    assert leaf.nbytes == 6 * 2**40


def test_traced_leaves_are_seen_as_the_traced_function_sees_them():
    seen = []

    def f(x):
        seen.append(the_leaf(x))
        return x.sum()

    x = jnp.zeros((2, 3))
    jax.jit(f)(x)
    jax.grad(f)(x)
    jax.vmap(f)(x)
    assert [leaf.shape for leaf in seen] == [(2, 3), (2, 3), (3,)]


def test_mesh_is_the_one_that_a_spec_would_be_read_over():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    other = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x = np.zeros(8)
    assert the_leaf(x).mesh is None
    assert the_leaf(x, mesh=mesh).mesh == mesh
    with jax.set_mesh(mesh):
        assert the_leaf(x).mesh == mesh
        assert the_leaf(x, mesh=other).mesh == other
    seen = []
    with jax.set_mesh(mesh):
        jax.jit(lambda x: seen.append(the_leaf(x).mesh))(x)
    assert seen[0].shape == mesh.shape


def test_paths_are_those_of_jax():
    model = eqx.filter(mlp(), eqx.is_array)
    weights = jax.tree.map(lambda x: x.ndim == 2, model)
    optim = optax.chain(optax.clip(1.0), optax.adam(1e-3), optax.masked(optax.trace(0.9), weights))
    tree = {"model": mlp(), "batch": (np.zeros(2), [np.zeros(3)]), "state": optim.init(model)}
    expected, _ = jtu.tree_flatten_with_path(eqx.filter(tree, eqx.is_array))
    assert [leaf.path for leaf in leaves(tree)] == [path for path, _ in expected]
    assert names(tree) == [jtu.keystr(path) for path, _ in expected]


def test_names():
    class Batch(NamedTuple):
        x: object
        y: object

    assert names(np.zeros(3)) == [""]
    assert names([np.zeros(3), (np.zeros(3),)]) == ["[0]", "[1][0]"]
    assert names({"a": {3: np.zeros(3)}}) == ["['a'][3]"]
    assert names(Batch(np.zeros(3), [np.zeros(3)])) == [".x", ".y[0]"]
    assert names(mlp()) == MLP


def test_only_arrays_are_leaves():
    assert names([1, "text", None, 2.5, len, np.array(["a"]), np.zeros(3)]) == ["[6]"]
    assert names([]) == []


def every_numpy_dtype():
    named = [np.dtype(code) for code in np.typecodes["All"] if code not in "SUV"]
    known = (np.dtype(t) for t in vars(ml_dtypes).values() if isinstance(t, type))
    others = ["S3", "U3", "V4", [("a", "f4")], ("f4", (2,)), ">f4", ">i2", ">c8", "M8[s]", "m8[s]"]
    dtypes = {*named, *known, *map(np.dtype, others), np.dtypes.StringDType()}
    # Of `object` there may be arrays of anything, and `float0` is JAX's own.
    return sorted(dtypes - {jax.dtypes.float0}, key=str)


@pytest.mark.parametrize("dtype", every_numpy_dtype(), ids=str)
def test_dtypes_are_those_that_jax_has_arrays_for(dtype):
    x = np.empty(2, dtype)
    if dtype == np.dtypes.StringDType():
        held = False  # asked about these, some versions of JAX read memory that isn't theirs
    else:
        try:
            # JAX takes numbers of this machine's byte order only. Ours are changed to it.
            held = jax.eval_shape(lambda x: x, x.astype(x.dtype.newbyteorder("="))).shape == x.shape
        except TypeError:
            held = False
    assert (len(leaves({"x": x})) == 1) == held


def test_names_are_those_of_the_whole_tree_wherever_the_rule_stands():
    seen = []

    def note(leaf):
        seen.append(leaf.name)

    mylib.resolve([np.zeros(3), mlp()], [None, note])
    assert seen == ["[1]" + name for name in MLP]


def the_leaf_of_x():
    return the_leaf({"x": np.zeros((2, 3), np.float32)})


def test_leaves_can_be_made_compared_and_kept():
    path = (jtu.DictKey("x"),)
    leaf = mylib.Leaf(path, (2, 3), np.dtype("float32"), None)
    assert leaf == the_leaf_of_x()
    assert len({leaf, the_leaf_of_x()}) == 1
    assert (leaf.name, leaf.ndim, leaf.size, leaf.nbytes) == ("['x']", 2, 6, 24)
    with pytest.raises(dataclasses.FrozenInstanceError):
        leaf.shape = ()


def test_a_leaf_prints_what_it_is():
    text = repr(the_leaf_of_x())
    assert "'x'" in text and "(2, 3)" in text and "float32" in text


@given(generate.trees())
def test_every_array_of_a_tree_is_a_leaf_and_nothing_else(tree):
    with_paths, _ = jtu.tree_flatten_with_path(tree)
    arrays = [(path, x) for path, x in with_paths if generate.is_placed(x)]
    seen = leaves(tree)
    assert [leaf.path for leaf in seen] == [path for path, _ in arrays]
    for leaf, (_, x) in zip(seen, arrays, strict=True):
        held = jax.eval_shape(lambda x: x, x)
        assert (leaf.shape, leaf.dtype) == (held.shape, held.dtype)
        assert leaf.axes is None


@given(generate.trees())
def test_leaving_every_leaf_alone_gives_the_same_objects(tree):
    out = mylib.filter_shard(tree, None)
    assert jtu.tree_structure(out) == jtu.tree_structure(tree)
    assert all(a is b for a, b in zip(jtu.tree_leaves(out), jtu.tree_leaves(tree), strict=True))

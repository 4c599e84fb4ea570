"""What `equinox.filter_shard` and `jax.device_put` can do, ours do alike."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

import mylib

AUTO = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
MIXED = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Auto))
EXPLICIT = jax.make_mesh((4, 2), ("x", "y"))
HALF = Mesh(np.array(jax.devices()[:4]), ("x",))
FREE = P.UNCONSTRAINED
FIRST, SECOND, *_, LAST = jax.devices()


def on(spec, mesh=AUTO, **kwargs):
    return NamedSharding(mesh, spec, **kwargs)


def assert_same_answer(theirs, ours):
    theirs, treedef = jax.tree.flatten(theirs)
    ours, own_treedef = jax.tree.flatten(ours)
    assert own_treedef == treedef
    for x, y in zip(theirs, ours, strict=True):
        if not isinstance(x, jax.Array):
            assert y is x or y == x
            continue
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        assert jax.typeof(y).weak_type == jax.typeof(x).weak_type
        assert y.committed == x.committed
        assert y.sharding.is_equivalent_to(x.sharding, x.ndim)
        assert y.sharding.memory_kind == x.sharding.memory_kind
        assert getattr(y.sharding, "mesh", None) == getattr(x.sharding, "mesh", None)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(np.asarray(y), np.asarray(x))


def words():
    return jnp.arange(64.0).reshape(8, 8)


def tree():
    return {"a": jnp.arange(8.0), "b": (np.arange(8), "static", None, 3)}


BOTH = {
    "device": (words, FIRST),
    "other device": (words, LAST),
    "single": (words, SingleDeviceSharding(SECOND)),
    "rows": (words, on(P("x"))),
    "both axes": (words, on(P(("x", "y")))),
    "half of the devices": (words, on(P("x"), HALF)),
    "tree": (tree, on(P("x"))),
    "tree of shardings": (tree, {"a": on(P("x")), "b": (on(P()), on(P()), on(P()), on(P()))}),
}
EAGER = BOTH | {
    "free": (words, on(P(FREE))),
    "host memory": (words, on(P("x"), memory_kind="pinned_host")),
    "layout": (words, Format(Layout((1, 0)), SingleDeviceSharding(FIRST))),
    "NumPy": (lambda: np.arange(8), on(P("x"))),
    "NumPy scalar": (lambda: np.float32(2), SECOND),
    "key": (lambda: jax.random.key(0), on(P())),
    "weak": (lambda: jnp.asarray(2.0), on(P())),
    "tree on a device": (tree, LAST),
    "prefix": (tree, {"a": on(P("x")), "b": on(P())}),
    "moved on the mesh": (lambda: jax.device_put(words(), on(P("x"))), on(P("y", "x"))),
    "freed on the mesh": (lambda: jax.device_put(words(), on(P("x"))), on(P(FREE, "y"))),
}


@pytest.mark.parametrize("make, placement", EAGER.values(), ids=EAGER)
def test_eager(make, placement):
    assert_same_answer(eqx.filter_shard(make(), placement), mylib.filter_shard(make(), placement))


STAGED = BOTH | {
    "free": (words, on(P(FREE, "y"))),
    "abstract mesh": (
        lambda: jax.device_put(words(), on(P())),
        NamedSharding(AUTO.abstract_mesh, P("x")),
    ),
    "layout": (words, Format(Layout((1, 0)), on(P("x")))),
    "on the mesh": (lambda: jax.device_put(words(), on(P())), on(P("y"))),
}


@pytest.mark.parametrize("make, placement", STAGED.values(), ids=STAGED)
def test_staged(make, placement):
    def run(filter_shard):
        return eqx.filter_jit(lambda tree: filter_shard(tree, placement))(make())

    assert_same_answer(run(eqx.filter_shard), run(mylib.filter_shard))


SPECS = [P(), P("x"), P(FREE, "y"), P(FREE), P(None, ("y", "x"))]
AROUND = {
    "with mesh": (lambda: AUTO, AUTO, SPECS),
    "set_mesh": (lambda: jax.set_mesh(AUTO), AUTO, SPECS),
    # Of the axes of such a mesh `with_sharding_constraint` takes the Auto ones.
    "mixed": (lambda: jax.set_mesh(MIXED), MIXED, [P(), P(FREE, "y"), P(FREE)]),
}


legacy = pytest.mark.filterwarnings("ignore:`with mesh.`:DeprecationWarning")


@legacy
@pytest.mark.parametrize("staged", [False, True], ids=["eager", "staged"])
@pytest.mark.parametrize("enter, mesh, specs", AROUND.values(), ids=AROUND)
def test_specs_on_the_mesh_around(enter, mesh, specs, staged):
    x = jax.device_put(words(), on(P(), mesh))
    with enter():
        for spec in specs:
            theirs, ours = (
                (lambda x, f=f, spec=spec: f(x, spec))
                for f in (eqx.filter_shard, mylib.filter_shard)
            )
            if staged:
                theirs, ours = jax.jit(theirs), jax.jit(ours)
            assert_same_answer(theirs(x), ours(x))


TRANSFORMED = {
    "vmap": lambda f: jax.vmap(f)(words()),
    "vmap in jit": lambda f: jax.jit(jax.vmap(f))(words()),
    "vmap over an axis": lambda f: jax.jit(jax.vmap(f, spmd_axis_name="y"))(words()),
    "grad in jit": lambda f: jax.jit(jax.grad(lambda x: (f(x) ** 2).sum()))(jnp.arange(8.0)),
    "jvp in jit": lambda f: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(jnp.arange(8.0)),
    "scan": lambda f: jax.lax.scan(lambda c, x: (f(c + x), c), jnp.zeros(8), words()),
    "eval_shape": lambda f: jax.eval_shape(f, jnp.arange(8.0)),
}


@pytest.mark.parametrize("transformed", TRANSFORMED.values(), ids=TRANSFORMED)
def test_transformed(transformed):
    assert_same_answer(
        transformed(lambda x: eqx.filter_shard(x, on(P("x")))),
        transformed(lambda x: mylib.filter_shard(x, on(P("x")))),
    )


# Where the answers differ.


def test_an_uneven_dimension_raises_in_jit():
    x = jnp.ones(7)
    assert jax.jit(lambda x: eqx.filter_shard(x, on(P("x"))))(x).sharding.is_fully_replicated
    with pytest.raises(mylib.PlacementError, match="dimension 0 of size 7 does not divide"):
        jax.jit(lambda x: mylib.filter_shard(x, on(P("x"))))(x)


def test_an_unchanged_leaf_is_not_copied():
    x = jax.device_put(words(), on(P("x")))
    assert eqx.filter_shard(x, on(P("x"))) is not x
    assert mylib.filter_shard(x, on(P("x"))) is x


def test_a_memory_kind_is_not_ignored_in_jit():
    target = on(P("x"), memory_kind="pinned_host")
    ignored = jax.jit(lambda x: eqx.filter_shard(x, target))(words())
    assert ignored.sharding.memory_kind == "device"
    with pytest.raises(mylib.PlacementError, match="filter_device_put"):
        jax.jit(lambda x: mylib.filter_shard(x, target))(words())


def test_an_eager_cotangent_goes_home():
    x = jax.device_put(jnp.arange(8.0), on(P("y")))
    theirs, ours = (
        jax.grad(lambda x, f=f: (f(x, on(P("x"))) ** 2).sum())(x)
        for f in (eqx.filter_shard, mylib.filter_shard)
    )
    assert theirs.sharding.spec == P("x")
    assert ours.sharding.spec == P("y")
    np.testing.assert_array_equal(ours, theirs)


def test_an_abstract_leaf_is_placed():
    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    assert eqx.filter_shard(x, on(P("x"))) is x
    assert mylib.filter_shard(x, on(P("x"))).sharding == on(P("x"))


# jax.device_put


def arrays():
    return {
        "a": jnp.arange(8.0),
        "b": (np.arange(8), np.ones((8, 2), jnp.bfloat16), jax.random.split(jax.random.key(0), 8)),
        "c": jax.device_put(words(), on(P("x"))),
    }


def mesh_shardings():
    return {"a": on(P("x")), "b": on(P()), "c": on(P("y", "x"))}


PUT = {
    "nothing": (arrays, (), {}),
    "device": (arrays, (LAST,), {}),
    "single": (arrays, (SingleDeviceSharding(SECOND),), {}),
    "sharding": (arrays, (on(P("x")),), {}),
    "explicit": (arrays, (on(P("x"), EXPLICIT),), {}),
    "prefix": (arrays, (mesh_shardings(),), {}),
    "devices": (arrays, ({"a": FIRST, "b": (SECOND, on(P()), LAST), "c": LAST},), {}),
    "host memory": (words, (on(P("x"), memory_kind="pinned_host"),), {}),
    "layout": (words, (Format(Layout((1, 0)), on(P("x"))),), {}),
    "donate": (arrays, (LAST,), {"donate": True}),
    "donate some": (arrays, (LAST,), {"donate": {"a": True, "b": False, "c": True}}),
    "alias": (arrays, (LAST,), {"may_alias": True}),
    "alias some": (arrays, (LAST,), {"may_alias": {"a": True, "b": None, "c": False}}),
    "no alias": (arrays, (LAST,), {"may_alias": False}),
    "source": (arrays, (LAST,), {"src": FIRST}),
    "sources": (arrays, (LAST,), {"src": {"a": FIRST, "b": FIRST, "c": on(P("x"))}}),
    "alone": (words, (LAST,), {}),
    "weak": (lambda: jnp.asarray(2.0), (on(P()),), {}),
    "weak donated": (lambda: jnp.asarray(2.0), (on(P()),), {"donate": True}),
}


@pytest.mark.parametrize("make, args, kwargs", PUT.values(), ids=PUT)
def test_device_put(make, args, kwargs):
    assert_same_answer(
        jax.device_put(make(), *args, **kwargs),
        mylib.filter_device_put(make(), *args, **kwargs),
    )


def test_device_put_to_the_default_device():
    with jax.default_device(LAST):
        x = np.arange(8)
        assert_same_answer(jax.device_put(x), mylib.filter_device_put(x))
    with jax.set_mesh(EXPLICIT):
        assert_same_answer(jax.device_put(x), mylib.filter_device_put(x))


def test_device_put_takes_a_spec_under_set_mesh():
    with jax.set_mesh(EXPLICIT):
        assert_same_answer(
            jax.device_put(words(), P("x")), mylib.filter_device_put(words(), P("x"))
        )


@pytest.mark.parametrize("src", [None, SECOND, on(P("y"))], ids=["none", "device", "sharding"])
def test_cotangents_go_back_to_the_source(src):
    def grad(put):
        x = jax.device_put(jnp.arange(8.0), FIRST)
        return jax.grad(lambda x: (put(x, on(P("x")), src=src) ** 2).sum())(x)

    assert_same_answer(grad(jax.device_put), grad(mylib.filter_device_put))


@pytest.mark.parametrize("kind", ["pinned_host", "device"])
def test_device_put_between_memories_in_jit(kind):
    here = "device" if kind == "pinned_host" else "pinned_host"
    x = jax.device_put(words(), on(P("x"), memory_kind=here))

    def run(put):
        return jax.jit(lambda x: put(x, on(P("x"), memory_kind=kind)))(x)

    assert_same_answer(run(jax.device_put), run(mylib.filter_device_put))


def shares(x, y):
    return np.shares_memory(np.asarray(x), np.asarray(y))


def test_aliasing_on_request():
    x = jax.device_put(words(), FIRST)
    there = Mesh(np.array([FIRST]), ("x",))
    for put in (jax.device_put, mylib.filter_device_put):
        assert shares(put(x, on(P(), there), may_alias=True), x)
        assert not shares(put(x, on(P(), there), may_alias=False), x)
    # By default `jax.device_put` shares memory and we don't.
    assert shares(jax.device_put(x, on(P(), there)), x)
    assert not shares(mylib.filter_device_put(x, on(P(), there)), x)


def test_donating_and_aliasing_exclude_each_other():
    for put in (jax.device_put, mylib.filter_device_put):
        with pytest.raises(ValueError):
            put(words(), LAST, donate=True, may_alias=True)

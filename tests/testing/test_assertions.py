"""`assert_placed`: arrays are where `filter_shard` would put them."""

import contextlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contexts import AUTO, EXPLICIT, MIXED
from hypothesis import given, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P

import mylib
from mylib.rules import fsdp
from mylib.testing import assert_placed

SPECS = [P(), P("data"), P("model"), P(None, "data"), P("data", "model"), P(("data", "model"))]
specs = st.sampled_from(SPECS)
meshes = st.sampled_from([AUTO, EXPLICIT])


@given(specs, specs, meshes, meshes)
def test_what_is_there_and_nothing_else(put, wanted, mesh, other):
    tree = {"w": np.zeros((8, 8), np.float32), "name": "a"}
    placed = mylib.filter_shard(tree, put, mesh=mesh)
    if put == wanted and mesh is other:
        assert_placed(placed, wanted, mesh=other)
        return
    with pytest.raises(AssertionError) as caught:
        assert_placed(placed, wanted, mesh=other)
    text = str(caught.value)
    assert "['w'] (8, 8)" in text
    assert f"is at: {placed['w'].sharding}" in text
    assert f"wanted: {NamedSharding(other, wanted)}" in text


@pytest.mark.parametrize(
    "x, told",
    [
        (np.zeros(8), "no device: it is a NumPy array"),
        (np.float32(1), "no device: it is a NumPy array"),
        (jax.ShapeDtypeStruct((8,), jnp.float32), "no device: it has no values"),
        (jnp.zeros(8), "(uncommitted)"),
    ],
    ids=["numpy", "scalar", "abstract", "uncommitted"],
)
def test_what_is_nowhere(x, told):
    with pytest.raises(AssertionError) as caught:
        assert_placed({"x": x}, P(), mesh=AUTO)
    assert told in str(caught.value)


@pytest.mark.parametrize("mesh", [AUTO, MIXED], ids=["Auto", "mixed"])
def test_traced(mesh):
    def f(x):
        assert_placed(mylib.filter_shard(x, P(), mesh=mesh), P(), mesh=mesh)

    told = "unknown: it is traced; check the results of the function"
    with pytest.raises(AssertionError, match=told):
        jax.jit(f)(jnp.zeros(8))
    with jax.set_mesh(mesh), pytest.raises(AssertionError, match=told):
        jax.jit(f)(jnp.zeros(8))


TYPED = [*SPECS, P(reduced={"data"}), P("model", unreduced={"data"})]


@pytest.mark.parametrize("put", TYPED, ids=str)
@pytest.mark.parametrize("in_force", [False, True])
def test_on_explicit_axes_types_say_where_traced_values_are(put, in_force):
    def f(x):
        x = {"x": mylib.filter_shard(x, put, mesh=EXPLICIT)}
        for wanted in TYPED:
            for mesh in (EXPLICIT, None):  # by default the one that the value is on
                if wanted == put:
                    assert_placed(x, wanted, mesh=mesh)
                    assert_placed(x, NamedSharding(EXPLICIT, wanted))
                    continue
                with pytest.raises(AssertionError) as caught:
                    assert_placed(x, wanted, mesh=mesh)
                assert f"is at: {jax.typeof(x['x']).sharding}" in str(caught.value)
        if not in_force:
            with pytest.raises(AssertionError, match="is at"):
                assert_placed(x, NamedSharding(AUTO, P(*put.partitions)))
        return x

    x = mylib.filter_shard(np.zeros((8, 8), np.float32), P(), mesh=EXPLICIT)
    with jax.set_mesh(EXPLICIT) if in_force else contextlib.nullcontext():
        jax.jit(f)(x)
        jax.jit(lambda x: jax.lax.scan(lambda c, _: (f(c)["x"], None), f(x)["x"], length=2)[0])(x)


def test_memory_kinds_of_traced_values():
    pinned = NamedSharding(EXPLICIT, P("data"), memory_kind="pinned_host")

    def f(x):
        assert_placed(x, P("data"), mesh=EXPLICIT)
        with pytest.raises(AssertionError, match="pinned_host"):
            assert_placed(x, pinned)
        assert_placed(mylib.filter_device_put(x, pinned), pinned)
        return x

    jax.jit(f)(mylib.filter_shard(np.zeros((8, 8), np.float32), P("data"), mesh=EXPLICIT))


@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["Auto", "Explicit"])
def test_under_an_eager_transformation_the_array_behind_counts(mesh):
    x = mylib.filter_shard(np.zeros((4, 8), np.float32), P(None, "data"), mesh=mesh)

    def f(x, wanted, other):
        for said in (mesh, None):
            assert_placed(x, wanted, mesh=said)
            with pytest.raises(AssertionError, match="is at: NamedSharding"):
                assert_placed(x, other, mesh=said)
        return 2 * x

    jax.linearize(lambda x: f(x, P(None, "data"), P("data")), x)
    jax.vmap(f, in_axes=(0, None, None))(x, P("data"), P())
    with pytest.raises(AssertionError, match="unknown: it is traced"):
        jax.grad(lambda x: assert_placed(x, P(), mesh=mesh) or x.sum())(jnp.zeros(3))


def test_the_mesh_is_that_of_the_arrays(mylib_mesh):
    """`mylib_mesh` is the plugin's fixture, which puts no mesh in force."""
    model = eqx.nn.MLP(64, 64, 64, 1, key=jax.random.key(0))
    placed = mylib.filter_shard(model, fsdp("data"), mesh=mylib_mesh)
    assert_placed(placed, fsdp("data"))
    assert_placed({"model": placed, "x": np.zeros(3)}, {"model": fsdp("data"), "x": None})
    with pytest.raises(AssertionError) as caught:
        assert_placed({"model": placed, "forgotten": jnp.zeros(3)}, fsdp("data"))
    assert "['forgotten'] (3,)" in str(caught.value) and "'model'" not in str(caught.value)
    with pytest.raises(AssertionError, match="not where expected"):
        assert_placed(placed, P())
    with pytest.raises(mylib.PlacementError, match="a PartitionSpec needs a mesh"):
        assert_placed(model, P())
    with pytest.raises(mylib.PlacementError, match="a PartitionSpec needs a mesh"):
        assert_placed([placed, mylib.filter_shard(model, P(), mesh=AUTO)], P())


def test_a_mesh_in_force_comes_first(mylib_mesh):
    placed = mylib.filter_shard(np.zeros(8), P("data"), mesh=AUTO)
    with jax.set_mesh(mylib_mesh), pytest.raises(AssertionError, match="not where expected"):
        assert_placed(placed, P("data"))


def test_rules_prefixes_and_what_is_left_alone():
    model = eqx.nn.MLP(64, 64, 64, 1, key=jax.random.key(0))
    placed = mylib.filter_shard(model, fsdp("data"), mesh=AUTO)
    assert_placed(placed, fsdp("data"), mesh=AUTO)
    assert_placed(
        {"model": placed, "free": jnp.ones(3)}, {"model": fsdp("data"), "free": None}, mesh=AUTO
    )
    with pytest.raises(AssertionError) as caught:
        assert_placed(
            {"model": placed, "free": placed}, {"model": fsdp("data"), "free": P()}, mesh=AUTO
        )
    assert "['free'].layers[0].weight" in str(caught.value)
    assert "['model']" not in str(caught.value)


def test_faults_of_the_request_itself():
    with pytest.raises(mylib.PlacementError, match="has no axis 'dta'"):
        assert_placed({"x": jnp.zeros(8)}, P("dta"), mesh=AUTO)

"""`assert_placed`: arrays are where `filter_shard` would put them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contexts import AUTO, EXPLICIT
from hypothesis import given, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P

import mylib
from mylib.rules import fsdp
from mylib.testing import assert_placed, assert_same_everywhere, info

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


def test_traced():
    def f(x):
        assert_placed(x, P(), mesh=AUTO)

    with pytest.raises(AssertionError, match="no known place: it is traced"):
        jax.jit(f)(jnp.zeros(8))


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


def test_alone():
    """In one process the assertions about many hold."""
    assert info().process_count == 1
    assert_same_everywhere({"x": jnp.ones(3), "key": jax.random.key(0), "f": jnp.sin, "n": None})

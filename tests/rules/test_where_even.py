"""`where_even` around placements of every kind."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

import mylib
from mylib.rules import where_even

GRID = AbstractMesh((4, 2), ("data", "model"))
LINE = AbstractMesh((8,), ("data",))
TREE = {
    "even": jax.ShapeDtypeStruct((8, 8), jnp.float32),
    "odd": jax.ShapeDtypeStruct((6, 8), jnp.float32),
    "neither": jax.ShapeDtypeStruct((3, 3), jnp.float32),
}
EVEN = {"even": P("data", "model"), "odd": P(None, "model"), "neither": P()}


def with_layout(sharding):
    return Format(Layout((1, 0)), sharding)


@pytest.mark.parametrize("make", [lambda p: p, lambda p: lambda leaf: p], ids=["bare", "by a rule"])
class TestWhereEven:
    def test_a_spec(self, make):
        targets = mylib.resolve(TREE, where_even(make(P("data", "model"))), mesh=GRID)
        assert {name: target.spec for name, target in targets.items()} == EVEN

    @pytest.mark.parametrize("mesh", [None, GRID, LINE], ids=["no mesh", "its own", "another"])
    @pytest.mark.parametrize("wrap", [lambda sharding: sharding, with_layout])
    def test_a_sharding_is_judged_by_its_own_mesh(self, make, wrap, mesh):
        wanted = wrap(NamedSharding(GRID, P("data", "model")))
        targets = mylib.resolve(TREE, where_even(make(wanted)), mesh=mesh)
        assert targets == {name: wrap(NamedSharding(GRID, spec)) for name, spec in EVEN.items()}

    def test_why(self, make):
        rows = mylib.explain(TREE, where_even(make(NamedSharding(GRID, P("data"))))).rows
        said = {row.leaf.parts[0]: row.why.partition("; ")[2] for row in rows}
        assert said == {
            "even": "",
            "odd": "not sharded, as 4 does not divide 6",
            "neither": "not sharded, as 4 does not divide 3",
        }


def test_arrays_are_moved():
    mesh = jax.make_mesh((8,), ("data",))
    placed = mylib.filter_shard(
        [jnp.ones(16), jnp.ones(13)], where_even(NamedSharding(mesh, P("data")))
    )
    assert [x.sharding.spec for x in placed] == [P("data"), P()]


def test_other_placements_stand():
    device = SingleDeviceSharding(jax.devices()[0])
    assert mylib.resolve(TREE, where_even(lambda leaf: device)) == dict.fromkeys(TREE, device)
    assert repr(where_even(P("data"))) == "where_even(P('data'))"

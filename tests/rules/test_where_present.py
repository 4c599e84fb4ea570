"""`where_present`: one placement in the code of a model, on any mesh and on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

import mylib
from mylib.rules import PASS, batch, by_path, fsdp, replicated, where_even, where_present

RULE = where_present(P("data", None, "model"))
X = np.arange(64, dtype=np.float32).reshape(8, 2, 4)
MESHES = {
    "data": ({"data": 8}, P("data")),
    "model": ({"model": 4}, P(None, None, "model")),
    "both": ({"data": 4, "model": 2}, P("data", None, "model")),
    "neither": ({"pipe": 8}, P()),
}


def mesh_of(axes, kind=AxisType.Auto):
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    return mylib.make_mesh(
        devices=devices, explicit=axes if kind is AxisType.Explicit else (), **axes
    )


def model(x):
    """What stands in a model: a constraint between two computations."""
    return mylib.filter_shard(x * 2, RULE) + 1


class TestRooms:
    def test_without_a_mesh_arrays_are_left_alone(self):
        x = jnp.asarray(X)
        assert mylib.filter_shard(x, RULE) is x
        assert mylib.filter_shard(X, RULE) is X
        np.testing.assert_array_equal(jax.jit(model)(x), X * 2 + 1)
        assert jax.jit(model)(x).sharding.num_devices == 1

    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda k: k.name)
    @pytest.mark.parametrize(("axes", "spec"), MESHES.values(), ids=list(MESHES))
    def test_eager_and_jit(self, axes, spec, kind):
        with jax.set_mesh(mesh := mesh_of(axes, kind)):
            for run in (model, jax.jit(model)):
                y = run(mylib.filter_shard(X, P()))
                np.testing.assert_array_equal(y, X * 2 + 1)
                assert y.sharding.is_equivalent_to(NamedSharding(mesh, spec), 3)
            grads = jax.jit(jax.grad(lambda x: model(x).sum()))(mylib.filter_shard(X, P()))
            np.testing.assert_array_equal(grads, np.full_like(X, 2))

    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda k: k.name)
    def test_in_shard_map_its_axes_are_not_there(self, kind):
        mesh = mesh_of({"data": 4, "model": 2}, kind)
        for names, spec in [({"data"}, P("data", None, "model")), (None, P("data"))]:
            mapped = mylib.filter_shard_map(
                model, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names=names
            )
            y = mapped(X)
            np.testing.assert_array_equal(y, X * 2 + 1)
            assert y.sharding.is_equivalent_to(NamedSharding(mesh, spec), 3)

    def test_vmap(self):
        with jax.set_mesh(mesh_of({"data": 4})):
            y = jax.jit(jax.vmap(model))(X[None])
            assert y.sharding.spec == P(None, "data")
            np.testing.assert_array_equal(y[0], X * 2 + 1)


def specs(tree, rule, **axes):
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
    return jax.tree.map(lambda s: s.spec, mylib.resolve(tree, rule, mesh=mesh))


ONE = jax.ShapeDtypeStruct((64, 64), jnp.float32)


class TestRules:
    def test_several_axes_in_a_dimension(self):
        rule = where_present(P(("pod", "data"), "model"))
        assert specs(ONE, rule, pod=2, data=4, model=2) == P(("pod", "data"), "model")
        assert specs(ONE, rule, data=4, model=2) == P("data", "model")
        assert specs(ONE, rule, model=2) == P(None, "model")

    def test_rules(self):
        rule = where_present(fsdp("data", min_size=0))
        assert specs(ONE, rule, data=4) == P("data")
        assert specs(ONE, rule, model=4) == P()
        assert specs(ONE, where_present(batch(("data", "model"))), model=4) == P("model")
        assert mylib.resolve(ONE, rule) is None

    def test_combined(self):
        columns = by_path({"w": P("model")}) | replicated()
        tree = {"w": ONE, "v": ONE}
        both = where_present(columns & fsdp("data"))
        assert specs(tree, both, model=2, data=4) == {"w": P("model", "data"), "v": P("data")}
        assert specs(tree, both, data=4) == {"w": P(None, "data"), "v": P("data")}
        assert specs(tree, both, model=2) == {"w": P("model"), "v": P()}

    def test_on_the_right_the_left_side_stays(self):
        rule = by_path({"w": P("model")}) & where_present(fsdp("data"))
        assert specs({"w": ONE}, rule, model=2) == {"w": P("model")}
        with pytest.raises(mylib.PlacementError, match="has no axis 'model'"):
            specs({"w": ONE}, rule, data=4)

    def test_what_is_left_out_is_explained(self):
        rows = mylib.explain(ONE, where_present(P("data", "model")), AbstractMesh((4,), ("data",)))
        assert rows.rows[0].why.endswith("; without 'model', which the mesh doesn't have")
        assert mylib.explain(ONE, RULE).rows[0].why == "left alone, there is no mesh"

    def test_faults_that_remain(self):
        with pytest.raises(mylib.PlacementError, match="does not divide into the 3 parts"):
            specs(ONE, where_present(P("data")), data=3)
        assert specs(ONE, where_even(where_present(P("data"))), data=3) == P()
        with pytest.raises(mylib.PlacementError, match="matches none of"):
            specs(ONE, where_present(by_path({"nothing": P()})), data=2)

    def test_other_results_stand(self):
        device = jax.devices()[0]
        mesh = AbstractMesh((4,), ("data",))
        target = mylib.resolve(ONE, where_present(lambda leaf: device), mesh=mesh)
        assert target.device_set == {device}
        passing = where_present(lambda leaf: PASS) | where_present(P("data"))
        assert mylib.resolve(ONE, passing, mesh=mesh).spec == P("data")

    @pytest.mark.parametrize("wrong", ["data", None, 3])
    def test_not_a_rule(self, wrong):
        with pytest.raises(TypeError, match="where_present takes a rule or a PartitionSpec"):
            where_present(wrong)

    def test_not_called(self):
        with pytest.raises(TypeError, match="takes a rule or a PartitionSpec, not Leaf"):
            mylib.filter_shard(X, where_present)

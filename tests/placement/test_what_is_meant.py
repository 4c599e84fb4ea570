"""Placements that could be passed by silently: Equinox's `if_array`, and arguments swapped."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import mylib
from mylib.rules import by_path, fsdp, replicated, where_even

MESH = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
ROWS = NamedSharding(MESH, P("data"))


def model():
    return eqx.nn.MLP(8, 8, 16, 1, key=jax.random.key(0))


@pytest.mark.parametrize(
    "placement",
    [
        eqx.if_array(P("data")),
        eqx.if_array(ROWS),
        eqx.if_array(lambda leaf: P("data")),
        by_path({"**": eqx.if_array(P("data"))}),
        eqx.if_array(P("data")) | replicated(),
        where_even(eqx.if_array(P("data"))),
        lambda leaf: eqx.if_array(P("data")),
    ],
    ids=["spec", "sharding", "rule", "in by_path", "in |", "in where_even", "answer of a rule"],
)
def test_if_array_is_what_is_in_it(placement):
    for place in (
        lambda tree: mylib.filter_shard(tree, placement, mesh=MESH),
        lambda tree: mylib.filter_device_put(tree, placement, mesh=MESH),
        mylib.filter_jit(lambda tree: tree, out_shardings=placement, mesh=MESH),
        mylib.filter_jit(lambda tree: tree, in_shardings=placement, mesh=MESH),
        eqx.filter_jit(lambda tree: mylib.filter_shard(tree, placement, mesh=MESH)),
    ):
        placed = place(model())
        arrays = jax.tree.leaves(eqx.filter(placed, eqx.is_array))
        assert all(x.sharding.is_equivalent_to(ROWS, x.ndim) for x in arrays)
        assert placed.activation is model().activation
    assert "if_array" in mylib.explain(model(), eqx.if_array(P("data")), MESH).rows[0].why


def test_if_array_of_no_placement():
    with pytest.raises(mylib.PlacementError, match="an object of type int is not a placement"):
        mylib.filter_shard(model(), eqx.if_array(0), mesh=MESH)


@pytest.mark.parametrize(
    "placement", [P("data"), ROWS, fsdp("data"), None, jax.devices()[0]], ids=str
)
@pytest.mark.parametrize(
    "tree",
    [np.ones(8), jnp.ones(8), model(), {"x": np.ones(8)}, jax.ShapeDtypeStruct((8,), int)],
    ids=lambda tree: type(tree).__name__,
)
def test_arguments_swapped(placement, tree):
    for verb in (mylib.filter_shard, mylib.filter_device_put, mylib.resolve, mylib.explain):
        with pytest.raises(mylib.PlacementError, match="swap them: the tree comes first"):
            verb(placement, tree, mesh=MESH)


def test_swapped_inside_of_jit():
    with pytest.raises(mylib.PlacementError, match="the tree comes first"):
        jax.jit(lambda x: mylib.filter_shard(P("data"), x, mesh=MESH))(np.ones(8))


def test_trees_without_arrays_are_left_alone():
    tree = {"name": "x", "step": 3, "f": jnp.sin}
    for placement in (P("data"), ROWS, None, tree, dict.fromkeys(tree, P("data")), fsdp("data")):
        placed = mylib.filter_shard(tree, placement, mesh=MESH)
        assert all(placed[key] is tree[key] for key in tree)
    assert mylib.filter_shard([], P("data"), mesh=MESH) == []


def test_an_optimiser_in_place_of_its_state():
    optim = optax.adam(1e-3)
    with pytest.raises(TypeError, match="the tree is an optimiser, .* Place its state"):
        mylib.filter_shard(optim, P(), mesh=MESH)
    # Other trees without arrays are ordinary, and so is an optimiser among others.
    for tree in (optax.EmptyState(), (), jax.nn.relu, [jax.nn.relu], 3, eqx.nn.Identity()):
        mylib.filter_shard(tree, P(), mesh=MESH)
    mylib.filter_shard({"optim": optim, "state": jnp.ones(8)}, P(), mesh=MESH)

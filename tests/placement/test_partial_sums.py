"""Placements that name axes as unreduced or reduced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contexts import crossed
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import mylib

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
X = np.arange(16.0, dtype=np.float32).reshape(8, 2)
SPECS = [P(unreduced={"a"}), P("a", unreduced={"b"}), P(reduced={"a"}), P("b", reduced={"a"})]


def grid(*kinds):
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=kinds)


FROM = {
    "NumPy": lambda mesh: X,
    "one device": lambda mesh: jnp.asarray(X),
    "replicated": lambda mesh: jax.device_put(X, NamedSharding(mesh, P())),
    "sharded": lambda mesh: jax.device_put(X, NamedSharding(mesh, P("a", "b"))),
    "a mesh of other axes": lambda mesh: jax.device_put(
        X, NamedSharding(jax.make_mesh((8,), ("c",)), P("c"))
    ),
}
VERBS = {
    "filter_shard": lambda x, spec, mesh: mylib.filter_shard({"w": x}, spec, mesh=mesh)["w"],
    "filter_device_put": lambda x, spec, mesh: mylib.filter_device_put(x, spec, mesh=mesh),
    "in_shardings": lambda x, spec, mesh: mylib.filter_jit(
        lambda w: w, in_shardings=spec, mesh=mesh
    )(x),
}
INSIDE = {
    "out_shardings": lambda x, spec, mesh: mylib.filter_jit(
        lambda w: w + 0, out_shardings=spec, mesh=mesh
    )(x),
    "filter_shard in jit": lambda x, spec, mesh: jax.jit(
        lambda w: mylib.filter_shard(w, spec, mesh=mesh)
    )(x),
    "filter_device_put in jit": lambda x, spec, mesh: jax.jit(
        lambda w: mylib.filter_device_put(w, spec, mesh=mesh)
    )(x),
}


def assert_is_x_at(y, spec, mesh):
    found = y.sharding.spec
    assert (found.unreduced, found.reduced) == (spec.unreduced, spec.reduced)
    assert [entry for entry in found.partitions if entry] == list(spec.partitions)
    whole = NamedSharding(mesh, P())
    np.testing.assert_array_equal(jax.jit(lambda y: jax.sharding.reshard(y, whole))(y), X)


@crossed(spec=SPECS, verb=[*VERBS, *INSIDE])
def test_they_are_served_on_explicit_axes(verb, spec):
    mesh = grid(EXPLICIT, EXPLICIT)
    for name, make in FROM.items():
        if verb in INSIDE and name == "a mesh of other axes":
            continue  # a program is of one mesh
        assert_is_x_at((VERBS | INSIDE)[verb](make(mesh), spec, mesh), spec, mesh)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_what_is_there_stays_and_what_is_not_is_added_up(spec):
    mesh = grid(EXPLICIT, EXPLICIT)
    x = mylib.filter_shard(X, spec, mesh=mesh)
    assert mylib.filter_shard(x, spec, mesh=mesh) is x
    mylib.testing.assert_placed(x, spec, mesh=mesh)
    other_mesh = NamedSharding(jax.make_mesh((8,), ("c",)), P("c"))
    for target in (NamedSharding(mesh, P("b")), jax.devices()[3], other_mesh):
        y = mylib.filter_shard(x, target)
        np.testing.assert_array_equal(y, X)
        mylib.testing.assert_placed(y, target)
    assert_is_x_at(mylib.filter_shard(x, SPECS[0], mesh=mesh), SPECS[0], mesh)
    inside = jax.jit(lambda x: mylib.filter_shard(x, P("b"), mesh=mesh))
    np.testing.assert_array_equal(inside(x), X)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_under_vmap(spec):
    mesh = grid(EXPLICIT, EXPLICIT)
    batch = mylib.filter_shard(np.stack([X, 2 * X]), P(), mesh=mesh)
    placed = jax.vmap(lambda x: mylib.filter_shard(x, spec, mesh=mesh))(batch)
    found = placed.sharding.spec
    assert (found.unreduced, found.reduced) == (spec.unreduced, spec.reduced)
    assert found.partitions[: 1 + len(spec.partitions)] == (None, *spec.partitions)
    np.testing.assert_array_equal(mylib.filter_shard(placed, P(), mesh=mesh), batch)


def test_nothing_shares_memory_with_its_source():
    mesh = grid(EXPLICIT, EXPLICIT)
    x = mylib.filter_shard(X, P(), mesh=mesh)
    y = mylib.filter_shard(x, P(reduced={"a"}), mesh=mesh)
    x.delete()
    assert_is_x_at(y, P(reduced={"a"}), mesh)


@pytest.mark.parametrize("staged", [False, True])
def test_gradients_of_reduced_weights(staged):
    mesh = grid(EXPLICIT, EXPLICIT)
    rows = np.arange(24.0, dtype=np.float32).reshape(8, 3)

    def loss(w, x):
        w = mylib.filter_shard(w, P(reduced={"a"}))
        return jnp.sum(jnp.einsum("ij,jk->ik", x, w, out_sharding=P("a")) ** 2)

    with jax.set_mesh(mesh):
        w, x = mylib.filter_shard((np.ones((3, 2), np.float32), rows), (P(), P("a")))
        gradient = jax.grad(loss)
        found = (jax.jit(gradient) if staged else gradient)(w, x)
    np.testing.assert_allclose(found, 2 * rows.T @ rows @ np.ones((3, 2)))
    assert found.sharding.is_fully_replicated


ASKED = {
    "resolve": lambda tree, spec, mesh: mylib.resolve(tree, spec, mesh=mesh),
    "filter_shard": lambda tree, spec, mesh: mylib.filter_shard(tree, spec, mesh=mesh),
    "filter_device_put": lambda tree, spec, mesh: mylib.filter_device_put(tree, spec, mesh=mesh),
    "by a rule": lambda tree, spec, mesh: mylib.filter_shard(tree, lambda leaf: spec, mesh=mesh),
    "in jit": lambda tree, spec, mesh: jax.jit(
        lambda tree: mylib.filter_shard(tree, spec, mesh=mesh)
    )(tree),
    "in_shardings": lambda tree, spec, mesh: mylib.filter_jit(
        lambda tree: tree, in_shardings=spec, mesh=mesh
    )(tree),
    "out_shardings": lambda tree, spec, mesh: mylib.filter_jit(
        lambda tree: tree, out_shardings=spec, mesh=mesh
    )(tree),
    "abstract": lambda tree, spec, mesh: mylib.filter_shard(
        jax.eval_shape(lambda: tree), spec, mesh=mesh
    ),
}


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("kinds", [(AUTO, AUTO), (EXPLICIT, AUTO)], ids=["Auto", "mixed"])
@pytest.mark.parametrize("how", ASKED)
def test_elsewhere_they_are_refused_by_name(how, kinds, spec):
    role = "unreduced" if spec.unreduced else "reduced"
    told = rf"\['w'\] \(8, 2\)\n.*asked for.*\n.*can be {role} only over a mesh whose axes are all"
    with pytest.raises(mylib.PlacementError, match=told):
        ASKED[how]({"w": X}, spec, grid(*kinds))


@pytest.mark.parametrize("how", ASKED)
def test_shardings_over_mixed_meshes_are_refused_likewise(how):
    sharding = NamedSharding(grid(EXPLICIT, AUTO), P(reduced={"a"}))
    with pytest.raises(mylib.PlacementError, match=r"\['w'\].*\n.*\n.*'b' is Auto"):
        ASKED[how]({"w": X}, sharding, None)


def test_the_types_that_count_are_those_in_force():
    mesh = grid(EXPLICIT, EXPLICIT)

    def f(x):
        return mylib.filter_shard(x, NamedSharding(mesh, P(unreduced={"a"})))

    with (
        jax.set_mesh(mesh),
        pytest.raises(mylib.PlacementError, match="'a' is Auto, 'b' is Auto"),
    ):
        jax.jit(jax.sharding.auto_axes(f, out_sharding=P()))(mylib.filter_shard(X, P()))


def test_explain_shows_them_in_its_table():
    for kinds, faulty in (((AUTO, AUTO), True), ((EXPLICIT, EXPLICIT), False)):
        explained = mylib.explain({"w": X}, P(unreduced={"a"}), grid(*kinds))
        assert explained.rows[0].faulty == faulty == bool(explained.faults)
    assert "unreduced={'a'}" in str(explained)


def test_keys_are_no_numbers():
    """JAX ends the process over them."""
    mesh = grid(EXPLICIT, EXPLICIT)
    keys = jax.random.split(jax.random.key(0), (8, 2))
    tree = {"w": X, "keys": keys}  # of the same shape
    told = r"1 leaf:\n  \['keys'\].*\n.*\n.*can't be summed"
    for how in ("filter_shard", "in jit"):
        with pytest.raises(mylib.PlacementError, match=told):
            ASKED[how](tree, P(unreduced={"a"}), mesh)


def test_where_present_leaves_out_absent_axes():
    rule = mylib.rules.where_present(P("a", unreduced={"q"}, reduced={"r"}))
    mesh = grid(EXPLICIT, EXPLICIT)
    assert mylib.resolve(X, rule, mesh=mesh).spec == P("a")
    assert "without 'q', 'r'" in str(mylib.explain(X, rule, mesh))
    there = mylib.rules.where_present(P(("a", "q"), unreduced={"b"}))
    assert mylib.resolve(X, there, mesh=mesh).spec == P("a", unreduced={"b"})
    # `where_present` speaks only for its own side of `&`.
    both = (lambda leaf: P(unreduced={"q"})) & mylib.rules.where_present(P("a"))
    with pytest.raises(mylib.PlacementError, match="has no axis 'q'"):
        mylib.resolve(X, both, mesh=mesh)


def test_a_scalar_with_partial_sums():
    mesh = grid(EXPLICIT, EXPLICIT)
    with pytest.raises(mylib.PlacementError, match="for an array of rank 0"):
        mylib.filter_shard(jnp.zeros(()), P("a", unreduced={"b"}), mesh=mesh)


@pytest.mark.skipif(not hasattr(jax.sharding, "UnreducedKind"), reason="JAX 0.10 has only sums")
def test_maxima_are_not_sums():
    mesh = grid(EXPLICIT, EXPLICIT)
    specs = [P(unreduced={"a"}, unreduced_kind=kind) for kind in jax.sharding.UnreducedKind]
    shards = [jax.device_put(np.full(2, i), d) for i, d in enumerate(mesh.devices.flat)]
    for spec, kind in zip(specs, ("sums", "maxima", "minima"), strict=True):
        x = jax.make_array_from_single_device_arrays((2,), NamedSharding(mesh, spec), shards)
        assert f"partial {kind}: the values are the {kind} of the copies over 'a'" in str(
            mylib.show(x)
        )
        assert mylib.filter_shard(x, spec, mesh=mesh) is x
        for other in specs:
            later = jax.ShapeDtypeStruct((2,), x.dtype, sharding=NamedSharding(mesh, other))
            (move,) = mylib.show(x, later).moves
            assert (move.what == "another sharding") == (other != spec)

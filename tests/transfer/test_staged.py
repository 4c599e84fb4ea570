"""Placement inside programs where several meshes meet, and what a program is told."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import mylib

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
X = np.arange(64.0, dtype=np.float32).reshape(8, 8)


def grid(*types: AxisType) -> Mesh:
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=types)


def line(kind: AxisType) -> Mesh:
    return jax.make_mesh((8,), ("d",), axis_types=(kind,))


@pytest.mark.parametrize("inner", [(AUTO, AUTO), (EXPLICIT, EXPLICIT), (EXPLICIT, AUTO)])
@pytest.mark.parametrize("outer", [(AUTO, AUTO), (EXPLICIT, EXPLICIT), (AUTO, EXPLICIT)])
def test_the_types_in_force_count_not_those_of_the_request(outer, inner):
    wanted = NamedSharding(grid(*inner), P("a", "b"))
    with jax.set_mesh(grid(*outer)):
        y = jax.jit(lambda x: mylib.filter_shard(jnp.sin(x), wanted))(X)
    assert y.sharding.is_equivalent_to(wanted, 2)
    assert y.sharding.mesh == grid(*outer)


@pytest.mark.parametrize("request_kind", ["spec", "named"])
def test_auto_axes_and_explicit_axes(request_kind):
    explicit, auto = grid(EXPLICIT, EXPLICIT), grid(AUTO, AUTO)
    placed = mylib.filter_shard(X, NamedSharding(explicit, P("a")))

    def body(x):
        mesh = None if request_kind == "spec" else explicit
        return mylib.filter_shard(
            jnp.sin(x), P("b") if mesh is None else NamedSharding(mesh, P("b"))
        )

    with jax.set_mesh(explicit):
        y = jax.jit(jax.sharding.auto_axes(body, out_sharding=P("b")))(placed)
    assert y.sharding.is_equivalent_to(NamedSharding(explicit, P("b")), 2)
    with jax.set_mesh(auto):
        y = jax.jit(jax.sharding.explicit_axes(body, in_sharding=P("a")))(X)
    assert y.sharding.is_equivalent_to(NamedSharding(auto, P("b")), 2)
    np.testing.assert_allclose(y, np.sin(X), rtol=1e-6)


@pytest.mark.parametrize("outer, inner", [(AUTO, AUTO), (AUTO, EXPLICIT), (EXPLICIT, EXPLICIT)])
def test_a_mesh_of_other_axes_over_the_same_devices(outer, inner):
    wanted = NamedSharding(line(inner), P("d"))
    with jax.set_mesh(grid(outer, outer)):
        y = jax.jit(lambda x: mylib.filter_shard(jnp.sin(x), wanted))(X)
    assert y.sharding.is_equivalent_to(wanted, 2)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_arguments_of_the_other_kind_of_axes(kind):
    other = EXPLICIT if kind == AUTO else AUTO
    x = mylib.filter_shard(X, NamedSharding(grid(other, other), P("a")))
    wanted = NamedSharding(grid(kind, kind), P("b"))
    y = jax.jit(lambda x: mylib.filter_shard(jnp.sin(x), wanted))(x)
    assert y.sharding.is_equivalent_to(wanted, 2)
    np.testing.assert_allclose(y, np.sin(X), rtol=1e-6)


@pytest.mark.parametrize("types", [(AUTO, AUTO), (EXPLICIT, EXPLICIT), (EXPLICIT, AUTO)])
def test_abstract_leaves_are_placed_inside_programs_too(types):
    seen = []

    def body(x):
        struct = jax.ShapeDtypeStruct((8, 8), jnp.float32)
        seen.append(mylib.filter_shard(struct, P("a"), mesh=grid(*types)))
        return x

    jax.jit(body)(X)
    assert seen[0].sharding == NamedSharding(grid(*types), P("a"))


def test_one_constraint_a_leaf_and_no_other_operation():
    tree = {"w": X, "b": X[0], "fn": jnp.tanh}
    wanted = NamedSharding(grid(AUTO, AUTO), P("a"))
    jaxpr = jax.make_jaxpr(
        lambda w, b: jax.tree.leaves(
            {
                k: v
                for k, v in mylib.filter_shard({**tree, "w": w, "b": b}, wanted).items()
                if k != "fn"
            }
        )
    )(X, X[0])
    assert [eqn.primitive.name for eqn in jaxpr.eqns] == ["sharding_constraint"] * 2


def test_in_a_layout():
    from jax.experimental.layout import Format, Layout

    wanted = Format(Layout((1, 0)), NamedSharding(grid(AUTO, AUTO), P("a")))
    for verb in (mylib.filter_shard, mylib.filter_device_put):
        jaxpr = jax.make_jaxpr(lambda x, verb=verb: verb(x, wanted))(X)
        names = [eqn.primitive.name for eqn in jaxpr.eqns]
        assert names == ["sharding_constraint", "layout_constraint"]
        y = jax.jit(lambda x, verb=verb: verb(x * 2, wanted) + 1)(X)
        np.testing.assert_array_equal(y, X * 2 + 1)


@pytest.mark.parametrize("types", [(AUTO, AUTO), (EXPLICIT, EXPLICIT), (EXPLICIT, AUTO)])
def test_a_value_on_the_same_devices_in_another_order_is_refused_not_ignored(types):
    turned = Mesh(grid(*types).devices[::-1], ("a", "b"), axis_types=types)
    x = mylib.filter_shard(X, NamedSharding(turned, P("a")))
    with pytest.raises(ValueError, match="incompatible devices"):
        jax.jit(lambda x: mylib.filter_shard(x, NamedSharding(grid(*types), P("b"))))(x)


@pytest.mark.parametrize("types", [(AUTO, AUTO), (EXPLICIT, EXPLICIT), (EXPLICIT, AUTO)])
def test_constants_from_anywhere(types):
    wanted = NamedSharding(grid(*types), P("a"))
    half = Mesh(np.array(jax.devices()[4:]), ("h",), axis_types=(EXPLICIT,))
    for where in (jax.devices("other")[1], jax.devices()[3], NamedSharding(half, P("h"))):
        x = jax.device_put(X, where)
        y = jax.jit(lambda x=x: mylib.filter_shard(x, wanted))()
        assert y.sharding.is_equivalent_to(wanted, 2)
        np.testing.assert_array_equal(y, X)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_an_abstract_mesh_that_nothing_fills_is_an_error(kind):
    wanted = NamedSharding(grid(kind, kind).abstract_mesh, P("a"))
    with pytest.raises(mylib.PlacementError, match="an abstract mesh has no devices"):
        jax.jit(lambda x: mylib.filter_shard(x, wanted))(X)
    with jax.set_mesh(grid(kind, kind)):
        y = jax.jit(lambda x: mylib.filter_shard(x, wanted))(X)
    assert y.sharding.is_equivalent_to(NamedSharding(grid(kind, kind), P("a")), 2)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_the_order_of_axes_counts(kind):
    one = jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind, kind))
    other = jax.make_mesh((4, 2), ("b", "a"), axis_types=(kind, kind))
    wanted = NamedSharding(other, P("a"))
    with jax.set_mesh(one):
        y = jax.jit(lambda x: mylib.filter_shard(jnp.sin(x), wanted))(X)
    assert y.sharding.is_equivalent_to(wanted, 2)


def test_a_mixed_constraint_holds_when_evaluated_step_by_step():
    mesh = grid(EXPLICIT, AUTO)
    x = mylib.filter_shard(X, NamedSharding(mesh, P()))
    wanted = NamedSharding(mesh, P("a", "b"))
    converted, consts = jax.closure_convert(lambda x: mylib.filter_shard(x * 1, wanted), x)
    assert converted(x, *consts).sharding.is_equivalent_to(wanted, 2)


ELSEWHERE = {
    "in jit": lambda f: f,
    "in a nested jit": jax.jit,
    "in a branch": lambda f: lambda x: jax.lax.cond(jnp.bool_(True), f, f, x),
    "in a scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), f(x), length=2)[0],
    "under checkpoint": jax.checkpoint,
}


@pytest.mark.parametrize("types", [(EXPLICIT, AUTO), (AUTO, EXPLICIT)])
@pytest.mark.parametrize("where", ELSEWHERE)
def test_another_use_of_the_argument_changes_nothing_on_mixed_axes(types, where):
    mesh = grid(*types)
    place = ELSEWHERE[where](lambda x: mylib.filter_shard(x, P("a"), mesh=mesh))
    y, z = jax.jit(lambda x: (place(x), mylib.filter_shard(x * 4, P(None, "b"), mesh=mesh)))(X)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("a")), 2)
    assert z.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "b")), 2)
    np.testing.assert_array_equal(z, 4 * np.asarray(y))


@pytest.mark.parametrize("kind", ["scan", "while_loop"])
def test_a_loop_may_start_anywhere(kind):
    """What a loop carries is where its body puts it, if nothing else is said of it."""
    mesh = grid(AUTO, AUTO)

    def body(x):
        return mylib.filter_shard(x + 1, P("a"), mesh=mesh)

    def scan(x):
        return jax.lax.scan(lambda carry, _: (body(carry), None), x, length=2)[0]

    def while_loop(x):
        return jax.lax.while_loop(
            lambda carry: carry[0] < 2, lambda carry: (carry[0] + 1, body(carry[1])), (0, x)
        )[1]

    y = jax.jit({"scan": scan, "while_loop": while_loop}[kind])(X)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("a")), 2)
    np.testing.assert_array_equal(y, X + 2)


def test_a_mixed_constraint_can_be_differentiated_and_mapped():
    mesh = grid(EXPLICIT, AUTO)
    wanted = NamedSharding(mesh, P("a", "b"))

    def program(x):
        gradient = jax.grad(lambda x: (mylib.filter_shard(x, wanted) ** 2).sum())(x)
        rows = jax.vmap(lambda x: mylib.filter_shard(2 * x, wanted))(jnp.stack([x] * 3))
        value, tangent = jax.jvp(lambda x: mylib.filter_shard(x * x, wanted), (x,), (x,))
        return gradient, rows, value, tangent

    with jax.set_mesh(mesh):
        gradient, rows, value, tangent = jax.jit(program)(X)
    np.testing.assert_array_equal(gradient, 2 * X)
    np.testing.assert_array_equal(rows, np.stack([2 * X] * 3))
    assert rows.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "a", "b")), 3)
    np.testing.assert_array_equal(tangent, 2 * X * X)
    for y in (value, tangent):
        assert y.sharding.is_equivalent_to(wanted, 2)


def test_mixed_axes_that_a_vmap_or_a_shard_map_has_taken():
    mesh = jax.make_mesh((2, 2, 2), ("m", "e", "a"), axis_types=(EXPLICIT, EXPLICIT, AUTO))
    types = []

    def body(x):
        y = mylib.filter_shard(2 * x, P("e", "a"))
        types.append(jax.typeof(y).sharding.spec)
        return y

    with jax.set_mesh(mesh):
        x = mylib.filter_shard(X, P("m"))
        mapped = jax.shard_map(body, in_specs=P("m"), out_specs=P("m"), axis_names={"m"})
        np.testing.assert_array_equal(jax.jit(mapped)(x), 2 * X)
        rows = mylib.filter_shard(np.stack([X, -X]), P("m"))
        y = jax.jit(jax.vmap(body))(rows)
    assert types[0] == types[1] == P("e", None)
    np.testing.assert_array_equal(y, 2 * np.stack([X, -X]))
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("m", "e", "a")), 3)


def test_the_batch_axis_of_an_explicit_mesh_can_not_be_asked_for_again():
    mesh = grid(EXPLICIT, EXPLICIT)
    x = mylib.filter_shard(X, NamedSharding(mesh, P("a")))
    over_a = jax.vmap(lambda row: mylib.filter_shard(row, NamedSharding(mesh, P("a"))))
    with pytest.raises(mylib.PlacementError, match="is split over 'a' already"):
        jax.jit(over_a)(x)
    named = jax.vmap(
        lambda row: mylib.filter_shard(row, NamedSharding(mesh, P("b"))), spmd_axis_name="a"
    )
    with pytest.raises(mylib.PlacementError, match="JAX drops it when resharding"):
        jax.jit(named)(X)


def test_refs_are_left_alone():
    mesh = grid(AUTO, AUTO)

    @jax.jit
    def program(x):
        ref = jax.new_ref(x)
        placed = mylib.filter_shard({"ref": ref, "x": x}, P("a"), mesh=mesh)
        assert placed["ref"] is ref
        return placed["x"] + ref[...]

    np.testing.assert_array_equal(program(X), 2 * X)


def test_symbolic_sizes_are_left_to_the_program():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AUTO,))
    (size,) = jax.export.symbolic_shape("b")
    struct = jax.ShapeDtypeStruct((size, 4), jnp.float32)
    f = jax.jit(lambda x: mylib.filter_shard(x, NamedSharding(mesh, P("d"))))
    exported = jax.export.export(f)(struct)
    assert exported.nr_devices == 8


def test_a_struct_with_a_layout_can_be_placed_again():
    from jax.experimental.layout import Format, Layout

    mesh = grid(AUTO, AUTO)
    struct = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    first = mylib.filter_shard(struct, Format(Layout((1, 0)), NamedSharding(mesh, P("a"))))
    assert mylib.filter_shard(first, P("b"), mesh=mesh).sharding == NamedSharding(mesh, P("b"))


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_a_checkpoint_that_is_evaluated_step_by_step(kind):
    """Under `set_mesh`, on an array that is not on the mesh yet."""
    mesh = grid(kind, kind)
    checkpoint = jax.checkpoint(lambda x: 2 * mylib.filter_shard(x, P("a"), mesh=mesh))
    with jax.set_mesh(mesh):
        result = checkpoint(X)
        gradient = jax.grad(lambda x: checkpoint(x).sum())(X)
    assert result.sharding.is_equivalent_to(NamedSharding(mesh, P("a")), 2)
    np.testing.assert_array_equal(result, 2 * X)
    np.testing.assert_array_equal(gradient, np.full_like(X, 2))

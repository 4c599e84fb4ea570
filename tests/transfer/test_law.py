"""The law of placement, on random trees, meshes and placements."""

from functools import partial

import _generate as generate
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

import mylib

MESH = jax.make_mesh((8,), ("x",))


def examples(percent):
    return settings(max_examples=max(1, settings().max_examples * percent // 100))


def is_key(x):
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def bits(x):
    """The values of an array as JAX will hold it, bit by bit."""
    x = np.asarray(jax.random.key_data(x) if is_key(x) else x)
    return x.astype(jax.dtypes.canonicalize_dtype(x.dtype)).tobytes()


def memory(x):
    """The memory that an array is in, part by part."""
    if not isinstance(x, jax.Array):
        return [x]
    x = jax.random.key_data(x) if is_key(x) else x
    return [np.asarray(shard.data) for shard in x.addressable_shards]


def share(xs, ys):
    return any(np.shares_memory(a, b) for x in xs for y in ys for a in memory(x) for b in memory(y))


def assert_same_value(y, x):
    assert y.shape == x.shape
    assert y.dtype == (x.dtype if is_key(x) else jax.dtypes.canonicalize_dtype(x.dtype))
    assert jax.typeof(y).weak_type == jax.typeof(x).weak_type
    assert bits(y) == bits(x)


def assert_is_at(y, target):
    assert isinstance(y, jax.Array) and y.committed
    assert y.sharding.is_equivalent_to(target, y.ndim)
    # Equivalence forgets names and types of axes.
    assert getattr(y.sharding, "mesh", None) == getattr(target, "mesh", None)
    assert y.sharding.memory_kind == "device"


def pairs(case, out):
    assert jtu.tree_structure(out) == jtu.tree_structure(case.tree)
    return list(zip(jtu.tree_leaves(case.tree), jtu.tree_leaves(out), case.targets, strict=True))


def moved(case, out):
    return [(x, y) for x, y, target in pairs(case, out) if target is not None and y is not x]


@pytest.mark.parametrize("verb", [mylib.filter_shard, mylib.filter_device_put])
@examples(200)
@given(case=generate.cases())
@pytest.mark.everyday("filter_shard")
def test_same_tree_where_it_was_asked_to_be(verb, case):
    out = verb(case.tree, case.placement, mesh=case.mesh)
    for x, y, target in pairs(case, out):
        if target is None:
            assert y is x
        else:
            assert_same_value(y, x)
            assert_is_at(y, target)


@examples(100)
@given(case=generate.cases())
def test_what_is_there_is_the_same_object(case):
    out = mylib.filter_shard(case.tree, case.placement, mesh=case.mesh)
    again = mylib.filter_shard(out, case.placement, mesh=case.mesh)
    once_more = mylib.filter_device_put(again, case.placement, mesh=case.mesh, donate=True)
    for y, z in zip(jtu.tree_leaves(out), jtu.tree_leaves(once_more), strict=True):
        assert z is y


@examples(100)
@given(case=generate.cases())
def test_nothing_shares_memory(case):
    out = mylib.filter_shard(case.tree, case.placement, mesh=case.mesh)
    others = [x for x in jtu.tree_leaves(case.tree) if generate.is_placed(x)]
    for _, y in moved(case, out):
        # An array placed twice is two arrays: each of them may be donated.
        assert not share([y], others)
        others.append(y)


@examples(100)
@given(case=generate.cases(generate.host_arrays()))
def test_writing_to_the_source_changes_nothing(case):
    out = mylib.filter_shard(case.tree, case.placement, mesh=case.mesh)
    before = [bits(x) for x, _ in moved(case, out)]
    for x, _ in moved(case, out):
        if isinstance(x, np.ndarray):
            x.flags.writeable = True
            x[...] = 1
    assert [bits(y) for _, y in moved(case, out)] == before


@examples(20)
@given(case=generate.cases(wanted=generate.on_the_mesh))
def test_donating_the_result_leaves_the_source_alone(case):
    out = mylib.filter_shard(case.tree, case.placement, mesh=case.mesh)
    gone = [y for x, y in moved(case, out) if not is_key(x)]
    before = [bits(x) for x, _ in moved(case, out)]
    if gone:
        shardings = [y.sharding for y in gone]
        step = partial(jax.tree.map, lambda x: x + x)
        jax.jit(step, donate_argnums=0, out_shardings=shardings)(gone)
        assert all(y.is_deleted() for y in gone)
    assert [bits(x) for x, _ in moved(case, out)] == before


@examples(100)
@given(case=generate.cases())
def test_donating_the_source_uses_it_up(case):
    """All that moved is gone afterwards, save what NumPy holds and what the result still holds."""
    before = [bits(x) if generate.is_placed(x) else None for x in jtu.tree_leaves(case.tree)]
    out = mylib.filter_device_put(case.tree, case.placement, mesh=case.mesh, donate=True)
    after = [bits(y) if generate.is_placed(y) else None for y in jtu.tree_leaves(out)]
    assert after == before
    held = {id(y) for y in jtu.tree_leaves(out)}
    for x, _ in moved(case, out):
        if isinstance(x, jax.Array):
            assert x.is_deleted() == (id(x) not in held)


TWICE = {
    "whole": P(),
    "rows": P("x"),
    "once": [P("x"), None],
    "layout": Format(Layout((1, 0)), NamedSharding(MESH, P("x"))),
}


@pytest.mark.parametrize("placement", TWICE.values(), ids=TWICE)
@pytest.mark.parametrize("home", [None, P(), P("x")], ids=["device", "whole", "rows"])
def test_donating_the_same_array_twice(placement, home):
    home = home if home is None else NamedSharding(MESH, home)
    x = jax.device_put(jnp.arange(32.0).reshape(8, 4), home)
    expected = np.array(x)
    out = mylib.filter_device_put([x, x], placement, mesh=MESH, donate=True)
    for y in out:
        np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("target", [P(), P("x")], ids=["whole", "rows"])
@pytest.mark.parametrize("home", [P(), P("x")], ids=["whole", "rows"])
def test_donating_for_a_layout(home, target):
    """Without a word about memory that could not be used again."""
    x = jax.device_put(jnp.arange(32.0).reshape(8, 4), NamedSharding(MESH, home))
    y = mylib.filter_device_put(x, Format(Layout((1, 0)), NamedSharding(MESH, target)), donate=True)
    np.testing.assert_array_equal(y, np.arange(32.0).reshape(8, 4))
    assert x.is_deleted()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("spec", [P(), P("x")], ids=str)
def test_keys_on_a_mesh_of_one_device(kind, spec):
    mesh = Mesh(np.array(jax.devices()[1:2]), ("x",), axis_types=(kind,))
    keys = jax.random.split(jax.random.key(0), 4)
    out = mylib.filter_shard(keys, spec, mesh=mesh)
    assert_same_value(out, keys)
    assert_is_at(out, NamedSharding(mesh, spec))
    assert len(out.sharding.spec) <= out.ndim
    assert mylib.filter_shard(out, spec, mesh=mesh) is out


@examples(50)
@given(case=generate.cases(), data=st.data())
def test_there_and_back(case, data):
    """Over two meshes to a device and home again, every bit stays."""
    there = mylib.filter_shard(case.tree, case.placement, mesh=case.mesh)
    mesh = data.draw(generate.meshes())
    placement, _ = data.draw(
        generate.placements(case.tree, mesh, lambda x: generate.anywhere(mesh, x))
    )
    there = mylib.filter_shard(there, placement, mesh=mesh)
    home = mylib.filter_shard(there, jax.devices()[0])
    for x, y in zip(jtu.tree_leaves(case.tree), jtu.tree_leaves(home), strict=True):
        if generate.is_placed(x):
            assert_same_value(y, x)
            assert_is_at(y, SingleDeviceSharding(jax.devices()[0]))
        else:
            assert y is x


@examples(20)
@given(
    case=generate.cases(
        generate.host_arrays(), generate.on_the_mesh, generate.meshes([(8,), (2, 2), (2, 1, 3)])
    )
)
def test_staged_as_eager(case):
    """What a compiled function returns lies where an eager call puts it."""
    arrays, static = eqx.partition(case.tree, generate.is_placed)

    @jax.jit
    def staged(arrays):
        tree = eqx.combine(arrays, static)
        out = mylib.filter_shard(tree, case.placement, mesh=case.mesh)
        return eqx.filter(out, generate.is_placed)

    out = eqx.combine(staged(arrays), static)
    eager = mylib.filter_shard(case.tree, case.placement, mesh=case.mesh)
    for (x, y, target), z in zip(pairs(case, out), jtu.tree_leaves(eager), strict=True):
        # An array without elements leaves JAX's programs replicated, whatever its sharding says.
        if y is x or not y.size:
            continue
        assert bits(y) == bits(x)
        if target is not None:
            assert_is_at(y, target)
            assert_is_at(z, target)


def assert_refused(verb, tree, placement, mesh, faulty):
    with pytest.raises(mylib.PlacementError) as caught:
        verb(tree, placement, mesh=mesh)
    roots = {"": "", "the array": "", "the tree": ""}
    assert {roots.get(fault.path, fault.path) for fault in caught.value.faults} == faulty
    assert all(name in str(caught.value) for name in faulty)


@examples(200)
@given(generate.impossible_cases())
def test_what_cannot_be_had_is_refused(case):
    """One error names all of it and nothing else, and nothing has been used up."""
    assert_refused(mylib.filter_shard, *case)
    assert_refused(partial(mylib.filter_device_put, donate=True), *case)
    assert not any(x.is_deleted() for x in jtu.tree_leaves(case[0]) if isinstance(x, jax.Array))


@examples(100)
@given(generate.impossible_cases(generate.host_arrays()))
def test_what_cannot_be_had_is_refused_in_jit(case):
    tree, *rest = case
    arrays, static = eqx.partition(tree, generate.is_placed)

    def staged(arrays):
        assert_refused(mylib.filter_shard, eqx.combine(arrays, static), *rest)
        assert_refused(mylib.filter_device_put, eqx.combine(arrays, static), *rest)

    jax.eval_shape(staged, arrays)


@pytest.mark.parametrize("verb", [mylib.filter_shard, mylib.filter_device_put])
def test_python_numbers_that_are_differentiated(verb):
    """To `jax.grad` they are arrays, of a kind of their own."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    for transform in (jax.grad, jax.value_and_grad):
        found = transform(lambda w: 3 * verb(w, P(), mesh=mesh))(0.5)
        np.testing.assert_allclose(found, (1.5, 3.0) if isinstance(found, tuple) else 3.0)

"""What JAX and XLA don't return as constrained comes back where `out_shardings` says."""

import warnings
from contextlib import contextmanager, nullcontext

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import mylib
from mylib._core.compat import names

TYPES = pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name)


def mesh_of(types):
    return jax.make_mesh((8,), ("data",), axis_types=(types,))


def tree():
    return {
        "x": jnp.ones(16),
        "none": jnp.zeros((0, 8)),
        "name": "n",
        "key": jax.random.split(jax.random.key(0), 0),
        "some": jnp.zeros((8, 0), jnp.bfloat16),
    }


WHERE = {"x": P("data"), "none": P(None, "data"), "name": None, "key": P("data"), "some": P("data")}


@contextmanager
def nothing_is_compiled():
    compiled = []

    def note(event, duration, **details):
        if event == names.EVENT_COMPILED:
            compiled.append(details)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert not compiled


@TYPES
@pytest.mark.parametrize("in_force", [False, True])
def test_they_come_back_as_asked_for_and_once_compiled(types, in_force):
    mesh = mesh_of(types)

    def step(tree):
        return {k: x if k in ("name", "key") else x * 2 for k, x in tree.items()}

    given = mylib.filter_shard(tree(), WHERE, mesh=mesh)
    with warnings.catch_warnings(), jax.set_mesh(mesh) if in_force else nullcontext():
        warnings.simplefilter("error")
        own = None if in_force else mesh
        run = mylib.filter_jit(step, out_shardings=WHERE, mesh=own, donate="all")
        given = run(given)
        for _ in range(2):
            with nothing_is_compiled():
                given = run(given)
            for name, spec in WHERE.items():
                if spec is not None:
                    wanted = NamedSharding(mesh, spec)
                    assert given[name].sharding.is_equivalent_to(wanted, given[name].ndim), name
                    assert given[name].committed
    assert given["some"].dtype == jnp.bfloat16 and given["key"].dtype == tree()["key"].dtype


def test_by_a_rule_and_compiled_ahead():
    mesh = mesh_of(AxisType.Auto)
    rule = mylib.rules.by_path({"none": P(None, "data")})
    make = mylib.filter_jit(lambda: {"none": jnp.zeros((0, 8))}, out_shardings=rule, mesh=mesh)
    for run in (make, make.lower().compile()):
        assert run()["none"].sharding.spec == P(None, "data")


def test_inside_of_transformations():
    mesh = mesh_of(AxisType.Auto)
    run = mylib.filter_jit(
        lambda x: (x.sum(), jnp.zeros((0, 8)) * x[0]), out_shardings=(P(), P("data")), mesh=mesh
    )
    assert jax.jit(lambda x: run(x)[0])(jnp.ones(8)) == 8
    value, grads = eqx.filter_value_and_grad(lambda x: run(x)[0] + run(x)[1].sum())(jnp.ones(8))
    np.testing.assert_array_equal(grads, np.ones(8))
    assert value == 8


def test_a_dimension_over_axes_of_both_types():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Auto))
    spec = P(("data", "model"))
    with jax.set_mesh(mesh):
        step = mylib.filter_jit(lambda x: {"sum": x + 1, "text": "t"}, out_shardings=spec)
        x = mylib.filter_shard(jnp.arange(16.0).reshape(8, 2), spec)
        made = step(step(x)["sum"])
    assert made["sum"].sharding.spec[0] == ("data", "model") and made["text"] == "t"
    np.testing.assert_array_equal(made["sum"], x + 2)


@pytest.mark.parametrize(
    ("types", "spec"),
    [
        ("EEA", P(("b", "c"), "a")),
        ("EAE", P(("a", "b"), "c")),
        ("AEE", P(("c", "a"), "b")),
        ("EAE", P(("a", "c", "b"))),
    ],
)
def test_beside_a_dimension_over_explicit_axes(types, spec):
    kinds = {"E": AxisType.Explicit, "A": AxisType.Auto}
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=tuple(kinds[x] for x in types))
    step = mylib.filter_jit(lambda x: x + 1, out_shardings=spec, mesh=mesh)
    x = np.arange(64.0).reshape(8, 8)
    made = step(x)
    assert made.sharding == NamedSharding(mesh, spec)
    np.testing.assert_array_equal(made, x + 1)
    value, slope = jax.jvp(step, (jnp.asarray(x),), (jnp.ones((8, 8)),))
    np.testing.assert_array_equal(value, x + 1)
    np.testing.assert_array_equal(slope, np.ones((8, 8)))
    twice = jax.vmap(step)(jnp.stack([x, x]))
    np.testing.assert_array_equal(twice[1], x + 1)
    np.testing.assert_array_equal(jax.jit(lambda x: step(x) * 2)(x), 2 * (x + 1))
    with jax.set_mesh(mesh):
        grads = jax.grad(lambda x: jnp.sum(step(x) ** 2))(jnp.asarray(x))
        np.testing.assert_array_equal(grads, 2 * (x + 1))
        np.testing.assert_array_equal(jax.jit(lambda x: step(x) * 2)(x), 2 * (x + 1))


MIXED = jax.make_mesh(
    (2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Explicit, AxisType.Explicit, AxisType.Auto)
)


@pytest.mark.parametrize("dtype", [jnp.int2, jnp.uint2, jnp.float32], ids=lambda d: d.__name__)
@pytest.mark.parametrize("spec", [P("a", ("b", "c")), P(("b", "c"), "a")], ids=str)
def test_nothing_is_sent_to_return_it(dtype, spec):
    """JAX would gather it over the Auto axes first, and XLA sends 2-bit integers wrongly."""
    make = mylib.filter_jit(lambda x: x.astype(dtype), out_shardings=spec, mesh=MIXED)
    x = np.arange(256, dtype=np.int32).reshape(16, 16) % 2
    assert not mylib.audit(make, x).collectives
    made = make(x)
    assert made.sharding == NamedSharding(MIXED, spec)
    np.testing.assert_array_equal(made.astype(jnp.int32), x)


@pytest.mark.parametrize("dtype", [jnp.int2, jnp.uint2], ids=lambda d: d.__name__)
@pytest.mark.parametrize("spec", [P(), P(None, "data")], ids=str)
def test_what_xla_sends_wrongly_is_refused_by_name(dtype, spec):
    """Remove `TWO_BITS` once plain JAX gathers these dtypes rightly: it ends the process now."""
    mesh = mylib.make_mesh(data=8)
    x = mylib.filter_shard(np.ones((8, 8), dtype), P("data"), mesh=mesh)
    run = mylib.filter_jit(lambda x: x, out_shardings=spec, mesh=mesh)
    for call in (run, run.lower):
        with pytest.raises(ValueError, match=r"use int4 or int8 on CPUs: <lambda> is compiled to"):
            call(x)
    stays = mylib.filter_jit(lambda x: x, out_shardings=P("data"), mesh=mesh)(x)
    np.testing.assert_array_equal(stays.astype(np.int32), 1)
    assert run(x.astype(jnp.int4)).sharding.spec == spec
    moved = mylib.filter_shard(x, spec, mesh=mesh)  # through the host
    np.testing.assert_array_equal(moved.astype(np.int32), 1)


@TYPES
@pytest.mark.parametrize(("shape", "spec"), [((8, 0), P("data")), ((0, 8), P(None, "data"))])
@pytest.mark.parametrize("kind", ["device", "pinned_host"])
def test_results_without_elements_can_be_read(types, shape, spec, kind):
    where = NamedSharding(mesh_of(types), spec, memory_kind=kind)
    keys = jax.random.split(jax.random.key(0), shape)
    made = mylib.filter_jit(lambda: (jnp.zeros(shape), keys), out_shardings=where)()
    for x, read in zip(made, (np.asarray, jax.random.key_data), strict=True):
        assert x.sharding.is_equivalent_to(where, x.ndim) and read(x).size == 0
        assert {s.data.shape for s in x.addressable_shards} == {where.shard_shape(shape)}


@TYPES
def test_keys_in_host_memory_say_so(types):
    mesh = mesh_of(types)
    where = NamedSharding(mesh, P("data"), memory_kind="pinned_host")
    keys = jax.random.split(jax.random.key(0), 8)
    made = mylib.filter_jit(lambda keys: keys, out_shardings=where)(keys)
    assert (
        made.sharding == where
        and jax.random.key_data(made).sharding.memory_kind == where.memory_kind
    )
    back = mylib.filter_device_put(made, P("data"), mesh=mesh)
    shards = jax.random.key_data(back).addressable_shards
    assert {s.data.sharding.memory_kind for s in shards} == {"device"}
    np.testing.assert_array_equal(jax.random.key_data(back), jax.random.key_data(keys))

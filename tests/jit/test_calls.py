"""A function has one `jax.jit`: what a call costs, what is static in a trace, what is let go."""

import gc
import sys
import weakref
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from contexts import AUTO as MESH
from jax.sharding import PartitionSpec as P

import mylib

OURS = str(Path(mylib.__file__).parent)


def frames_of(call):
    """The functions of this package that a call enters."""
    entered = []

    def look(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            entered.append(frame.f_code.co_qualname)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(before)
    return entered


@pytest.mark.parametrize("depth", [2, 30])
def test_a_call_enters_few_functions(depth):
    model, x = eqx.nn.MLP(4, 4, 4, depth, key=jax.random.key(0)), jnp.ones(4)
    f = mylib.filter_jit(lambda model, x: (model, x + 1))
    f(model, x), f(model, x)
    entered = frames_of(lambda: f(model, x))
    assert len(entered) <= 18, entered


def test_an_array_that_stays_enters_few_functions():
    x = mylib.filter_shard(jnp.ones(8), P("data"), mesh=MESH)
    mylib.filter_shard(x, P("data"), mesh=MESH)
    entered = frames_of(lambda: mylib.filter_shard(x, P("data"), mesh=MESH))
    assert len(entered) <= 34, entered


def test_static_results_are_those_of_each_trace():
    f = mylib.filter_jit(lambda x: (x, x.shape[0], isinstance(x, jax.core.Tracer)))
    for size in (2, 3, 2):
        assert f(jnp.ones(size))[1] == size
        assert jax.vmap(lambda x: f(x)[0] * f(x)[1])(jnp.ones((1, size))).sum() == size * size
        assert jax.jit(lambda x: f(x)[0] * f(x)[1])(jnp.ones(size)).sum() == size * size


def test_results_of_a_kind_that_has_no_hash():
    result = mylib.filter_jit(lambda x: (x, {1, 2}))(jnp.ones(()))
    assert result[1] == {1, 2}


class Name:
    pass


def test_static_leaves_go_with_the_function():
    """JAX keeps the static arguments of `jax.jit` in caches of its own."""
    name = Name()
    f = mylib.filter_jit(lambda x, name: x + 1, out_shardings=P(), mesh=MESH)
    f(jnp.ones(8), name)
    gone = weakref.ref(name)
    del f, name
    gc.collect()
    assert gone() is None


def test_specs_are_resolved_once():
    """Before a call whose shapes are new, and in each trace."""
    asked, traces = [], []

    def rule(leaf):
        asked.append(leaf.name)
        return P("data")

    def fun(x):
        traces.append(x)
        return x

    f = mylib.filter_shard_map(fun, mesh=MESH, in_specs=rule, out_specs=P("data"))
    for size in (8, 8, 16, 8):
        f(jnp.ones(size))
    assert asked == ["[0][0]"] * (3 + 2) and len(traces) == 2  # three changes of shapes


@pytest.mark.parametrize(
    "mapped",
    [
        lambda place: mylib.filter_jit(lambda x: 2 * x, in_shardings=place, mesh=MESH),
        lambda place: mylib.filter_shard_map(
            lambda x: 2 * x, mesh=MESH, in_specs=place, out_specs=P("data")
        ),
    ],
    ids=["filter_jit", "filter_shard_map"],
)
def test_other_shapes_in_the_same_place(mapped):
    """What does not fit is an error, with a rule and without."""
    whole = jax.NamedSharding(MESH, P())
    for place in (P("data"), lambda leaf: P("data") if leaf.size > 8 else P(None)):
        f = mapped(place)
        for size in (16, 16, 24, 16):
            y = f(jax.device_put(jnp.ones(size), whole))
            assert y.shape == (size,) and y.sharding.spec == P("data") and float(y[0]) == 2
        with pytest.raises(mylib.PlacementError, match=r"x \(15,\)(.|\n)*does not divide into"):
            f(jax.device_put(jnp.ones(15), whole))
    # The rule replicates it, so each device has the whole of it.
    y = f(jax.device_put(jnp.ones(8), whole))
    assert y.addressable_shards[0].data.shape == (8,)


@pytest.mark.parametrize("spec", [P("data", None), P("data", "one")])
def test_a_spec_with_too_many_entries_after_a_call_that_it_fits(spec):
    """Shardings are equal whatever the rank."""
    mesh = mylib.make_mesh(data=4, one=1, devices=jax.devices()[:4])
    f = mylib.filter_jit(lambda x: x, in_shardings={"x": spec}, mesh=mesh)
    place = jax.NamedSharding(mesh, P("data"))
    for _ in range(2):
        assert f(jax.device_put(jnp.ones((8, 2)), place)).shape == (8, 2)
    with pytest.raises(mylib.PlacementError, match="2 entries, for an array of rank 1"):
        f(jax.device_put(jnp.ones(8), place))
    assert f(jax.device_put(jnp.ones((8, 2, 2)), place)).shape == (8, 2, 2)

"""Calls that mylib does not know are reported, and never taken for harmless."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contexts import AUTO
from jax import lax
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P
from kernels import tensor_cores

import mylib
from mylib._core.jaxprs import all_jaxprs, jaxprs_in

OLDER = jax.__version__.startswith("0.10.")
X = np.arange(1.0, 33.0, dtype=np.float32).reshape(8, 4) / 32
PART = jnp.ones((2, 4))


def calling(name, abstract):
    """A primitive of somebody's own that calls the jaxpr `held[0][1]`."""
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda aval, held: abstract(aval))
    mlir.register_lowering(
        primitive,
        mlir.lower_fun(lambda x, held: jaxpr_as_fun(held[0][1])(x)[0], multiple_results=False),
    )
    return lambda f: lambda x: primitive.bind(x, held=(("program", jax.make_jaxpr(f)(PART)),))


def plain(aval):
    """A type that says nothing of mesh axes, as those of most people's primitives."""
    return ShapedArray(aval.shape, aval.dtype)


untyped = calling("somebodys_call", plain)
typed = calling("somebodys_typed_call", lambda aval: aval)


@custom_partitioning
def partitioned(x):
    return lax.psum(x, "data")


partitioned.def_partition(
    partition=lambda mesh, args, result: None,
    infer_sharding_from_operands=lambda mesh, args, result: None,
    sharding_rule="i j -> i j",
)


def exported(x):
    double = jax.export.export(jax.jit(lambda x: 2 * x))
    return double(jax.ShapeDtypeStruct(x.shape, x.dtype)).call(x)


HOLES = {
    "a primitive that holds a program": (untyped(jnp.sin), "somebodys_call"),
    "custom_partitioning that communicates": (partitioned, "custom_partitioning"),
    "an exported program": (exported, "call_exported"),
}


@pytest.mark.parametrize("hole", HOLES)
def test_are_refused(hole):
    fun, name = HOLES[hole]
    f = mylib.filter_shard_map(fun, mesh=AUTO, in_specs=P("data"), out_specs=P())
    words = f"the input of the {name} .*differs .*along 'data'.*\n.*mylib.opaque"
    for call in (f, jax.jit(f), f.lower):
        with pytest.raises(ValueError, match=words):
            call(X)


def test_jax_lets_them_pass():
    """Else this could be dropped: copies that differ, of an array that is called replicated."""
    f = jax.shard_map(untyped(jnp.sin), mesh=AUTO, in_specs=P("data"), out_specs=P())
    y = jax.jit(f)(X)
    assert y.sharding.is_fully_replicated
    assert len({float(shard.data[0, 0]) for shard in y.addressable_shards}) > 1


def test_opaque_is_the_way_out():
    f = mylib.opaque(untyped(lambda x: x + x))
    f = mylib.filter_shard_map(f, mesh=AUTO, in_specs=P("data"), out_specs=P("data"))
    np.testing.assert_allclose(f(X), 2 * X)


def test_those_with_right_types_are_fine():
    f = typed(lambda x: x + x)
    f = mylib.filter_shard_map(f, mesh=AUTO, in_specs=P("data"), out_specs=P("data"))
    np.testing.assert_allclose(f(X), 2 * X)


def test_the_same_everywhere_is_fine():
    def f(x):
        return untyped(lambda x: x + x)(lax.psum(x, "data"))

    f = mylib.filter_shard_map(f, mesh=AUTO, in_specs=P("data"), out_specs=P())
    np.testing.assert_allclose(f(X), 2 * X.reshape(4, 2, 4).sum(0), rtol=1e-6)


def test_places_that_are_looked_up_inside():
    def f(x):
        return untyped(lambda y: y * lax.axis_index("data"))(lax.psum(x, "data"))

    mapped = mylib.filter_shard_map(f, mesh=AUTO, in_specs=P("data"), out_specs=P())
    with pytest.raises(ValueError, match="the input of the somebodys_call"):
        mapped(X)


def test_what_they_communicate_counts():
    """A loop that devices leave after different numbers of turns."""
    total = typed(lambda x: x + lax.psum(x, "data"))

    def f(x):
        i = lax.axis_index("data")
        start = mylib.vary(jnp.asarray(0), "data")
        return lax.while_loop(lambda s: s[0] <= i, lambda s: (s[0] + 1, total(s[1])), (start, x))[1]

    mapped = mylib.filter_shard_map(f, mesh=AUTO, in_specs=P("data"), out_specs=P("data"))
    with pytest.raises(ValueError, match="some devices would wait forever"):
        mapped(X)


@pytest.mark.filterwarnings("ignore:.*core_map is deprecated:DeprecationWarning")
def test_kernels_that_write_into_references():
    from jax.experimental import pallas as pl

    cores = tensor_cores()

    def f(x):
        source, target = jax.new_ref(x), jax.new_ref(jnp.zeros((2, 4)))

        @pl.core_map(cores)
        def _():
            target[...] = source[...]

        return target[...]

    mapped = mylib.filter_shard_map(f, mesh=AUTO, in_specs=P("data"), out_specs=P())
    # A newer JAX does not trace it.
    ours, theirs = "the input of the core_map .*\n.*mylib.opaque", "not support Refs with varying"
    with pytest.raises(ValueError, match=ours if OLDER else theirs):
        mapped(X)


def test_programs_in_containers_are_found():
    program = jax.make_jaxpr(typed(lambda x: jax.jit(jnp.sin)(x)))(PART)
    (eqn,) = program.jaxpr.eqns
    assert len(jaxprs_in(eqn)) == 1
    names = {
        e.primitive.name for part in all_jaxprs(program) for e in getattr(part, "jaxpr", part).eqns
    }
    assert names == {"somebodys_typed_call", "jit", "sin"}


def test_what_is_known_is_not_refused():
    """Calls of JAX that hold programs, and whose types are right."""

    def f(x):
        solved = jnp.linalg.solve(jnp.eye(4) * (1 + x[0, 0] ** 2), x[0])
        grouped = lax.composite(lambda x: lax.psum(x, "data"), "mylib.total")(x)
        scattered = x.at[jnp.argmin(x[:, 0])].multiply(2.0)
        reduced = lax.reduce(x, jnp.float32(0), lambda a, b: a + b, (0,))
        found = jnp.searchsorted(jnp.sort(x[0]), x[1]) + jnp.nonzero(x[0], size=4)[0]
        kept = jax.checkpoint(lambda x: lax.psum(jnp.sin(x), "data"))(x)
        return solved + scattered + reduced + found, grouped + kept

    mapped = mylib.filter_shard_map(f, mesh=AUTO, in_specs=P("data"), out_specs=(P("data"), P()))
    own, shared = mapped(X)
    assert own.shape == (8, 4) and shared.sharding.is_fully_replicated

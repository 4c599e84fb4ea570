"""Values in host memory, in programs: their gradients, and what is said of where they are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from contexts import AXES, CONTEXTS, MESHES, MIXED, crossed
from jax.sharding import NamedSharding, PartitionSpec as P

import mylib

X = np.arange(1.0, 65.0, dtype=np.float32).reshape(8, 8)
ROWS = P("data")
SPECS = [P("data"), P(), P(None, "model"), P("data", "model")]


def on(mesh, spec=ROWS):
    return NamedSharding(mesh, spec)


def in_host_memory(mesh, spec=ROWS):
    return NamedSharding(mesh, spec, memory_kind="pinned_host")


def there_and_back(mesh, x):
    there = mylib.filter_device_put(x, in_host_memory(mesh))
    return mylib.filter_device_put(there, on(mesh))


@crossed(context=[*CONTEXTS], mesh=AXES)
def test_a_trip_to_host_memory_in_every_context(mesh, context):
    def program(x):
        return CONTEXTS[context](lambda x: there_and_back(mesh, 2 * x), x)

    with jax.set_mesh(mesh):
        y = jax.jit(program)(mylib.filter_shard(X, on(mesh)))
    np.testing.assert_array_equal(y, np.full_like(X, 2) if "grad" in context else 2 * X)
    assert y.sharding.memory_kind == "device"
    assert y.sharding.is_equivalent_to(on(mesh), 2)


def squares(mesh, x):
    return (there_and_back(mesh, x) ** 2).sum()


def over_turns(mesh, x):
    turn = jax.checkpoint(lambda x, _: (there_and_back(mesh, 2 * x), x.sum()))
    x, sums = jax.lax.scan(turn, mylib.filter_shard(x, on(mesh)), length=2)
    return x.sum() + sums.sum()  # 4x, and x + 2x


# Each with what the second derivative, or the gradient, is to be.
DERIVATIVES = {
    "forward over reverse": (
        lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (jnp.ones_like(x),))[1],
        squares,
        np.full_like(X, 2),
    ),
    "reverse over reverse": (
        lambda f: jax.grad(lambda x: jax.grad(f)(x).sum()),
        squares,
        np.full_like(X, 2),
    ),
    "vmap of grad": (lambda f: lambda x: jax.vmap(jax.grad(f))(x[None])[0], squares, 2 * X),
    "grad of vmap": (
        lambda f: jax.grad(lambda x: jax.vmap(f)(x[None]).sum()),
        squares,
        2 * X,
    ),
    "checkpoint": (lambda f: jax.grad(jax.checkpoint(f)), squares, 2 * X),
    "scan of checkpoint": (jax.grad, over_turns, np.full_like(X, 7)),
}


@crossed(how=[*DERIVATIVES], placed={"placed": True, "numpy": False}, mesh=AXES)
def test_derivatives_through_host_memory(mesh, how, placed):
    transform, fun, expected = DERIVATIVES[how]
    program = jax.jit(transform(functools.partial(fun, mesh)))
    with jax.set_mesh(mesh):
        y = program(mylib.filter_shard(X, on(mesh)) if placed else X)
    np.testing.assert_array_equal(y, expected)
    assert y.sharding.memory_kind == "device"
    if placed:
        assert y.sharding.is_equivalent_to(on(mesh), 2)


@MESHES
def test_a_cotangent_comes_from_where_the_result_is(mesh):
    def program(x):
        y, pull = jax.vjp(lambda x: mylib.filter_device_put(2 * x, in_host_memory(mesh)), x)
        assert jax.typeof(y).memory_space == jax.memory.Space.Host
        return pull(y)[0]

    with jax.set_mesh(mesh):
        cotangent = jax.jit(program)(mylib.filter_shard(X, on(mesh)))
    np.testing.assert_array_equal(cotangent, 4 * X)
    assert cotangent.sharding.memory_kind == "device"


@crossed(spec=[*SPECS], ahead={"called": False, "ahead": True}, mesh=AXES)
def test_what_filter_jit_returns_in_host_memory_says_so(mesh, spec, ahead):
    wanted = in_host_memory(mesh, spec)
    f = mylib.filter_jit(
        lambda x: {"there": 2 * x, "here": x + 1}, out_shardings={"there": wanted, "here": P()},
        mesh=mesh,
    )  # fmt: skip
    y = (f.lower(X).compile() if ahead else f)(X)
    assert y["there"].sharding.memory_kind == "pinned_host"
    assert y["there"].sharding.is_equivalent_to(wanted, 2)
    assert y["here"].sharding.memory_kind == "device"
    assert {s.data.sharding.memory_kind for s in y["there"].addressable_shards} == {"pinned_host"}
    np.testing.assert_array_equal(y["there"], 2 * X)
    # It is there already.
    assert mylib.filter_device_put(y["there"], wanted) is y["there"]


def test_what_is_moved_by_the_function_itself_says_so_too():
    f = mylib.filter_jit(lambda x: mylib.filter_device_put(x, in_host_memory(MIXED)), donate="all")
    x = mylib.filter_shard(X, on(MIXED))
    y = f(x)
    assert y.sharding == in_host_memory(MIXED, P("data", None))
    np.testing.assert_array_equal(y, X)
    with jax.set_mesh(MIXED):
        inside = jax.jit(lambda x: mylib.filter_device_put(f(x), on(MIXED)) + 1)
        np.testing.assert_array_equal(inside(X), X + 1)

"""Transfers between two meshes of eight devices, whichever way arrays travel."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import mylib
from mylib import mpmd

X: Any = np.arange(48, dtype=np.float32).reshape(12, 4)
SPECS = [
    P("data", "model"),
    P(),
    P("model", "data"),
    P(None, ("data", "model")),
    P(("model", "data")),
]
OTHER_DEVICES = [(5,), (4, 5, 6), (2, 3, 4, 5), (0, 7), (7, 6, 1), (0, 1, 2)]


def two_meshes(shape: tuple[int, int] = (2, 2)) -> list[Mesh]:
    """A mesh for each of two processes."""
    own = np.array(jax.devices()).reshape(2, *shape)
    return [Mesh(d, ("data", "model"), axis_types=(AxisType.Auto,) * 2) for d in own]


def mesh_of(*numbers: int) -> Mesh:
    """A mesh of some of the devices."""
    devices = [jax.devices()[i] for i in numbers]
    return Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))


def assert_is(y: jax.Array, value: Any, sharding: NamedSharding) -> None:
    """In every process: the shards that it has, and where all of them are."""
    assert y.sharding == sharding and y.shape == value.shape and y.committed
    assert mpmd.is_remote(y) == (not sharding.addressable_devices)
    assert len(y.addressable_shards) == len(sharding.addressable_devices)
    for shard in y.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), value[shard.index])


def check_grad(first: Mesh, second: Mesh, spec: P) -> None:
    """Of a function on the first mesh, and one of its result on the second."""
    f = mpmd.jit(lambda w: 2 * jnp.sin(w), mesh=first)
    g = mpmd.jit(lambda y: (y**2).sum(), mesh=second)
    w = mylib.filter_device_put(X, P("data"), mesh=first)
    grad = jax.grad(lambda w: g(mpmd.transfer(f(w), spec, mesh=second)))(w)
    assert grad.sharding.device_set == w.sharding.device_set
    expected = 8 * np.sin(X) * np.cos(X)
    np.testing.assert_allclose(mpmd.fetch(grad), expected, rtol=1e-4, atol=1e-5)


class Transfers:
    """Tests for two processes of four devices."""

    @pytest.mark.parametrize("spec", SPECS, ids=str)
    def test_another_spec(self, spec):
        first, second = two_meshes()
        x = mylib.filter_device_put(X, P("data", "model"), mesh=first)
        y = mpmd.transfer(x, spec, mesh=second)
        assert_is(y, X, NamedSharding(second, spec))
        back = mpmd.transfer(y, P("model"), mesh=first)
        assert_is(back, X, NamedSharding(first, P("model")))
        np.testing.assert_array_equal(mpmd.fetch(back), X)

    @pytest.mark.parametrize("devices", OTHER_DEVICES, ids=str)
    def test_another_number_of_devices(self, devices):
        x = mylib.filter_device_put(X, P("data"), mesh=mesh_of(0, 1, 2, 3))
        mesh = mesh_of(*devices)
        assert_is(mpmd.transfer(x, P("data"), mesh=mesh), X, NamedSharding(mesh, P("data")))

    @pytest.mark.parametrize("dtype", ["bfloat16", "int8", "bool", "complex64", "int4"])
    def test_dtypes(self, dtype):
        first, second = two_meshes()
        value = np.asarray(jnp.ones((4, 4), dtype))
        x = mylib.filter_device_put(value, P("data"), mesh=first)
        assert_is(mpmd.transfer(x, P(), mesh=second), value, NamedSharding(second, P()))

    @pytest.mark.parametrize("shape", [(), (0, 4), (1,)], ids=str)
    def test_small_shapes(self, shape):
        first, second = two_meshes()
        value = np.ones(shape, np.float32)
        x = mylib.filter_device_put(value, P(), mesh=first)
        assert_is(mpmd.transfer(x, P(), mesh=second), value, NamedSharding(second, P()))

    def test_keys(self):
        first, second = two_meshes()
        keys = jax.random.split(jax.random.key(7), 4)
        x = mylib.filter_device_put(keys, P("data"), mesh=first)
        y = mpmd.transfer(x, P("model"), mesh=second)
        assert y.dtype == keys.dtype and y.sharding.spec == P("model")
        value = mpmd.fetch(jax.random.key_data(y))
        np.testing.assert_array_equal(value, jax.random.key_data(keys))

    @pytest.mark.parametrize("source", ["device", "unpinned_host"])
    @pytest.mark.parametrize("target", ["device", "unpinned_host"])
    def test_memory_kinds(self, source, target):
        first, second = two_meshes()
        x = mylib.filter_device_put(X, NamedSharding(first, P("data"), memory_kind=source))
        wanted = NamedSharding(second, P("model"), memory_kind=target)
        assert_is(mpmd.transfer(x, wanted), X, wanted)

    def test_the_source_may_be_donated(self):
        first, second = two_meshes()
        f = mpmd.jit(lambda x: -x, mesh=first, donate="all")
        for spec in (P("data", "model"), P("data")):
            x = mylib.filter_device_put(X, P("data", "model"), mesh=first)
            y = mpmd.transfer(x, spec, mesh=second)
            f(x)
            assert_is(y, X, NamedSharding(second, spec))

"""Transfers by one program on the devices of source and target, as where JAX has no transfer
server.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import mylib
from mylib import mpmd
from mylib.testing import all_equal, barrier

ENV = {"MYLIB_TRANSPORT": "program"}
two_processes = pytest.mark.multihost(processes=2, devices_per_process=4, env=ENV)
four_processes = pytest.mark.multihost(processes=4, devices_per_process=2, env=ENV)
pytestmark = two_processes

X: Any = np.arange(48, dtype=np.float32).reshape(12, 4)


def _mesh(*numbers: int) -> Mesh:
    """A mesh of some of the eight devices."""
    devices = [jax.devices()[i] for i in numbers]
    return Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))


def _meshes() -> list[Mesh]:
    """A mesh for each of two processes."""
    own = np.array(jax.devices()).reshape(2, 2, 2)
    return [Mesh(d, ("data", "model"), axis_types=(AxisType.Auto,) * 2) for d in own]


def _assert_is(y: jax.Array, value: Any, sharding: NamedSharding) -> None:
    """In every process: the shards that it has, and where all of them are."""
    assert y.sharding == sharding and y.shape == value.shape and y.committed
    assert mpmd.is_remote(y) == (not sharding.addressable_devices)
    assert len(y.addressable_shards) == len(sharding.addressable_devices)
    for shard in y.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), value[shard.index])


def test_how_they_travel():
    assert mpmd.transport() == "program"


@pytest.mark.parametrize(
    "spec", [P("data", "model"), P(), P("model", "data"), P(("model", "data"))], ids=str
)
def test_another_spec(spec):
    first, second = _meshes()
    x = mylib.filter_device_put(X, P("data", "model"), mesh=first)
    y = mpmd.transfer(x, spec, mesh=second)
    _assert_is(y, X, NamedSharding(second, spec))
    back = mpmd.transfer(y, P("model"), mesh=first)
    _assert_is(back, X, NamedSharding(first, P("model")))
    np.testing.assert_array_equal(mpmd.fetch(back), X)


_OTHER_DEVICES = [(5,), (4, 5, 6), (2, 3, 4, 5), (0, 7), (7, 6, 1), (0, 1, 2)]


@pytest.mark.parametrize("devices", _OTHER_DEVICES, ids=str)
def test_another_number_of_devices(devices):
    x = mylib.filter_device_put(X, P("data"), mesh=_mesh(0, 1, 2, 3))
    mesh = _mesh(*devices)
    _assert_is(mpmd.transfer(x, P("data"), mesh=mesh), X, NamedSharding(mesh, P("data")))


@four_processes
@pytest.mark.parametrize("devices", _OTHER_DEVICES, ids=str)
def test_between_four_processes(devices):
    """Those that have devices of neither go on with a handle."""
    first, mesh = _mesh(0, 1, 2, 3), _mesh(*devices)
    x = mylib.filter_device_put({"x": X, "twice": 2 * X}, P("data"), mesh=first)
    y = mpmd.transfer(x, P("data"), mesh=mesh)
    _assert_is(y["x"], X, NamedSharding(mesh, P("data")))
    _assert_is(y["twice"], 2 * X, NamedSharding(mesh, P("data")))
    back = mpmd.transfer(y["x"], P(None, "data"), mesh=first)
    _assert_is(back, X, NamedSharding(first, P(None, "data")))
    assert mpmd.transport() == "program"


@four_processes
def test_from_process_to_process():
    meshes = [_mesh(i, i + 1) for i in range(0, 8, 2)]
    x = mylib.filter_device_put(X, P("data"), mesh=meshes[0])
    for i, mesh in enumerate(meshes):
        x = mpmd.jit(lambda x, i: 2 * x + i, mesh=mesh, out_shardings=P("data"))(
            mpmd.transfer(x, P("data"), mesh=mesh), i
        )
        assert mpmd.is_remote(x) == (jax.process_index() != i)
    np.testing.assert_array_equal(mpmd.fetch(x), 16 * X + 4 + 4 + 3)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "bool", "complex64", "int4"])
def test_dtypes(dtype):
    first, second = _meshes()
    value = np.asarray(jnp.ones((4, 4), dtype))
    x = mylib.filter_device_put(value, P("data"), mesh=first)
    _assert_is(mpmd.transfer(x, P(), mesh=second), value, NamedSharding(second, P()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2", "complex64"])
def test_bits(dtype):
    """The compiler adds zeros to what it moves, but not to floats."""
    first, second = _meshes()
    numbers = [-0.0, np.nan, np.inf, 1e-45]
    if dtype == "complex64":
        numbers = [complex(x, -0.0) for x in numbers]
    value = np.array(numbers, jnp.dtype(dtype))
    x = mylib.filter_device_put(value, P("data"), mesh=first)
    for spec in (P("model"), P()):
        y = mpmd.fetch(mpmd.transfer(x, spec, mesh=second))
        np.testing.assert_array_equal(y.view(np.uint8), value.view(np.uint8))


@pytest.mark.parametrize("shape", [(), (0, 4), (1,)], ids=str)
def test_small_shapes(shape):
    first, second = _meshes()
    value = np.ones(shape, np.float32)
    x = mylib.filter_device_put(value, P(), mesh=first)
    _assert_is(mpmd.transfer(x, P(), mesh=second), value, NamedSharding(second, P()))


def test_keys():
    first, second = _meshes()
    keys = jax.random.split(jax.random.key(7), 4)
    x = mylib.filter_device_put(keys, P("data"), mesh=first)
    y = mpmd.transfer(x, P("model"), mesh=second)
    assert y.dtype == keys.dtype and y.sharding.spec == P("model")
    value = mpmd.fetch(jax.random.key_data(y))
    np.testing.assert_array_equal(value, jax.random.key_data(keys))


@pytest.mark.parametrize("source", ["device", "unpinned_host"])
@pytest.mark.parametrize("target", ["device", "unpinned_host"])
def test_memory_kinds(source, target):
    first, second = _meshes()
    x = mylib.filter_device_put(X, NamedSharding(first, P("data"), memory_kind=source))
    wanted = NamedSharding(second, P("model"), memory_kind=target)
    _assert_is(mpmd.transfer(x, wanted), X, wanted)


def test_weak_types():
    first, second = _meshes()
    two = mpmd.jit(lambda: jnp.asarray(2.0), mesh=first, out_shardings=P())()
    assert mpmd.transfer(two, P(), mesh=second).weak_type


def test_static_leaves_and_numbers_stay():
    first, second = _meshes()
    tree = {"x": mylib.filter_device_put(X, P(), mesh=first), "n": 3, "f": jnp.sin}
    moved = mpmd.transfer(tree, P("data"), mesh=second)
    assert moved["n"] == 3 and moved["f"] is jnp.sin


def test_the_source_may_be_donated():
    first, second = _meshes()
    f = mpmd.jit(lambda x: -x, mesh=first, donate="all")
    for spec in (P("data", "model"), P("data")):
        x = mylib.filter_device_put(X, P("data", "model"), mesh=first)
        y = mpmd.transfer(x, spec, mesh=second)
        f(x)
        _assert_is(y, X, NamedSharding(second, spec))


def test_many_one_after_the_other():
    first, second = _meshes()
    x = mylib.filter_device_put(np.float32(0), P(), mesh=first)
    f = mpmd.jit(lambda x: x + 1, mesh=first)
    moved = []
    for _ in range(10):
        x = f(x)
        moved.append(mpmd.transfer(x, P(), mesh=second))
    assert [float(v) for v in mpmd.fetch(moved)] == list(range(1, 11))


@pytest.mark.parametrize("devices", [(4, 5, 6, 7), (3, 4, 5)], ids=str)
def test_grad(devices):
    first, second = _mesh(0, 1, 2, 3), _mesh(*devices)
    f = mpmd.jit(lambda w: 2 * jnp.sin(w), mesh=first)
    g = mpmd.jit(lambda y: (y**2).sum(), mesh=second)
    w = mylib.filter_device_put(X, P("data"), mesh=first)
    grad = jax.grad(lambda w: g(mpmd.transfer(f(w), P("data"), mesh=second)))(w)
    assert grad.sharding.device_set == w.sharding.device_set
    expected = 8 * np.sin(X) * np.cos(X)
    np.testing.assert_allclose(mpmd.fetch(grad), expected, rtol=1e-4, atol=1e-5)


def test_another_order():
    first, second = _meshes()
    a = mylib.filter_device_put({"a": X}, P("data"), mesh=first)["a"]
    b = mylib.filter_device_put({"b": X}, P("data"), mesh=first)["b"]
    with pytest.raises(mpmd.TransferError) as caught:
        mpmd.transfer(a if jax.process_index() == 0 else b, P(), mesh=second)
    all_equal(str(caught.value))
    assert "['a']" in str(caught.value) and "['b']" in str(caught.value)


def test_another_dtype():
    first, second = _meshes()
    own = X if jax.process_index() == 0 else X.astype(np.int32)
    x = mylib.filter_device_put(own, P("data"), mesh=first)
    with pytest.raises(mpmd.TransferError) as caught:
        mpmd.transfer(x, P(), mesh=second)
    all_equal(str(caught.value))
    assert "float32[12, 4]" in str(caught.value) and "int32[12, 4]" in str(caught.value)


@pytest.mark.multihost(processes=2, devices_per_process=4, env=ENV, fresh=True)
@pytest.mark.parametrize("alone", [0, 1], ids=["sender", "receiver"])
def test_one_side_is_alone(alone, monkeypatch):
    first, second = _meshes()
    x = mylib.filter_device_put(X, P("data"), mesh=first)
    if jax.process_index() == alone:
        monkeypatch.setenv("MYLIB_EXCHANGE_TIMEOUT", "2")
        with pytest.raises(mpmd.TransferError) as caught:
            mpmd.transfer(x, P(), mesh=second)
        text = str(caught.value)
        assert (
            "float32[12, 4]" in text
            and f"process {1 - alone} did not come to do so within 2 s" in text
        )
        assert "MYLIB_EXCHANGE_TIMEOUT" in text and "check=False" not in text
    barrier()


def test_an_unknown_transport(monkeypatch):
    first, second = _meshes()
    x = mylib.filter_device_put(X, P("data"), mesh=first)
    monkeypatch.setenv("MYLIB_TRANSPORT", "pigeons")
    with pytest.raises(ValueError, match="'pigeons', and can be 'links' or 'program'"):
        mpmd.transfer(x, P(), mesh=second)


@pytest.mark.multihost(processes=2, devices_per_process=4, fresh=True)
def test_a_jax_without_a_transfer_server(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax.experimental.transfer", None)
    first, second = _meshes()
    x = mylib.filter_device_put(X, P("data"), mesh=first)
    _assert_is(mpmd.transfer(x, P("model"), mesh=second), X, NamedSharding(second, P("model")))
    assert mpmd.transport() == "program"

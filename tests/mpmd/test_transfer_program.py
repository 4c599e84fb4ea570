"""Transfers by one program on the devices of source and target, as where JAX has no transfer
server.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreeing import fails
from jax.sharding import NamedSharding, PartitionSpec as P
from transfers import OTHER_DEVICES, Transfers, X, assert_is, check_grad, mesh_of, two_meshes

import mylib
from mylib import mpmd
from mylib.testing import barrier

ENV = {"MYLIB_TRANSPORT": "program"}
two_processes = pytest.mark.multihost(processes=2, devices_per_process=4, env=ENV)
four_processes = pytest.mark.multihost(processes=4, devices_per_process=2, env=ENV)
pytestmark = two_processes


@pytest.mark.slow
class TestTransfers(Transfers):
    """By programs. Of those the tests below are for every day."""


def test_how_they_travel():
    assert mpmd.transport() == "program"


@four_processes
@pytest.mark.parametrize("devices", OTHER_DEVICES, ids=str)
@pytest.mark.everyday("(4, 5, 6)", "(0, 7)", rest="thorough")
def test_between_four_processes(devices):
    """Those that have devices of neither go on with a handle."""
    first, mesh = mesh_of(0, 1, 2, 3), mesh_of(*devices)
    x = mylib.filter_device_put({"x": X, "twice": 2 * X}, P("data"), mesh=first)
    y = mpmd.transfer(x, P("data"), mesh=mesh)
    assert_is(y["x"], X, NamedSharding(mesh, P("data")))
    assert_is(y["twice"], 2 * X, NamedSharding(mesh, P("data")))
    back = mpmd.transfer(y["x"], P(None, "data"), mesh=first)
    assert_is(back, X, NamedSharding(first, P(None, "data")))
    assert mpmd.transport() == "program"


@four_processes
def test_from_process_to_process():
    meshes = [mesh_of(i, i + 1) for i in range(0, 8, 2)]
    x = mylib.filter_device_put(X, P("data"), mesh=meshes[0])
    for i, mesh in enumerate(meshes):
        x = mpmd.jit(lambda x, i: 2 * x + i, mesh=mesh, out_shardings=P("data"))(
            mpmd.transfer(x, P("data"), mesh=mesh), i
        )
        assert mpmd.is_remote(x) == (jax.process_index() != i)
    np.testing.assert_array_equal(mpmd.fetch(x), 16 * X + 4 + 4 + 3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2", "complex64"])
@pytest.mark.everyday("float32", "bfloat16", rest="thorough")
def test_bits(dtype):
    """The compiler adds zeros to what it moves, but not to floats."""
    first, second = two_meshes()
    is_complex = dtype == "complex64"
    smallest = float(jnp.finfo("float32" if is_complex else dtype).smallest_subnormal)
    numbers = [-0.0, np.nan, np.inf, smallest]
    if is_complex:
        numbers = [complex(x, -0.0) for x in numbers]
    value = np.array(numbers, jnp.dtype(dtype))
    x = mylib.filter_device_put(value, P("data"), mesh=first)
    one = mylib.filter_device_put(value[3:], P(), mesh=mesh_of(0, 4))
    for spec in (P("model"), P()):
        y = mpmd.fetch(mpmd.transfer(x, spec, mesh=second))
        np.testing.assert_array_equal(y.view(np.uint8), value.view(np.uint8))
    y = mpmd.transfer(one, P(), mesh=mesh_of(1, 5)).addressable_data(0)
    y = np.asarray(y)
    np.testing.assert_array_equal(y.view(np.uint8), value[3:].view(np.uint8))


def test_weak_types():
    first, second = two_meshes()
    two = mpmd.jit(lambda: jnp.asarray(2.0), mesh=first, out_shardings=P())()
    assert mpmd.transfer(two, P(), mesh=second).weak_type


def test_static_leaves_and_numbers_stay():
    first, second = two_meshes()
    tree = {"x": mylib.filter_device_put(X, P(), mesh=first), "n": 3, "f": jnp.sin}
    moved = mpmd.transfer(tree, P("data"), mesh=second)
    assert moved["n"] == 3 and moved["f"] is jnp.sin


def test_many_one_after_the_other():
    first, second = two_meshes()
    x = mylib.filter_device_put(np.float32(0), P(), mesh=first)
    f = mpmd.jit(lambda x: x + 1, mesh=first)
    moved = []
    for _ in range(10):
        x = f(x)
        moved.append(mpmd.transfer(x, P(), mesh=second))
    assert [float(v) for v in mpmd.fetch(moved)] == list(range(1, 11))


@pytest.mark.parametrize("devices", [(4, 5, 6, 7), (3, 4, 5)], ids=str)
def test_grad(devices):
    check_grad(mesh_of(0, 1, 2, 3), mesh_of(*devices), P("data"))


broken = pytest.mark.multihost(processes=2, devices_per_process=4, env=ENV, fresh=True)


@broken
def test_another_order():
    first, second = two_meshes()
    a = mylib.filter_device_put({"a": X}, P("data"), mesh=first)["a"]
    b = mylib.filter_device_put({"b": X}, P("data"), mesh=first)["b"]
    x = a if jax.process_index() == 0 else b
    text = fails(mpmd.TransferError, mpmd.transfer, x, P(), mesh=second)
    assert "['a']" in text and "['b']" in text


@broken
def test_another_dtype():
    first, second = two_meshes()
    own = X if jax.process_index() == 0 else X.astype(np.int32)
    x = mylib.filter_device_put(own, P("data"), mesh=first)
    text = fails(mpmd.TransferError, mpmd.transfer, x, P(), mesh=second)
    assert "float32[12, 4]" in text and "int32[12, 4]" in text


@broken
@pytest.mark.parametrize("alone", [0, 1], ids=["sender", "receiver"])
@pytest.mark.everyday("receiver", rest="thorough")
def test_one_side_is_alone(alone, monkeypatch):
    first, second = two_meshes()
    x = mylib.filter_device_put(X, P("data"), mesh=first)
    if jax.process_index() == alone:
        monkeypatch.setenv("MYLIB_EXCHANGE_TIMEOUT", "2")
        with pytest.raises(mpmd.TransferError) as caught:
            mpmd.transfer(x, P(), mesh=second)
        text = str(caught.value)
        assert (
            "float32[12, 4]" in text
            and f"process {1 - alone} did not come within 2 s to compare (transfer of" in text
        )
        assert "MYLIB_EXCHANGE_TIMEOUT" in text and "check=False" not in text
    barrier()


def test_an_unknown_transport(monkeypatch):
    first, second = two_meshes()
    x = mylib.filter_device_put(X, P("data"), mesh=first)
    monkeypatch.setenv("MYLIB_TRANSPORT", "pigeons")
    with pytest.raises(ValueError, match="'pigeons', and can be 'links' or 'program'"):
        mpmd.transfer(x, P(), mesh=second)


@pytest.mark.multihost(processes=2, devices_per_process=4, fresh=True)
def test_a_jax_without_a_transfer_server(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax.experimental.transfer", None)
    first, second = two_meshes()
    x = mylib.filter_device_put(X, P("data"), mesh=first)
    assert_is(mpmd.transfer(x, P("model"), mesh=second), X, NamedSharding(second, P("model")))
    assert mpmd.transport() == "program"

"""Values that several processes pass for one global array are compared whole."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from agreeing import all_equal, fails
from jax.sharding import Mesh, PartitionSpec as P

import mylib

pytestmark = pytest.mark.multihost(processes=2, devices_per_process=4)


@pytest.fixture
def mesh() -> Mesh:
    return mylib.make_mesh(data=8)


def _own(dtype=np.float32) -> np.ndarray:
    """Each process's own rows, in an array of the global shape."""
    return np.full((8, 2), jax.process_index() + 1).astype(dtype)


def _mean(x):
    return jnp.sum(x) / 2


_refused = partial(fails, mylib.PlacementError)
VERBS = {
    "filter_shard": lambda x: mylib.filter_shard(x, P("data")),
    "filter_device_put": lambda x: mylib.filter_device_put(x, P("data")),
    "check=True": lambda x: mylib.filter_shard(x, P("data"), check=True),
    "filter_jit": lambda x: mylib.filter_jit(_mean, in_shardings=P("data"), out_shardings=P())(x),
    "filter_shard_map": lambda x: mylib.filter_shard_map(
        lambda x: jax.lax.psum(_mean(x), "data"), in_specs=P("data"), out_specs=P()
    )(x),
}


@pytest.mark.parametrize("verb", VERBS)
def test_own_rows_are_refused(mesh, verb):
    with jax.set_mesh(mesh):
        text = _refused(VERBS[verb], _own())
        assert "process 0: float32[8, 2] with the sum 16 and the checksum" in text
        assert "process 1: float32[8, 2] with the sum 32 and the checksum" in text
        assert "mylib.data.to_global" in text and "check=False" in text
        # The same error if it is tried again; and then the processes go on.
        assert _refused(VERBS[verb], _own()) == text
        VERBS[verb](np.ones((8, 2), np.float32))


@pytest.mark.parametrize(
    "dtype", [bool, np.int8, np.uint32, np.complex64, ml_dtypes.bfloat16, ml_dtypes.int4]
)
def test_the_sum_of_any_dtype(mesh, dtype):
    text = _refused(mylib.filter_shard, _own(dtype) * (_own() > 1), P("data"), mesh=mesh)
    assert "with the sum 0" in text


def test_arrays_on_devices_and_keys(mesh):
    text = _refused(mylib.filter_shard, {"x": jnp.asarray(_own())}, P("data"), mesh=mesh)
    assert "['x']" in text and "with the sum 32" in text
    keys = jax.random.split(jax.random.key(jax.process_index()), 8)
    assert "uint32[8, 2]" in _refused(mylib.filter_shard, {"k": keys}, P("data"), mesh=mesh)


def test_rows_in_another_order(mesh):
    rows = np.roll(np.arange(16, dtype=np.float32).reshape(8, 2), jax.process_index(), axis=0)
    text = _refused(mylib.filter_shard, rows, P("data"), mesh=mesh)
    assert text.count("with the sum 120 and the checksum") == 2


def test_bits_are_compared(mesh):
    nan = np.full(8, np.nan, np.float32)
    mylib.filter_shard(nan, P("data"), mesh=mesh)
    zero = np.full(8, -0.0 if jax.process_index() else 0.0, np.float32)
    _refused(mylib.filter_shard, zero, P("data"), mesh=mesh)
    # As they are placed: 64 bits become 32.
    mylib.filter_shard(np.full(8, 1 + 1e-12 * jax.process_index()), P("data"), mesh=mesh)


def test_not_without_the_check(mesh):
    x = mylib.filter_shard(_own(), P("data"), mesh=mesh, check=False)
    assert float(jnp.sum(x)) == 24


def test_at_the_first_call_and_at_every_hundredth(mesh):
    """A loader whose batches are the same at first, and each process's own from the third on."""
    alike, step = np.ones((8, 2), np.float32), 0
    for step in range(102):
        try:
            mylib.filter_shard(alike if step < 2 else _own(), P("data"), mesh=mesh)
        except mylib.PlacementError as error:
            assert "with the sum 32" in str(error)
            break
    assert 2 <= step <= 100
    all_equal(step)
    # Another place in the program, another shape, another placement: a first call.
    _refused(mylib.filter_shard, _own(), P("data"), mesh=mesh)
    for shape in (8, 2), (16, 2):
        x = np.full(shape, 1.0 + jax.process_index() * (shape[0] == 16), np.float32)
        if shape[0] == 8:
            mylib.filter_shard(x, P("data"), mesh=mesh)
        else:
            _refused(mylib.filter_shard, x, P("data"), mesh=mesh)


@pytest.mark.parametrize("verb", [mylib.filter_shard, mylib.filter_device_put])
def test_bytes_in_another_order_and_objects(mesh, verb):
    """As files have them that come from elsewhere. In all processes, and in one."""
    there = np.arange(8, dtype=">f4")
    for x in there, there if jax.process_index() else there.astype("f4"):
        y = verb(x, P("data"), mesh=mesh)
        assert y.dtype == np.float32 and float(jnp.sum(y)) == 28
    # Python objects are left alone; the process that has them doesn't leave the other waiting.
    objects = there.astype(object)
    assert verb(objects, P("data"), mesh=mesh) is objects
    text = _refused(verb, there if jax.process_index() else objects, P("data"), mesh=mesh)
    assert "process 0: a numpy.ndarray; process 1: an array" in text


@pytest.mark.parametrize(
    "decorate",
    [
        partial(mylib.filter_jit, in_shardings=P("data")),
        partial(mylib.filter_shard_map, in_specs=P("data"), out_specs=P("data")),
    ],
    ids=["filter_jit", "filter_shard_map"],
)
def test_objects_of_one_process_in_a_function(mesh, decorate):
    """They are static, and can't be hashed. The other process isn't left waiting."""
    f, x = decorate(lambda x: 2 * x, mesh=mesh), np.ones((8, 2), np.float32)
    if jax.process_index() == 1:
        with pytest.raises(TypeError, match="<lambda> was given x, a ndarray. .* hashable"):
            f(x.astype(object))
    else:
        with pytest.raises(mylib.PlacementError, match=r"\(in process 1\)\n.*given x, a ndarray"):
            f(x)
    assert f(x).shape == (8, 2)

"""Moves between the memories of one device and of two backends; on a GPU where there is one.

The same tests run on CPU, where they show that they can pass.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import mylib

pytestmark = pytest.mark.parametrize("backend", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
SIZES = [8, 1024 * 1024]  # to either side of what is worth a program


def over(backend: str, **kwargs: str) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices(backend)[:1]), ("d",)), P("d"), **kwargs)


@pytest.mark.parametrize("size", SIZES)
def test_numpy_there_and_back(backend, size):
    x = np.arange(size, dtype=np.float32)
    y = mylib.filter_shard(x, over(backend))
    x[:] = 0
    np.testing.assert_array_equal(y, np.arange(size, dtype=np.float32))
    z = mylib.filter_shard(y, jax.devices("other")[0])
    assert z.devices() == {jax.devices("other")[0]}
    np.testing.assert_array_equal(z, y)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("donate", [False, True])
def test_onto_a_mesh_on_the_same_device(backend, size, donate):
    x = jax.device_put(np.arange(size, dtype=np.float32), jax.devices(backend)[0])
    y = mylib.filter_device_put(x, over(backend), donate=donate)
    assert x.is_deleted() == donate
    z = jax.jit(lambda v: v + 1, donate_argnums=0)(y)
    np.testing.assert_array_equal(z, np.arange(size, dtype=np.float32) + 1)
    if not donate:
        np.testing.assert_array_equal(x, np.arange(size, dtype=np.float32))


@pytest.mark.parametrize("size", SIZES)
def test_pinned_host_memory(backend, size):
    x = mylib.filter_shard(np.arange(size, dtype=np.float32), over(backend))
    parked = mylib.filter_device_put(x, over(backend, memory_kind="pinned_host"))
    assert parked.sharding.memory_kind == "pinned_host"
    back = jax.jit(lambda v: mylib.filter_device_put(v, over(backend)) * 2)(parked)
    np.testing.assert_array_equal(back, 2 * np.arange(size, dtype=np.float32))


def test_keys_and_gradients(backend):
    keys = jax.random.split(jax.random.key(0), 4)
    placed = mylib.filter_shard(keys, over(backend))
    np.testing.assert_array_equal(jax.random.key_data(placed), jax.random.key_data(keys))
    x = jax.device_put(jnp.arange(8.0), jax.devices("other")[0])
    g = jax.grad(lambda x: jnp.sum(mylib.filter_shard(x, over(backend)) ** 2))(x)
    assert g.devices() == x.devices()
    np.testing.assert_array_equal(g, 2 * np.arange(8.0))


@pytest.mark.parametrize("mesh_kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_what_is_kept_can_wait_in_host_memory(backend, mesh_kind):
    mesh = Mesh(np.array(jax.devices(backend)[:1]), ("d",), axis_types=(mesh_kind,))
    to_host = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")

    @mylib.filter_checkpoint(policy=mylib.recompute_resharded(to_host), prevent_cse=False)
    def layer(w, x):
        return jnp.sin(x @ mylib.filter_shard(w, P(), mesh=mesh))

    def loss(w, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (layer(w, x), None), x, w)[0])

    def unkept(w, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, w)[0])

    ws = mylib.filter_shard(jnp.ones((8, 256, 256)) / 256, P(None, "d"), mesh=mesh)
    x = mylib.filter_shard(jnp.ones((1024, 256)), P("d"), mesh=mesh)
    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(loss)).lower(ws, x).compile()
        expected = jax.jit(jax.grad(unkept))(ws, x)
    np.testing.assert_allclose(compiled(ws, x), expected, rtol=1e-5)
    if backend == "gpu":
        # Eight products of a megabyte each.
        assert compiled.memory_analysis().host_temp_size_in_bytes >= 8 * x.nbytes


def test_batches_ahead_of_the_loop(backend):
    """One buffer, filled again for each batch, while the transfers are under way."""
    mesh = Mesh(np.array(jax.devices(backend)), ("data",))

    def source():
        buffer = np.empty((8 * mesh.size, 1 << 16), np.float32)
        for i in range(8):
            buffer[:] = i
            yield buffer

    step = jax.jit(lambda x: x.min() + x.max())
    batches = mylib.data.prefetch(source(), P("data"), mesh=mesh)
    assert [float(step(batch)) for batch in batches] == [2.0 * i for i in range(8)]

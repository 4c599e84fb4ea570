"""`check_replicas`: equal copies pass, others are named."""

import copy
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contexts import AUTO, MESHES
from hypothesis import given, settings, strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

import mylib
from mylib import check_replicas, filter_shard
from mylib._moving.processes import replicas as _replicas
from mylib.errors import ReplicaError

DTYPES = [
    *("bool int8 uint8 int16 uint16 int32 uint32 float16 float32 complex64".split()),
    *("bfloat16 float8_e4m3fn float8_e5m2 int4 uint4".split()),
]


def flip_one_bit(part):
    part.reshape(-1).view(np.uint8)[0] ^= 1


def spoiled(x, spec, *devices, mesh=AUTO, by=flip_one_bit):
    """An array as `filter_shard` makes it, but for what some devices have of it."""
    placed = filter_shard(x, spec, mesh=mesh)
    parts = []
    for shard in placed.addressable_shards:
        part = np.array(shard.data)
        if shard.device.id in devices:
            by(part)
        parts.append(jax.device_put(part, shard.device))
    return jax.make_array_from_single_device_arrays(placed.shape, placed.sharding, parts)


def faults_of(tree):
    with pytest.raises(ReplicaError) as error:
        check_replicas(tree)
    return error.value.faults


@MESHES
@pytest.mark.parametrize("spec", [P(), P("data"), P(None, "model"), P(("model", "data"))])
def test_equal_copies(mesh, spec):
    tree = {
        "model": eqx.nn.MLP(8, 8, 16, 2, key=jax.random.key(0)),
        "keys": jax.random.split(jax.random.key(0), 8),
        "nan": jnp.full((8, 8), jnp.nan),
        "host": np.ones(3),
        "static": ("text", 1, None),
        "empty": jnp.ones((0, 8)),
    }
    check_replicas(
        filter_shard(tree, lambda leaf: spec if len(leaf.shape) == 2 else P(), mesh=mesh)
    )
    check_replicas(tree)
    check_replicas({})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (5,), (4, 4)])
def test_every_type(dtype, shape):
    dtype = jnp.dtype(dtype)
    x = np.ones(shape, dtype)
    check_replicas(filter_shard(x, P(), mesh=AUTO))
    (fault,) = faults_of(spoiled(x, P(), 3))
    assert fault.shape == shape
    assert "2 values of it" in fault.reason and "on device 3" in fault.reason


def test_what_differs_is_named():
    tree = {
        "good": filter_shard(jnp.arange(8.0), P(), mesh=AUTO),
        "bad": [spoiled(jnp.zeros((8, 2)), P("data"), 1)],
        "worse": spoiled(jnp.zeros(8), P(), 2, 5),
    }
    with pytest.raises(ReplicaError) as error:
        check_replicas(tree)
    bad, worse = error.value.faults
    assert (bad.path, bad.shape, worse.path) == ("['bad'][0]", (8, 2), "['worse']")
    assert "process 0 on device 0; process 0 on device 1" in bad.reason
    assert "process 0 on devices 0, 1, 3, 4, 6, 7; process 0 on devices 2, 5" in worse.reason
    message = str(error.value)
    assert message.startswith("copies differ in 2 leaves; the first: ['bad'][0] (8, 2): ")
    assert "good" not in message
    assert str(pickle.loads(pickle.dumps(error.value))) == message
    assert str(copy.deepcopy(error.value)) == message


def test_several_parts():
    (fault,) = faults_of(spoiled(jnp.zeros((8, 2)), P("data"), 1, 3, 5))
    assert "and 2 more of its shards differ" in fault.reason


def test_to_the_bit():
    def negate(part):
        part[0] = -part[0]

    def other_nan(part):
        part.view(np.uint32)[0] ^= 1

    assert faults_of(spoiled(jnp.zeros(4), P(), 1, by=negate))
    assert faults_of(spoiled(jnp.full(4, jnp.nan), P(), 1, by=other_nan))


@settings(max_examples=20)
@given(st.data())
def test_any_one_bit_and_any_swap(data):
    x = np.arange(24, dtype=np.float32)
    device = data.draw(st.integers(0, 7))
    i, j = data.draw(st.lists(st.integers(0, 23), min_size=2, max_size=2, unique=True))
    bit = data.draw(st.integers(0, 31))

    def flip(part):
        part.view(np.uint32)[i] ^= np.uint32(1 << bit)

    def swap(part):
        part[[i, j]] = part[[j, i]]

    assert faults_of(spoiled(x, P(), device, by=flip))
    assert faults_of(spoiled(x, P(), device, by=swap))


def test_keys():
    keys = jax.random.split(jax.random.key(0), 4)
    data = spoiled(jax.random.key_data(keys), P(), 6)
    (fault,) = faults_of({"key": jax.random.wrap_key_data(data)})
    assert fault.path == "['key']"


def test_double_precision():
    with jax.enable_x64(True):
        for dtype in "int64 uint64 float64 complex128".split():
            x = np.ones(3, dtype)
            check_replicas(filter_shard(x, P(), mesh=AUTO))
            assert faults_of(spoiled(x, P(), 3))


def test_several_meshes():
    half = Mesh(np.array(jax.devices()[:4]), ("data",))
    other = Mesh(np.array(jax.devices()[::-1]).reshape(4, 2), ("data", "model"))
    tree = [
        filter_shard(jnp.ones(8), P(), mesh=half),
        filter_shard(jnp.ones(8), P("data"), mesh=other),
        spoiled(jnp.ones(8), P("data"), 6, mesh=other),
        spoiled(jnp.ones(8), P(), 3, mesh=half),
        filter_shard(jnp.ones(8), jax.devices()[5]),
    ]
    assert [fault.path for fault in faults_of(tree)] == ["[2]", "[3]"]


@pytest.mark.parametrize("kind", ["pinned_host", "unpinned_host"])
@pytest.mark.parametrize("shape", [(), (8,), (8, 4000)])
def test_in_host_memory(shape, kind):
    """Such as the count of an optimiser that is offloaded."""
    spec = P("model") if shape else P()
    there = NamedSharding(AUTO, spec, memory_kind=kind)
    tree = {"count": mylib.filter_device_put(np.ones(shape, np.float32), there)}
    check_replicas(tree)
    parts = [np.asarray(shard.data).copy() for shard in tree["count"].addressable_shards]
    flip_one_bit(parts[4])
    one = [
        jax.device_put(part, SingleDeviceSharding(device, memory_kind=kind))
        for part, device in zip(parts, AUTO.devices.flat, strict=True)
    ]
    odd = jax.make_array_from_single_device_arrays(shape, there, one)
    (fault,) = faults_of({"count": odd})
    assert fault.path == "['count']" and "on device 4" in fault.reason


def test_unreduced():
    """Along an unreduced axis there are terms of a sum; along the others, copies."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    x = filter_shard(jnp.arange(8.0).reshape(4, 2), P("data"), mesh=mesh)
    partly = P(None, None, unreduced={"data"})
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: jnp.einsum("ij,ik->jk", x, x, out_sharding=partly))(x)
        terms = [np.asarray(shard.data) for shard in y.addressable_shards]
        assert not np.array_equal(terms[0], terms[2])
        check_replicas({"y": y})
    terms[5] = terms[5].copy()
    flip_one_bit(terms[5])
    placed = [
        jax.device_put(t, shard.device)
        for t, shard in zip(terms, y.addressable_shards, strict=True)
    ]
    odd = jax.make_array_from_single_device_arrays(y.shape, y.sharding, placed)
    (fault,) = faults_of({"y": odd})
    assert "process 0 on device 4; process 0 on device 5" in fault.reason
    assert "more of its shards differ" not in fault.reason


@MESHES
def test_under_a_mesh(mesh):
    """Whose axes have nothing to do with the arrays."""
    large = {"w": filter_shard(np.zeros((300, 300), np.float32), P(), mesh=AUTO)}
    with jax.set_mesh(mesh):
        check_replicas(large)
        assert faults_of({"w": spoiled(np.zeros((300, 300), np.float32), P(), 3, mesh=mesh)})


def test_names_that_are_alike():
    class Key:
        def __init__(self, order):
            self.order = order

        def __lt__(self, other):
            return self.order < other.order

        def __repr__(self):
            return "Key"

    fine = filter_shard(jnp.zeros(4), P(), mesh=AUTO)
    faults = faults_of({Key(0): spoiled(jnp.zeros(4), P(), 1), Key(1): fine})
    assert [fault.path for fault in faults] == ["[Key]"]
    faults = faults_of({Key(0): fine, Key(1): spoiled(jnp.zeros(4), P(), 1)})
    assert [fault.path for fault in faults] == ["[Key] (2)"]


def test_diverged_under_check_vma_false():
    """How it comes to this within one process."""
    program = jax.shard_map(
        lambda x: x + jax.lax.axis_index("data"),
        mesh=AUTO,
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    (fault,) = faults_of({"w": jax.jit(program)(jnp.zeros(4))})
    assert "there are 4 values of it" in fault.reason


@pytest.mark.parametrize("dtype", DTYPES)
def test_checksums_on_devices(dtype):
    """What is compared of large arrays on accelerators."""
    x = np.ones((4, 3), jnp.dtype(dtype))
    sums = _replicas.checksums(spoiled(x, P(), 3))
    values = [np.asarray(shard.data).tobytes() for shard in sums.addressable_shards]
    assert sums.shape == (8, 2) and len(set(values)) == 2
    assert [n for n, value in enumerate(values) if value != values[0]] == [3]


def test_checksums_on_devices_see_what_is_where():
    def swap(part):
        part[[0, 1]] = part[[1, 0]]

    with jax.set_mesh(jax.make_mesh((8,), ("x",))):
        x = spoiled(np.arange(6, dtype=np.float32), P(), 5, by=swap)
        sums = np.asarray(_replicas.checksums(x))
    assert len({tuple(row) for row in sums.tolist()}) == 2


def test_nothing_is_compiled_for_trees_of_many_shapes():
    """The first call took seconds for each thousand of arrays, and more for each of many."""
    tree = [filter_shard(np.zeros(n + 1, np.float32), P(), mesh=AUTO) for n in range(300)]
    events = []

    def listen(event, seconds, **kwargs):
        events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        check_replicas(tree)
        assert events == []
        jax.jit(lambda x: x + len(tree))(1.0)
        assert events  # of what is compiled we hear
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_many_small_and_large_ones_in_any_order():
    shapes = [(3,), (2, 2), (20_000,), (3,), (20_000,), (), (3,)] * 3
    whole = {shape: filter_shard(jnp.zeros(shape), P(), mesh=AUTO) for shape in shapes}
    for bad in range(len(shapes) // 3):
        tree = [
            spoiled(jnp.zeros(shape), P(), 3) if n == bad else whole[shape]
            for n, shape in enumerate(shapes)
        ]
        assert [fault.path for fault in faults_of(tree)] == [f"[{bad}]"]


def test_not_inside_jit():
    with pytest.raises(TypeError, match=r"x'\] is traced, so it has no values yet"):
        jax.jit(lambda x: check_replicas({"x": x}))(jnp.ones(3))

"""Placement in real processes, joined by `jax.distributed`."""

import importlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreeing import TWO_AND_FOUR, TWO_OF_THEM, fails
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import mylib
from mylib.testing import assert_placed, barrier


@pytest.fixture(params=TWO_AND_FOUR, autouse=True)
def processes(request) -> int:
    return request.param


@pytest.fixture
def mesh() -> Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def _own_devices(index: int) -> list:
    return [device for device in jax.devices() if device.process_index == index]


def _same(y: jax.Array, value) -> bool:
    """Whether each shard here is its part of `value`."""
    value = np.asarray(value)
    return all(
        np.array_equal(np.asarray(shard.data), value[shard.index], equal_nan=True)
        for shard in y.addressable_shards
    )


def _differing(mesh: Mesh) -> jax.Array:
    """Replicated, it says: each process believes itself."""
    mine = np.full((4, 2), jax.process_index(), np.float32)
    return jax.make_array_from_process_local_data(NamedSharding(mesh, P()), mine, (4, 2))


# --- values of each process, onto a mesh of all ---------------------------------------------------


@TWO_OF_THEM
def test_values_of_all_kinds(mesh):
    tree = {f"leaf{i}": np.full((8, i + 1), i, np.float32) for i in range(50)}
    tree["nan"] = np.full(8, np.nan, np.float32)
    tree["half"] = np.arange(8).astype(jnp.bfloat16)
    tree["local"] = jax.device_put(jnp.arange(16.0), jax.local_devices()[1])
    tree["uncommitted"] = jnp.arange(8.0)
    tree["none"] = np.zeros((8, 0), np.float32)
    keys = jax.random.split(jax.random.key(0), 8)
    placed = mylib.filter_shard({**tree, "keys": keys, "name": "a"}, P("data"), mesh=mesh)
    replicated = mylib.filter_shard({**tree, "keys": keys, "name": "a"}, P(), mesh=mesh)
    for y, spec in (placed, P("data")), (replicated, P()):
        assert y["name"] == "a"
        assert _same(jax.random.key_data(y["keys"]), jax.random.key_data(keys))
        assert all(_same(y[name], value) for name, value in tree.items())
        assert all(not y[name].is_fully_addressable for name in tree)
        assert_placed(y, spec, mesh=mesh)
    assert float(jax.jit(jnp.sum)(placed["leaf3"])) == 8 * 4 * 3


@TWO_OF_THEM
def test_a_process_without_a_shard(mesh):
    one = Mesh(np.array(_own_devices(1)), ("d",))
    y = mylib.filter_shard({"w": np.arange(4, dtype=np.float32)}, P(), mesh=one)["w"]
    assert (len(y.addressable_shards) > 0) == (jax.process_index() == 1)
    assert _same(y, np.arange(4)) and y.dtype == jnp.float32
    # Process 1 has all of it, the others nothing. All are told.
    text = fails(mylib.PlacementError, mylib.filter_shard, {"w": y}, P(), mesh=mesh)
    assert "['w'] (4,)" in text and "its shards are on process 1, and" in text
    assert "mylib.mpmd.transfer" in text


@TWO_OF_THEM
def test_weak_types_stay_weak(mesh):
    """On the devices of all processes, and back on a device of each."""
    everywhere = mylib.filter_shard(jnp.asarray(2.0), P(), mesh=mesh)
    here = mylib.filter_shard(everywhere, jax.local_devices()[0], check=False)
    assert everywhere.weak_type and here.weak_type and float(here) == 2


def test_uneven_meshes_and_those_of_some_processes():
    some = Mesh(np.array(_own_devices(0)[:1] + _own_devices(1)[:2]), ("d",))
    y = mylib.filter_shard({"w": np.arange(6.0, dtype=np.float32)}, P("d"), mesh=some)
    assert _same(y["w"], np.arange(6.0))
    barrier()
    # Those who have no device of the mesh need not call.
    if jax.process_index() in (0, 1):
        z = mylib.filter_shard({"w": np.arange(3.0, dtype=np.float32)}, P("d"), mesh=some)
        assert _same(z["w"], np.arange(3.0))


# --- arrays over all, moved ----------------------------------------------------------------------


@TWO_OF_THEM
def test_global_arrays_are_resharded_by_one_program(mesh):
    tree = [np.arange(64.0, dtype=np.float32).reshape(8, 8) + i for i in range(5)]
    placed = mylib.filter_shard(tree, P("data", "model"), mesh=mesh)
    assert mylib.filter_shard(placed, P("data", "model"), mesh=mesh)[0] is placed[0]
    swapped = mylib.filter_shard(placed, P("model", "data"), mesh=mesh)
    assert_placed(swapped, P("model", "data"), mesh=mesh)
    assert all(_same(y, value) for y, value in zip(swapped, tree, strict=True))
    gone = mylib.filter_device_put(swapped, P(), mesh=mesh, donate=True)
    assert all(x.is_deleted() for x in swapped)
    assert all(_same(y, value) for y, value in zip(gone, tree, strict=True))
    permuted = Mesh(mesh.devices[::-1], mesh.axis_names)
    turned = mylib.filter_shard(placed, P("data"), mesh=permuted)
    assert all(_same(y, value) for y, value in zip(turned, tree, strict=True))
    assert all(y.sharding.mesh == permuted for y in turned)
    explicit = jax.make_mesh((8,), ("d",))
    with jax.set_mesh(mesh):
        typed = mylib.filter_shard(placed, P("d"), mesh=explicit)
    with jax.set_mesh(explicit):
        back = mylib.filter_shard([typed[0], *placed[1:]], P("model"), mesh=mesh)
    assert all(_same(y, value) for y, value in zip(back, tree, strict=True))
    typed = mylib.filter_shard(placed, P("d"), mesh=explicit)
    assert all(
        y.sharding.mesh == explicit and _same(y, v) for y, v in zip(typed, tree, strict=True)
    )


@TWO_OF_THEM
def test_a_replicated_array_comes_back_to_one_device(mesh):
    x = mylib.filter_shard(np.arange(8.0, dtype=np.float32), P(), mesh=mesh)
    y = mylib.filter_shard(x, jax.local_devices()[1])
    assert y.devices() == {jax.local_devices()[1]}
    np.testing.assert_array_equal(y, np.arange(8.0))


def test_shards_of_all_processes_to_one_device(mesh):
    """Those that have shards send them; in the other processes the result is a handle."""
    x = mylib.filter_shard({"w": np.arange(8.0, dtype=np.float32)}, P("data"), mesh=mesh)
    y = mylib.filter_shard(x, jax.devices()[0])["w"]
    assert y.devices() == {jax.devices()[0]} and y.shape == (8,)
    assert mylib.mpmd.is_remote(y) == (jax.process_index() != 0)
    if jax.process_index() == 0:
        np.testing.assert_array_equal(y, np.arange(8.0))


@TWO_OF_THEM
def test_grad(mesh):
    x = mylib.filter_shard(np.arange(8.0, dtype=np.float32), P("data"), mesh=mesh)
    g = jax.grad(lambda x: jnp.sum(mylib.filter_shard(x, P("model"), mesh=mesh) ** 2))(x)
    assert g.sharding.is_equivalent_to(x.sharding, 1) and _same(g, 2 * np.arange(8.0))


# --- processes that don't mean the same ----------------------------------------------------------

ODD = [
    pytest.param({"w": np.zeros((8, 3), np.float32)}, P(), "float32[8, 3]", id="shape"),
    pytest.param({"w": np.zeros((8, 2), np.int32)}, P(), "int32[8, 2]", id="dtype"),
    pytest.param({"w": np.zeros((8, 2), np.float32)}, P("model"), "'model')", id="spec"),
    pytest.param({"v": np.zeros((8, 2), np.float32)}, P(), "nothing of that name", id="structure"),
    pytest.param({"w": np.full((8, 2), -0.0, np.float32)}, P(), "checksum", id="sign of zero"),
    pytest.param({"w": np.eye(8, 2, dtype=np.float32)}, P(), "checksum", id="numbers"),
    pytest.param({"w": jnp.zeros((8, 3))}, P(), "float32[8, 3]", id="on devices"),
]


@pytest.mark.parametrize("odd, spec, told", ODD)
@pytest.mark.parametrize("verb", [mylib.filter_shard, mylib.filter_device_put])
def test_an_odd_process_is_named_by_all(mesh, processes, verb, odd, spec, told):
    usual = {"w": np.zeros((8, 2), np.float32)}
    last = jax.process_index() == processes - 1
    tree, spec = (odd, spec) if last else (usual, P())
    same = {"a": np.ones(4, np.float32), "nan": np.full(4, np.nan, np.float32)}
    text = fails(mylib.PlacementError, verb, {**same, **tree}, spec, mesh=mesh)
    others = "process 0: " if processes == 2 else "processes 0, 1, 2: "
    assert "['w']" in text and told in text
    assert others in text and f"process {processes - 1}: " in text
    assert "check=False" in text
    # The other leaves are none of those that differ, unless they are placed otherwise.
    assert ("['nan']" in text) == (told == "'model')")
    # Nothing is left behind that would confuse the next call.
    assert_placed(verb(usual, P(), mesh=mesh), P(), mesh=mesh)


@TWO_OF_THEM
def test_one_exchange_for_a_whole_tree(mesh, monkeypatch):
    # The room's face has a function of this name.
    meeting = importlib.import_module("mylib._moving.processes.meeting")
    calls = []
    exchange = meeting.exchange
    monkeypatch.setattr(meeting, "exchange", lambda *a, **k: calls.append(1) or exchange(*a, **k))
    tree = [np.full(8, i, np.float32) for i in range(100)]
    mylib.filter_shard(tree, P("data"), mesh=mesh)
    assert len(calls) == 1
    placed = mylib.filter_shard(tree, P(), mesh=mesh, check=False)
    assert len(calls) == 1
    # What is there already, and what only changes its sharding, needs none.
    mylib.filter_shard(placed, P(), mesh=mesh)
    mylib.filter_shard(placed, P("model"), mesh=mesh)
    mylib.filter_shard(tree, jax.local_devices()[0])
    assert len(calls) == 1


def test_numbers_that_no_other_process_puts_may_differ_without_the_check(mesh, processes):
    # The rows of a process are its own; those of the others are never looked at.
    mine = np.zeros((8, 2), np.float32)
    rows = slice(8 // processes * jax.process_index(), 8 // processes * (jax.process_index() + 1))
    mine[rows] = jax.process_index() + 1
    y = mylib.filter_shard({"x": mine}, P("data"), mesh=mesh, check=False)["x"]
    assert float(jnp.sum(y)) == 16 / processes * sum(range(1, processes + 1))
    # With the rows over the axis that lies across processes, some have rows in common.
    across = Mesh(mesh.devices.reshape(2, 4).T, mesh.axis_names)
    text = fails(mylib.PlacementError, mylib.filter_shard, {"x": mine}, P("data"), mesh=across)
    assert "['x']" in text and "checksum" in text


def test_without_the_check_nobody_asks_anybody(mesh, multihost_tmp_path):
    if jax.process_index() == 1:
        # Another process has placed its part, which therefore was no collective.
        deadline = time.monotonic() + 200
        while not (multihost_tmp_path / "placed").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
    tree = {"w": np.full(8, jax.process_index(), np.float32)}
    jax.block_until_ready(mylib.filter_shard(tree, P(), mesh=mesh, check=False))
    if jax.process_index() == 0:
        (multihost_tmp_path / "placed").touch()


@pytest.mark.parametrize("verb", [mylib.filter_shard, mylib.filter_device_put])
def test_a_request_that_one_process_can_not_serve_is_told_to_all(mesh, processes, verb):
    """The last batch of one loader, say, which is shorter than the others'."""
    last = jax.process_index() == processes - 1
    tree = {"x": np.ones(7 if last else 8, np.float32), "y": np.ones(8, np.float32)}
    text = fails(mylib.PlacementError, verb, tree, P("data"), mesh=mesh)
    assert "['x'] (7,)" in text and "does not divide" in text and "['y']" not in text
    spec = P("modle" if last else "model")
    with jax.set_mesh(mesh):
        text = fails(mylib.PlacementError, verb, {"y": tree["y"]}, spec)
    assert "did you mean 'model'" in text
    scalar = {"s": np.float32(1)}
    text = fails(mylib.PlacementError, verb, scalar, P("data") if last else P(), mesh=mesh)
    assert "['s'] ()" in text
    text = fails(mylib.PlacementError, verb, {"y": tree["y"]}, P("modle"), mesh=mesh)
    assert text.count("did you mean 'model'") == 1
    assert_placed(verb({"y": tree["y"]}, P(), mesh=mesh), P(), mesh=mesh)


@TWO_OF_THEM
def test_a_request_that_one_process_alone_makes(mesh, monkeypatch):
    placed = mylib.filter_shard(np.ones(8), P("model"), mesh=mesh)
    monkeypatch.setenv("MYLIB_EXCHANGE_TIMEOUT", "1")
    if jax.process_index() != 1:
        # The others have nothing to place.
        assert mylib.filter_shard(placed, P("model"), mesh=mesh) is placed
    else:
        with pytest.raises(mylib.PlacementError, match="did you mean 'model'") as caught:
            mylib.filter_shard(np.ones(8), P("modle"), mesh=mesh)
        (note,) = caught.value.__notes__
        assert note.startswith("(raised in this process alone: process")
        assert "did not come within 1 s" in note
    barrier()
    monkeypatch.delenv("MYLIB_EXCHANGE_TIMEOUT")
    # The meeting to which nobody came is forgotten.
    assert_placed(mylib.filter_shard(np.ones(8), P("model"), mesh=mesh), P("model"), mesh=mesh)


# --- copies --------------------------------------------------------------------------------------


def test_copies_are_compared(mesh, processes):
    own = mylib.filter_shard(
        np.full(4, jax.process_index()), P(), mesh=Mesh(np.array(jax.local_devices()), ("d",))
    )
    tree = {
        "same": [mylib.filter_shard(np.full(4, i), P(), mesh=mesh) for i in range(20)],
        "nan": mylib.filter_shard(np.full(4, np.nan), P(), mesh=mesh),
        "sharded": mylib.filter_shard(np.arange(8), P("data"), mesh=mesh),
        "own": own,
    }
    mylib.check_replicas(tree)
    tree["differs"] = _differing(mesh)
    text = fails(mylib.errors.ReplicaError, mylib.check_replicas, tree)
    assert "['differs'] (4, 2)" in text and "['same']" not in text and "['own']" not in text
    for index in range(processes):
        ids = ", ".join(str(device.id) for device in _own_devices(index))
        assert f"process {index} on devices {ids}" in text


def test_one_process_has_other_copies(mesh, processes):
    mine = np.full((4, 2), jax.process_index() == processes - 1, np.float32)
    odd = jax.make_array_from_process_local_data(NamedSharding(mesh, P()), mine, (4, 2))
    text = fails(mylib.errors.ReplicaError, mylib.check_replicas, [odd])
    if processes == 4:
        assert "processes 0, 1, 2 on all their devices that hold it; process 3 on devices" in text


def test_copies_that_others_have_are_told_of(mesh, processes):
    # The second array is on processes 0 and 1, and theirs is the difference.
    some = Mesh(np.array(_own_devices(0)[:1] + _own_devices(1)[:1]), ("d",))
    mine = np.full(4, jax.process_index(), np.float32)
    differs = mylib.filter_shard(mine, P(), mesh=some, check=False)
    fine = mylib.filter_shard(np.ones(4, np.float32), P(), mesh=mesh)
    text = fails(
        mylib.errors.ReplicaError, mylib.check_replicas, {"fine": fine, "differs": differs}
    )
    assert "['differs'] (4,)" in text and "['fine']" not in text


def test_copies_that_a_process_has_none_of():
    one = Mesh(np.array(_own_devices(0)), ("d",))
    mylib.check_replicas(mylib.filter_shard(np.ones(4), P(), mesh=one))


@pytest.mark.parametrize("verb", [mylib.filter_shard, mylib.filter_device_put])
def test_arrays_on_devices_are_compared(mesh, verb):
    tree = {"w": jnp.full(8, float(jax.process_index())), "v": jnp.zeros(8)}
    for check in None, True:
        text = fails(mylib.PlacementError, verb, tree, P(), mesh=mesh, check=check)
        assert "['w']\n" in text and "['v']" not in text and "with the sum 8 and" in text
    placed = verb(tree, P(), mesh=mesh, check=False)
    text = fails(mylib.errors.ReplicaError, verb, placed, P(), mesh=mesh, check=True)
    assert "['w'] (8,)" in text and "['v']" not in text
    verb({"v": tree["v"]}, P(), mesh=mesh, check=True)

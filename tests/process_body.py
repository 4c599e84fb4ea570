"""What each process of test_processes.py does: python process_body.py INDEX PORT FOLDER."""

import os
import sys
import time
from pathlib import Path

INDEX, PORT, FOLDER = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
os.environ["JAX_NUM_CPU_DEVICES"] = "4"
os.environ["NPROC"] = "32"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P  # noqa: E402

import mylib  # noqa: E402

jax.distributed.initialize(
    f"127.0.0.1:{PORT}",
    num_processes=2,
    process_id=INDEX,
    coordinator_bind_address=f"127.0.0.1:{PORT}",
    cluster_detection_method="deactivate",
    initialization_timeout=60,
)
MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def told_by_the_other(name: str) -> None:
    """Waits until the other process has said something, without any collective."""
    deadline = time.monotonic() + 60
    while not (FOLDER / name).exists():
        assert time.monotonic() < deadline, f"nobody said {name!r}"
        time.sleep(0.02)


def same(y: jax.Array, value: np.ndarray) -> bool:
    """Whether each shard here is its part of `value`."""
    return all(
        np.array_equal(np.asarray(shard.data), value[shard.index], equal_nan=True)
        for shard in y.addressable_shards
    )


def test_host_values_onto_a_global_mesh_without_asking_the_other() -> None:
    tree = {f"leaf{i}": np.full((8, i + 1), i, np.float32) for i in range(50)}
    tree["nan"] = np.full(8, np.nan, np.float32)
    tree["local"] = jax.device_put(jnp.arange(16.0), jax.local_devices()[1])
    tree["uncommitted"] = jnp.arange(8.0)
    tree["keys"] = jax.random.split(jax.random.key(0), 8)
    tree["static"] = "static"
    if INDEX == 1:
        told_by_the_other("placed")
    placed = mylib.filter_shard(tree, P("data"), mesh=MESH)
    replicated = mylib.filter_shard(tree, P(), mesh=MESH)
    arrays = [x for x in jax.tree.leaves((placed, replicated)) if isinstance(x, jax.Array)]
    jax.block_until_ready(arrays)
    if INDEX == 0:
        # Reached while the other process has not begun: nothing here is a collective.
        (FOLDER / "placed").touch()
    assert all(not x.is_fully_addressable for x in arrays)
    assert placed["leaf7"].sharding == NamedSharding(MESH, P("data"))
    for name, value in tree.items():
        if name == "static":
            assert placed[name] is value
        elif name == "keys":
            data = jax.random.key_data(placed[name])
            assert same(data, np.asarray(jax.random.key_data(value)))
        else:
            assert same(placed[name], np.asarray(value)), name
            assert same(replicated[name], np.asarray(value)), name
    assert float(jax.jit(jnp.sum)(placed["leaf3"])) == 8 * 4 * 3


def test_global_arrays_are_resharded_by_one_program() -> None:
    tree = [np.arange(64.0, dtype=np.float32).reshape(8, 8) + i for i in range(5)]
    placed = mylib.filter_shard(tree, P("data", "model"), mesh=MESH)
    assert mylib.filter_shard(placed, P("data", "model"), mesh=MESH)[0] is placed[0]
    swapped = mylib.filter_shard(placed, P("model", "data"), mesh=MESH)
    for y, value in zip(swapped, tree, strict=True):
        assert y.sharding.spec == P("model", "data") and same(y, value)
    gone = mylib.filter_device_put(swapped, P(), mesh=MESH, donate=True)
    assert all(x.is_deleted() for x in swapped)
    assert all(same(y, value) for y, value in zip(gone, tree, strict=True))
    permuted = Mesh(MESH.devices[::-1], MESH.axis_names)
    turned = mylib.filter_shard(placed, P("data"), mesh=permuted)
    assert all(same(y, value) for y, value in zip(turned, tree, strict=True))
    assert all(y.sharding.mesh == permuted for y in turned)
    explicit = jax.make_mesh((8,), ("d",))
    with jax.set_mesh(MESH):
        typed = mylib.filter_shard(placed, P("d"), mesh=explicit)
    with jax.set_mesh(explicit):
        back = mylib.filter_shard([typed[0], *placed[1:]], P("model"), mesh=MESH)
    assert all(same(y, value) for y, value in zip(back, tree, strict=True))
    typed = mylib.filter_shard(placed, P("d"), mesh=explicit)
    assert all(y.sharding.mesh == explicit and same(y, v) for y, v in zip(typed, tree, strict=True))


def test_a_replicated_array_comes_back_to_one_device() -> None:
    x = mylib.filter_shard(np.arange(8.0, dtype=np.float32), P(), mesh=MESH)
    y = mylib.filter_shard(x, jax.local_devices()[2])
    assert y.devices() == {jax.local_devices()[2]}
    np.testing.assert_array_equal(y, np.arange(8.0))


def test_shards_elsewhere_are_an_error_with_the_same_words() -> None:
    x = mylib.filter_shard({"w": np.arange(8.0, dtype=np.float32)}, P("data"), mesh=MESH)
    try:
        mylib.filter_shard(x, jax.devices()[0])
    except mylib.PlacementError as error:
        text = str(error)
    assert "['w'] (8,)" in text and "its shards are on other processes" in text
    (FOLDER / f"words{INDEX}").write_text(text)


def test_grad_across_processes() -> None:
    x = mylib.filter_shard(np.arange(8.0, dtype=np.float32), P("data"), mesh=MESH)
    g = jax.grad(lambda x: jnp.sum(mylib.filter_shard(x, P("model"), mesh=MESH) ** 2))(x)
    assert g.sharding.is_equivalent_to(x.sharding, 1) and same(g, 2 * np.arange(8.0))


def test_copies_are_compared_across_processes() -> None:
    def made(value: float) -> jax.Array:
        """Replicated, it says: each process believes itself."""
        local = np.full((4, 2), value, np.float32)
        return jax.make_array_from_process_local_data(NamedSharding(MESH, P()), local, (4, 2))

    mine = MESH.devices.reshape(2, 4)[INDEX]
    own = mylib.filter_shard(np.full(4, INDEX), P(), mesh=Mesh(mine, ("d",)))
    tree = {
        "same": [made(i) for i in range(20)],
        "nan": made(np.nan),
        "sharded": mylib.filter_shard(np.arange(8), P("data"), mesh=MESH),
        "own": own,
    }
    mylib.check_replicas(tree)
    tree["differs"] = made(INDEX)
    try:
        mylib.check_replicas(tree)
    except mylib.ReplicaError as error:
        (fault,) = error.faults
        (FOLDER / f"differs{INDEX}").write_text(str(error))
    assert fault.path == "['differs']"
    told = "process 0 on devices 0, 1, 2, 3; process 1 on devices 2048, 2049, 2050, 2051"
    assert told in fault.reason, fault.reason


def test_copies_that_the_other_process_has_none_of() -> None:
    mesh = Mesh(MESH.devices.reshape(2, 4)[0], ("d",))
    mylib.check_replicas(mylib.filter_shard(np.ones(4), P(), mesh=mesh))


for name, test in list(globals().items()):
    if name.startswith("test_"):
        test()
        print("passed", name, flush=True)
jax.distributed.shutdown()

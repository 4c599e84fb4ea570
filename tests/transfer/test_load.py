"""`filter_load`: each part is read once, and nothing else."""

import functools
import sys
import threading
import time
from collections import Counter

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreeing import fails
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

import mylib
from mylib.rules import fsdp, replicated

KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def mesh():
    return mylib.make_mesh(data=4, model=2)


class Files:
    """Arrays by the names of leaves; counts what is read of them."""

    def __init__(self, tree):
        found = jax.tree_util.tree_leaves_with_path(eqx.filter(tree, eqx.is_array))
        self.arrays = {jax.tree_util.keystr(path): self.numbers(x) for path, x in found}
        self.read_parts = Counter()
        self.nbytes = 0
        self.lock = threading.Lock()

    @staticmethod
    def numbers(x):
        keys = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if keys else x)

    def __call__(self, leaf, index):
        part = self.arrays[leaf.name][index]
        with self.lock:
            self.read_parts[leaf.name, str(index)] += 1
            self.nbytes += part.nbytes
        return part


def assert_same(loaded, expected):
    for x, y in zip(
        *(jax.tree.leaves(eqx.filter(t, eqx.is_array)) for t in (loaded, expected)), strict=True
    ):
        assert x.dtype == y.dtype and x.shape == y.shape and x.committed
        np.testing.assert_array_equal(Files.numbers(x), Files.numbers(y))


def test_a_model(mesh):
    model = eqx.nn.MLP(16, 16, 64, 2, key=KEY)
    files, shapes = Files(model), eqx.filter_eval_shape(lambda: model)
    rule = fsdp("data", min_size=128)
    loaded = mylib.filter_load(shapes, rule, files, mesh=mesh)
    assert_same(loaded, model)
    assert loaded.activation is model.activation
    targets = mylib.resolve(shapes, rule, mesh=mesh)
    for x, target in zip(
        jax.tree.leaves(eqx.filter(loaded, eqx.is_array)), jax.tree.leaves(targets), strict=True
    ):
        assert x.sharding == target
    # Every number once, though two devices have each part, and all have what is replicated.
    assert files.nbytes == sum(x.nbytes for x in files.arrays.values())
    assert set(files.read_parts.values()) == {1} and len(files.read_parts) == 3 * 4 + 3


def test_leaves_of_all_kinds(mesh):
    tree = {
        "keys": jax.random.split(KEY, 8),
        "key": KEY,
        "rbg": jax.random.split(jax.random.key(1, impl="rbg"), 4),
        "scalar": jnp.float32(3),
        "half": jnp.arange(16, dtype=jnp.bfloat16),
        "flags": np.arange(8) > 3,
        "none": jnp.zeros((0, 4)),
        "no columns": jnp.zeros((8, 0)),
        "name": "adam",
        "number": 3,
    }
    specs = {name: P("data") for name in tree} | {"key": P(), "scalar": P()}
    files, shapes = Files(tree), eqx.filter_eval_shape(lambda: tree)
    loaded = mylib.filter_load(shapes, specs, files, mesh=mesh)
    assert_same(loaded, tree)
    assert (loaded["name"], loaded["number"]) == ("adam", 3)
    assert loaded["keys"].sharding.spec == P("data")
    assert not any("no" in name for name, _ in files.read_parts)
    assert files.read_parts["['scalar']", "()"] == 1
    again = mylib.filter_load(shapes, specs, lambda leaf, i: tree[leaf.parts[0]][i], mesh=mesh)
    assert_same(again, tree)


@pytest.mark.parametrize("explicit", [(), ("data", "model")])
def test_any_sharding(explicit):
    mesh = mylib.make_mesh(data=4, model=2, explicit=explicit)
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    for spec, parts in [(P("data", "model"), 8), (P(("model", "data")), 8), (P(None, "model"), 2)]:
        files = Files(x)
        loaded = mylib.filter_load(
            jax.ShapeDtypeStruct((8, 8), jnp.float32), spec, files, mesh=mesh
        )
        assert loaded.sharding == NamedSharding(mesh, spec) and len(files.read_parts) == parts
        np.testing.assert_array_equal(loaded, x)
    device = jax.devices()[3]
    assert mylib.filter_load(x, device, Files(x)).sharding == SingleDeviceSharding(device)
    host = NamedSharding(mesh, P("data"), memory_kind="pinned_host")
    assert mylib.filter_load(x, host, Files(x)).sharding == host


def test_wide_numbers_are_those_of_jax(mesh):
    x = np.arange(8)
    assert mylib.filter_load(x, P("data"), lambda _, index: x[index], mesh=mesh).dtype == jnp.int32
    with jax.enable_x64(True):
        loaded = mylib.filter_load(x, P("data"), lambda _, index: x[index], mesh=mesh)
    assert loaded.dtype == jnp.int64


def test_none_leaves_alone(mesh):
    shapes = {"a": jax.ShapeDtypeStruct((8,), jnp.float32), "b": jnp.ones(3)}
    loaded = mylib.filter_load(
        shapes, {"a": P("data"), "b": None}, lambda _, i: np.ones(8, np.float32)[i], mesh=mesh
    )
    assert loaded["b"] is shapes["b"] and isinstance(loaded["a"], jax.Array)


def test_from_memory_maps_nothing_is_shared(mesh, tmp_path):
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    x.tofile(tmp_path / "x")
    file = np.memmap(tmp_path / "x", np.float32, "r+", shape=(8, 8))
    ours = np.array(x)
    for source in (file, ours):
        read = functools.partial(lambda source, _, index: source[index], source)
        loaded = mylib.filter_load(source, P("data"), read, mesh=mesh)
        whole = mylib.filter_load(source, P(), read, mesh=mesh)
        source[...] = 0
        np.testing.assert_array_equal(loaded, x)
        np.testing.assert_array_equal(whole, x)


def test_several_at_a_time_but_two_large_ones(mesh):
    most = Counter()
    now, lock, gate = Counter(), threading.Lock(), threading.Barrier(2, timeout=20)

    def read(leaf, index):
        with lock:
            now[leaf.name] += 1
            most[leaf.name] = max(most[leaf.name], now[leaf.name])
        gate.wait()  # Two at least are here at once.
        with lock:
            now[leaf.name] -= 1
        return np.zeros([s.stop - s.start for s in index], np.float32)

    mylib.filter_load(np.zeros((64, 64), np.float32), P(("data", "model")), read, mesh=mesh)
    assert most == {"": 2}


class TestFaults:
    def test_all_at_once_before_anything_is_read(self, mesh):
        tree = {"a": np.zeros(6), "b": np.zeros(()), "c": np.zeros(8)}

        def read(leaf, index):
            raise AssertionError("read")

        with pytest.raises(mylib.PlacementError) as caught:
            mylib.filter_load(tree, P("data"), read, mesh=mesh)
        assert [fault.path for fault in caught.value.faults] == ["['a']", "['b']"]
        abstract = AbstractMesh((4,), ("data",))
        with pytest.raises(mylib.PlacementError, match="an abstract mesh has no devices"):
            mylib.filter_load(tree["c"], P("data"), read, mesh=abstract)
        layout = Format(Layout((0,)), NamedSharding(mesh, P("data")))
        with pytest.raises(mylib.PlacementError, match="load first, then filter_device_put"):
            mylib.filter_load(tree["c"], layout, read)

    def test_a_reader_that_raises_names_the_leaf(self, mesh):
        def read(leaf, index):
            raise OSError("disk")

        with pytest.raises(OSError, match="disk") as caught:
            mylib.filter_load({"w": np.zeros((8, 3))}, P("data"), read, mesh=mesh)
        (note,) = caught.value.__notes__
        assert "read for ['w'][" in note and ", 0:3])" in note

    @pytest.mark.parametrize(
        ("part", "text"),
        [(np.zeros(8, np.float32), "float32[8]"), (np.zeros(2, np.float16), "float16[2]")],
    )
    def test_another_part(self, mesh, part, text):
        with pytest.raises(mylib.PlacementError) as caught:
            x = np.zeros(8, np.float32)
            mylib.filter_load({"w": x}, P("data"), lambda leaf, index: part, mesh=mesh)
        assert f"it returned {text}, and the part is float32[2]" in str(caught.value)
        assert "['w'] (8,)" in str(caught.value)

    def test_in_a_compiled_function(self, mesh):
        with pytest.raises(TypeError, match="it can't be part of a compiled function"):
            jax.jit(lambda: mylib.filter_load(np.zeros(8), P(), lambda leaf, i: 0, mesh=mesh))()

    def test_no_reader(self, mesh):
        with pytest.raises(TypeError, match="read is a function"):
            mylib.filter_load(np.zeros(8), P(), {"w": 1}, mesh=mesh)


class TestProgress:
    def test_a_line_on_a_terminal(self, mesh, capsys, monkeypatch):
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        monkeypatch.setattr(mylib._core.status, "_AFTER", 0.01)

        def slow(leaf, index):
            time.sleep(0.02 if index[0].start else 0.5)
            return np.zeros(2**18, np.float32)[index]

        mylib.filter_load(np.zeros(2**18, np.float32), P("data"), slow, mesh=mesh)
        states = capsys.readouterr().err.split("\r")
        assert any(x.startswith("loading 1 array: ") and " of 1 MiB, " in x for x in states)

    def test_else_nothing(self, mesh, capsys):
        mylib.filter_load(np.zeros(8), replicated(), Files(np.zeros(8)), mesh=mesh)
        assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "processes",
    [
        pytest.param(2, marks=pytest.mark.multihost(processes=2, devices_per_process=4)),
        pytest.param(
            4, marks=[pytest.mark.multihost(processes=4, devices_per_process=2), pytest.mark.slow]
        ),
    ],
)
class TestProcesses:
    def test_each_reads_its_share(self, processes):
        mesh = mylib.make_mesh(data=4, model=2)
        x = np.arange(128, dtype=np.float32).reshape(16, 8)
        tree = {"rows": x, "columns": x, "whole": x, "keys": jax.random.split(KEY, 8)}
        specs = {"rows": P("data"), "columns": P(None, "model"), "whole": P(), "keys": P("data")}
        files = Files(tree)
        loaded = mylib.filter_load(eqx.filter_eval_shape(lambda: tree), specs, files, mesh=mesh)
        for name, y in loaded.items():
            for shard in y.addressable_shards:
                given = Files.numbers(shard.data)
                np.testing.assert_array_equal(given, files.arrays[f"['{name}']"][shard.index])
        assert set(files.read_parts.values()) == {1}
        nbytes = x.nbytes // processes + 2 * x.nbytes + 8 * 8 // processes
        assert mylib.testing.gather(files.nbytes) == [nbytes] * processes

    def test_trees_that_differ(self, processes):
        mesh = mylib.make_mesh(data=4, model=2)
        rows = 8 * (1 + jax.process_index())
        x = np.zeros(rows)
        fails(mylib.PlacementError, mylib.filter_load, x, P("data"), Files(x), mesh=mesh)

    def test_one_that_can_not_read(self, processes):
        mesh = mylib.make_mesh(data=4, model=2)
        x = np.zeros(8, np.float32)

        def read(leaf, index):
            if jax.process_index() == 1:
                raise OSError("disk")
            return x[index]

        if jax.process_index() == 1:
            with pytest.raises(OSError, match="disk"):
                mylib.filter_load(x, P("data"), read, mesh=mesh)
        else:
            mylib.filter_load(x, P("data"), read, mesh=mesh)
            with pytest.raises(TimeoutError, match=r"process 1 was interrupted \(OSError: disk"):
                mylib.filter_shard(x, P("data"), mesh=mesh)
        mylib.testing.barrier()
        mylib.filter_shard(x, P("data"), mesh=mesh)

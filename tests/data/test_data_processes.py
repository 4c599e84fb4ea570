"""Batches of several real processes: their shares, what goes wrong, and loaders kept in step."""

import os
import signal
import threading
import time

import equinox as eqx
import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreeing import TWO_AND_FOUR, TWO_OF_THEM, all_equal, fails
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import mylib
from mylib._core.compat import coordination_client
from mylib.data import prefetch, reader_shard, to_global
from mylib.testing import assert_placed, barrier, gather

ROWS = 16


@pytest.fixture(params=TWO_AND_FOUR, autouse=True)
def processes(request) -> int:
    return request.param


def _mesh(kind: str, axis_type: AxisType = AxisType.Auto) -> Mesh:
    """Eight devices, over whose processes the axes run in different ways."""
    devices = np.array(jax.devices())
    types = (axis_type,) * 2
    match kind:
        case "data across":
            return Mesh(devices.reshape(4, 2), ("data", "model"), axis_types=types)
        case "model across":
            return Mesh(devices.reshape(2, 4).T, ("data", "model"), axis_types=types)
        case "both across":
            grid = devices.reshape(2, 2, 2).transpose(0, 2, 1).reshape(4, 2)
            return Mesh(grid.T.reshape(2, 4), ("data", "model"), axis_types=types)
        case "interleaved":
            return Mesh(devices.reshape(-1, 2).T.reshape(4, 2), ("data", "model"), axis_types=types)
        case "backwards":
            return Mesh(devices[::-1].reshape(8, 1), ("data", "model"), axis_types=types)
        case _:
            order = np.random.default_rng(3).permutation(8)
            return Mesh(devices[order].reshape(4, 2), ("data", "model"), axis_types=types)


MESHES = [
    "data across",
    "model across",
    "both across",
    "interleaved",
    "backwards",
    "shuffled",
]


def _whole() -> dict:
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(ROWS, 8)).astype(np.float32),
        "y": rng.integers(0, 9, ROWS),
        "half": rng.normal(size=(ROWS, 2)).astype(jnp.bfloat16),
        "keys": jax.random.split(jax.random.key(0), ROWS),
        "none": np.zeros((ROWS, 0), np.float32),
        "table": rng.normal(size=(4, 4)).astype(np.float32),
        "scale": np.float32(0.5),
        "name": "train",
    }


def _placement() -> dict:
    rows, whole = P("data"), P()
    return {
        **dict.fromkeys(["y", "half", "keys", "none"], rows),
        "x": P("data", "model"),
        "table": P(None, "model"),
        "scale": whole,
        "name": whole,
    }


def _share(whole: dict, shard: mylib.data.ReaderShard) -> dict:
    """What a process reads of a batch."""
    rows = np.r_[shard.rows(ROWS)]
    given_whole = ("table", "scale", "name")
    return {name: x if name in given_whole else x[rows] for name, x in whole.items()}


def _assert_is(y: jax.Array, value) -> None:
    """Each shard that is here is its part of `value`, which is the same everywhere."""
    if jnp.issubdtype(y.dtype, jax.dtypes.prng_key):
        y, value = jax.random.key_data(y), jax.random.key_data(value)
    value = np.asarray(value)
    assert y.shape == value.shape
    assert len(y.addressable_shards) == jax.local_device_count()
    for shard in y.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), value[shard.index])


def _threads() -> list:
    return [t for t in threading.enumerate() if t.name == "mylib.data.prefetch"]


# --- shares ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.everyday(
    *("2x4-data across", "2x4-model across", "2x4-both across", "2x4-shuffled"),
    *("4x2-model across", "4x2-interleaved", "4x2-backwards", "4x2-shuffled"),
    rest="thorough",
)
def test_the_shares_are_the_whole(kind):
    mesh = _mesh(kind)
    whole, placement = _whole(), _placement()
    shard = reader_shard(placement, mesh=mesh)
    batch = to_global(_share(whole, shard), placement, mesh=mesh)
    assert batch.pop("name") == "train"
    for name, y in batch.items():
        _assert_is(y, whole[name])
    assert_placed(batch, {k: v for k, v in placement.items() if k != "name"}, mesh=mesh)
    # Every row is read; nobody reads more than the share of a reader.
    told = gather([shard.index, shard.count, [[r.start, r.stop] for r in shard.rows(ROWS)]])
    rows = {
        index: [i for start, stop in ranges for i in range(start, stop)]
        for index, _, ranges in told
    }
    assert sorted(i for each in rows.values() for i in each) == list(range(ROWS))
    assert sorted(rows) == list(range(shard.count))
    assert all(each == sorted(each) and len(each) == ROWS // shard.count for each in rows.values())


def test_readers(processes):
    def readers(kind, spec):
        shard = reader_shard(spec, mesh=_mesh(kind))
        return gather([shard.index, shard.count])

    one_each = [[i, processes] for i in range(processes)]
    assert readers("data across", P("data")) == one_each
    assert readers("data across", P(("data", "model"))) == one_each
    assert readers("data across", P(None, "data")) == [[0, 1]] * processes
    assert readers("data across", P()) == [[0, 1]] * processes
    assert readers("backwards", P("data")) == one_each[::-1]
    # Half of the devices of each, or two processes for one half of the rows.
    expected = [[0, 1]] * 2 if processes == 2 else [[0, 2], [1, 2]] * 2
    assert readers("model across", P("data")) == expected


def test_uneven_and_partial_meshes():
    devices = jax.devices()
    each = jax.local_device_count()
    # One device of process 0, two of process 1: no equal shares.
    mesh = Mesh(np.array([devices[0], *devices[each : each + 2]]), ("data",))
    if jax.process_index() > 1:
        for fun in lambda: reader_shard(P("data"), mesh=mesh), lambda: prefetch([], P(), mesh=mesh):
            with pytest.raises(mylib.PlacementError, match="has none of its devices"):
                fun()
    else:
        shard = reader_shard(P("data"), mesh=mesh)
        assert (shard.index, shard.count) == (0, 1)
        y = to_global(np.arange(6.0), P("data"), mesh=mesh)
        for part in y.addressable_shards:
            np.testing.assert_array_equal(np.asarray(part.data), np.arange(6.0)[part.index])


@TWO_OF_THEM
def test_what_is_here_and_what_is_global_already():
    mesh = _mesh("data across")
    mine = Mesh(np.array(jax.local_devices()), ("here",))
    batch = {"local": np.arange(8.0), "device": np.ones(3), "own": jnp.arange(4.0)}
    placement = {
        "local": NamedSharding(mine, P("here")),
        "device": jax.local_devices()[0],
        "own": None,
    }
    out = to_global(batch, placement, mesh=mesh)
    assert out["local"].sharding.mesh == mine and out["own"] is batch["own"]
    assert out["device"].devices() == {jax.local_devices()[0]}
    there = mylib.filter_shard(np.arange(8.0), P("data"), mesh=mesh)
    assert to_global({"x": there}, P("data"), mesh=mesh)["x"] is there
    text = fails(mylib.PlacementError, to_global, {"x": there}, P("model"), mesh=mesh)
    assert "['x'] (8,)" in text
    assert "already an array on processes 0, 1" in text and "not a share of one process" in text


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.everyday("2x4-explicit", "4x2-auto", rest="thorough")
def test_a_step_on_what_came(axis_type):
    mesh = _mesh("data across", axis_type)
    shard = reader_shard(P("data"), mesh=mesh)
    x = np.arange(ROWS * 4, dtype=np.float32).reshape(ROWS, 4)
    with jax.set_mesh(mesh):
        batches = prefetch((x[np.r_[shard.rows(ROWS)]] * i for i in range(4)), P("data"))
        step = mylib.filter_jit(lambda b: jnp.sum(b**2), out_shardings=P())
        assert [float(step(b)) for b in batches] == [float(np.sum((x * i) ** 2)) for i in range(4)]


@TWO_OF_THEM
def test_placements_of_what_is_no_array():
    """What a process reads does not depend on what else is in the batch."""
    mesh = _mesh("data across")
    placement = {"x": P("data"), "y": P("model")}
    shard = reader_shard(placement, mesh=mesh)
    assert shard.count == 1
    x = np.arange(8.0, dtype=np.float32)
    for y in "text", x, 3:
        out = to_global({"x": x[np.r_[shard.rows(8)]], "y": y}, placement, mesh=mesh)
        _assert_is(out["x"], x)
    mine = NamedSharding(Mesh(np.array(jax.local_devices()), ("here",)), P("here"))
    assert reader_shard({"x": P("data"), "mine": mine}, mesh=mesh).count > 1
    assert (reader_shard(mine).index, reader_shard(mine).count) == (0, 1)


@TWO_OF_THEM
def test_arrays_of_devices_and_numbers(processes):
    mesh = _mesh("data across")
    mine = jax.process_index()
    batch = {"x": jnp.full((4, 2), mine), "lr": np.float32(0.5), "step": 3}
    placement = {"x": P("data"), "lr": P(), "step": None}
    out = to_global(batch, placement, mesh=mesh)
    _assert_is(out["x"], np.repeat(np.arange(processes), 4)[:, None] * np.ones((1, 2), int))
    assert out["step"] == 3 and out["lr"].shape == ()
    assert_placed(out["lr"], P(), mesh=mesh)
    batch["lr"] = np.float32(mine)
    text = fails(mylib.PlacementError, to_global, batch, placement, mesh=mesh, check=True)
    assert "['lr']" in text and "it differs between them" in text


# --- what goes wrong without it -------------------------------------------------------------------


def test_replicas_that_differ(processes):
    """Each process gives rows of its own where both hold the same ones."""
    mesh = _mesh("model across")
    count = reader_shard(P("data"), mesh=mesh).count
    mine = np.full((4, 2), jax.process_index(), np.float32)
    # JAX takes it, and computes with other numbers on each device.
    sharding = NamedSharding(mesh, P("data"))
    y = jax.make_array_from_process_local_data(sharding, mine, (4 * count, 2))
    assert len(set(gather(float(jnp.sum(y.addressable_data(0)))))) > 1
    text = fails(mylib.PlacementError, to_global, mine, P("data"), mesh=mesh)
    assert "the array" in text and "it differs between them" in text and "checksum" in text
    assert "reader_shard" in text
    # Later batches of the kind only if asked.
    same = np.ones((4, 2), np.float32)
    to_global(same, P("data"), mesh=mesh)
    to_global(mine, P("data"), mesh=mesh)
    fails(mylib.PlacementError, to_global, mine, P("data"), mesh=mesh, check=True)


@TWO_OF_THEM
def test_differing_shapes_and_missing_leaves():
    mesh = _mesh("data across")
    first = jax.process_index() == 0
    batch = {"x": np.ones((4 if first else 8, 2)), "y": np.ones(4)}
    text = fails(mylib.PlacementError, to_global, batch, P("data"), mesh=mesh)
    assert "['x']" in text and "float32[4, 2]" in text and "float32[8, 2]" in text
    batch = {"x": np.ones((4, 2)), **({} if first else {"extra": np.ones(4)})}
    text = fails(mylib.PlacementError, to_global, batch, P("data"), mesh=mesh)
    assert "['extra']" in text and "process 0: nothing of that name" in text
    batch = {"x": np.ones(4, np.float32 if first else np.int32)}
    assert "int32[4]" in fails(mylib.PlacementError, to_global, batch, P("data"), mesh=mesh)
    text = fails(
        mylib.PlacementError,
        to_global,
        np.ones(4),
        P("data"),
        mesh=mesh,
        tail="pad" if first else "drop",
    )
    assert "the option tail=" in text


@TWO_OF_THEM
def test_faults_that_one_process_finds():
    mesh = _mesh("data across")
    first = jax.process_index() == 0
    text = fails(
        mylib.PlacementError,
        to_global,
        {"x": np.ones((3 if first else 4, 2)), "s": np.float32(1)},
        {"x": P(("data", "model")), "s": P("data") if first else P()},
        mesh=mesh,
    )
    assert "['x'] (3, 2)" in text and "its 3 rows are not a multiple of" in text
    assert "tail='pad'" in text
    assert "['s'] ()" in text and "for an array of rank 0" in text


def test_tails(processes):
    mesh = _mesh("data across")
    shard = reader_shard(P("data"), mesh=mesh)
    mine = jax.process_index()
    # 5, 6, ... rows, where 2 (or 1) rows are a block.
    batch = {"x": np.full(5 + mine, mine + 1.0, np.float32), "t": np.ones(3, np.float32)}
    placement = {"x": P("data"), "t": P()}
    out, mask = to_global(batch, placement, mesh=mesh, tail="pad")
    blocks = len(shard.blocks)
    each = -(-(4 + processes) // blocks) * blocks
    assert out["x"].shape == mask.shape == (each * processes,) and out["t"].shape == (3,)
    assert int(mask.sum()) == sum(5 + i for i in range(processes))
    assert float(jnp.sum(out["x"])) == float(jnp.sum(out["x"] * mask))
    assert float(jnp.sum(out["x"])) == sum((5 + i) * (i + 1) for i in range(processes))
    assert_placed(mask, P("data"), mesh=mesh)
    out = to_global(batch, placement, mesh=mesh, tail="drop")
    assert out["x"].shape == (5 // blocks * blocks * processes,)
    text = fails(mylib.PlacementError, to_global, np.ones(0), P("data"), mesh=mesh, tail="drop")
    assert "all rows are dropped" in text


def test_sharers_with_other_rows():
    """Two processes that hold the same rows can't fill up differently."""
    mesh = _mesh("model across")
    rows = 4 + (jax.process_index() == 0)
    text = fails(mylib.PlacementError, to_global, np.ones(rows), P("data"), mesh=mesh, tail="pad")
    assert "the number of rows" in text and "5" in text


@TWO_OF_THEM
def test_rules():
    mesh = _mesh("data across")
    shard = reader_shard(P("data"), mesh=mesh)
    whole = {"x": np.arange(ROWS * 3.0).reshape(ROWS, 3), "s": np.float32(2)}
    batch = {"x": whole["x"][np.r_[shard.rows(ROWS)]], "s": whole["s"]}
    out = to_global(batch, mylib.rules.batch("data"), mesh=mesh)
    _assert_is(out["x"], whole["x"].astype(np.float32))

    def by_size(leaf):
        return P("data") if leaf.ndim and leaf.shape[0] == ROWS else P()

    def by_share(leaf):
        return P("data") if leaf.ndim and leaf.shape[0] < ROWS else P()

    # Of a share it says to give all, and all it would split.
    text = fails(mylib.PlacementError, to_global, batch, by_share, mesh=mesh)
    assert "for one process's share it returns" in text and "mylib.resolve" in text
    targets = mylib.resolve(whole, by_size, mesh=mesh)
    _assert_is(to_global(batch, targets, mesh=mesh)["x"], whole["x"].astype(np.float32))
    assert reader_shard(targets, mesh=mesh) == shard


# --- loaders --------------------------------------------------------------------------------------


def _source(count: int, rows: int = 4, delay: float = 0.0, buffer=None):
    """One buffer, filled again for each batch."""
    mine = np.zeros((rows, 2), np.float32) if buffer is None else buffer
    for i in range(count):
        time.sleep(delay)
        mine[:] = 10 * i + jax.process_index()
        yield {"x": mine, "i": i}


def test_in_step_and_in_order(processes):
    mesh = _mesh("data across")
    slow = 0.02 * (jax.process_index() == 1)
    with prefetch(_source(12, delay=slow), P("data"), mesh=mesh) as batches:
        for i, batch in enumerate(batches):
            assert batch["i"] == i
            _assert_is(
                batch["x"],
                np.repeat(10 * i + np.arange(processes), 4)[:, None] * np.ones((1, 2)),
            )
        assert i == 11
    assert not _threads()


@pytest.mark.parametrize("first_ends", [True, False])
@pytest.mark.everyday("2x4-True", "4x2-False", rest="thorough")
def test_a_source_that_ends_earlier(first_ends, processes):
    mesh = _mesh("data across")
    short = (jax.process_index() == 0) == first_ends
    batches = prefetch(_source(3 if short else 5), P("data"), mesh=mesh)
    for _ in range(3):
        next(batches)
    text = fails(RuntimeError, next, batches)
    ended = "process 0" if first_ends else "process" + "es" * (processes > 2) + " 1"
    assert f"the source of {ended}" in text and "has ended" in text and "tail='drop'" in text
    assert list(batches) == [] and not _threads()
    assert len(list(prefetch(_source(3 if short else 5), P("data"), mesh=mesh, tail="drop"))) == 3
    padded = list(prefetch(_source(3 if short else 5), P("data"), mesh=mesh, tail="pad"))
    shorts = 1 if first_ends else processes - 1
    assert [int(mask.sum()) for _, mask in padded] == [4 * processes] * 3 + [
        4 * (processes - shorts)
    ] * 2
    empty = prefetch([] if short else [np.ones(4)], P("data"), mesh=mesh, tail="pad")
    text = fails(RuntimeError, next, empty)
    assert "has ended" in text and "each process must have had one batch" in text
    assert list(prefetch([], P("data"), mesh=mesh)) == []


@TWO_OF_THEM
def test_a_ragged_last_batch_is_filled_up(processes):
    mesh = _mesh("data across")
    rows = [8, 8, 3 + jax.process_index()]
    source = [{"x": np.ones((n, 2), np.float32)} for n in rows]
    step = jax.jit(lambda b, mask: jnp.sum(b["x"] * mask[:, None]))
    batches = list(prefetch(source, P("data"), mesh=mesh, tail="pad"))
    assert {b["x"].shape for b, _ in batches} == {(8 * processes, 2)}
    last = sum(3 + i for i in range(processes))
    assert [float(step(*b)) for b in batches] == [16 * processes, 16 * processes, 2 * last]
    text = fails(mylib.PlacementError, list, prefetch(source, P("data"), mesh=mesh))
    assert "['x']" in text


@TWO_OF_THEM
def test_a_source_that_raises():
    mesh = _mesh("data across")

    def source():
        yield from _source(3)
        if jax.process_index() == 1:
            raise KeyError("lost")
        yield {"x": np.ones((4, 2), np.float32), "i": 3}

    batches = prefetch(source(), P("data"), mesh=mesh)
    assert [next(batches)["i"] for _ in range(3)] == [0, 1, 2]
    if jax.process_index() == 1:
        with pytest.raises(KeyError, match="lost"):
            next(batches)
    else:
        with pytest.raises(RuntimeError, match="process 1: KeyError: 'lost'"):
            next(batches)
    assert list(batches) == [] and not _threads()


@TWO_OF_THEM
def test_a_source_that_can_not_begin():
    """The others hear of it at once, and the next loops find each other."""
    mesh = _mesh("data across")

    class Source:
        fails = jax.process_index() == 1

        def __iter__(self):
            if self.fails:
                self.fails = False
                # As Python has the names of files that are no text.
                raise OSError("no such shard: \udcff")
            return _source(3)

    def count(source):
        return len(list(prefetch(source, P("data"), mesh=mesh)))

    source, begun = Source(), time.monotonic()
    kind = OSError if source.fails else RuntimeError
    told = "no such shard" if kind is OSError else "process 1: OSError: no such shard: \udcff"
    with pytest.raises(kind, match=told):
        count(source)
    # Not the five minutes for which an absent process is waited.
    assert time.monotonic() - begun < 200
    assert [count(source), count(source)] == [3, 3]


@TWO_OF_THEM
def test_a_loop_that_one_leaves():
    mesh = _mesh("data across")
    batches = prefetch(_source(100), P("data"), mesh=mesh)
    for _ in range(3):
        next(batches)
    if jax.process_index() == 1:
        batches.close()
        assert not _threads()
        barrier()
        return
    barrier()
    # What had been made before comes first.
    with pytest.raises(RuntimeError, match="process 1 has left its loop"):
        for _ in range(10):
            next(batches)
    assert not _threads()


@pytest.mark.slow
def test_a_loader_that_is_late_and_one_that_is_interrupted():
    """A late one is waited for. After an interrupt the others are told, and the next loop works."""
    mesh, me = _mesh("data across"), jax.process_index()

    def late():
        for i, batch in enumerate(_source(6)):
            if me == 1 and i == 2:
                time.sleep(1.5)
            yield batch

    assert [int(b["i"]) for b in prefetch(late(), P("data"), mesh=mesh)] == list(range(6))
    barrier()
    if me == 1:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    begun = time.monotonic()
    expected = KeyboardInterrupt if me == 1 else RuntimeError
    with pytest.raises(expected, match=None if me == 1 else "process 1 has left its loop"):
        for _ in prefetch(_source(10_000), P("data"), mesh=mesh):
            time.sleep(0.01)
    assert time.monotonic() - begun < 30
    assert len(list(prefetch(_source(3), P("data"), mesh=mesh))) == 3


@pytest.mark.everyday("2x4")
def test_a_process_that_does_not_come(monkeypatch):
    mesh = _mesh("data across")
    monkeypatch.setenv("MYLIB_EXCHANGE_TIMEOUT", "3")
    batches = prefetch(_source(3), P("data"), mesh=mesh)
    barrier()
    if jax.process_index() != 1:
        with pytest.raises(TimeoutError, match="process 1 did not come within 3 s"):
            next(batches)
    barrier()
    batches.close()


@TWO_OF_THEM
def test_a_loader_that_only_one_has(monkeypatch):
    """The next ones find each other again."""
    mesh = _mesh("data across")
    one = jax.process_index() == 1

    def loop(check=None):
        return prefetch(_source(3), P("data"), mesh=mesh, check=check)

    unused = loop() if one else None
    assert len(list(prefetch(_source(3), P("data"), mesh=mesh))) == 3
    if one:
        assert len(list(loop(check=False))) == 3
        monkeypatch.setenv("MYLIB_EXCHANGE_TIMEOUT", "1")
        with pytest.raises(TimeoutError, match="in the same order"):
            next(unused)
        unused.close()
    barrier()
    monkeypatch.delenv("MYLIB_EXCHANGE_TIMEOUT", raising=False)
    for _ in range(2):
        assert len(list(loop())) == 3


@pytest.mark.everyday("2x4")
def test_an_error_where_another_loop_was_given_up(monkeypatch):
    """It is told to those who are further on; even if it can't say what it is."""
    mesh = _mesh("data across")

    class Mute(Exception):
        def __str__(self):
            raise ValueError("no words")

    def source():
        raise Mute
        yield

    if jax.process_index() == 1:
        monkeypatch.setenv("MYLIB_EXCHANGE_TIMEOUT", "1")
        with prefetch(_source(3), P("data"), mesh=mesh) as unused, pytest.raises(TimeoutError):
            next(unused)
        monkeypatch.delenv("MYLIB_EXCHANGE_TIMEOUT")
    barrier()
    first = jax.process_index() == 0
    batches = prefetch(source() if first else _source(3), P("data"), mesh=mesh)
    begun = time.monotonic()
    with pytest.raises(Mute if first else RuntimeError) as caught:
        next(batches)
    assert first or "Mute" in str(caught.value) and "process 0: " in str(caught.value)
    # Not the five minutes for which an absent process is waited.
    assert time.monotonic() - begun < 200
    assert len(list(prefetch(_source(3), P("data"), mesh=mesh))) == 3


@pytest.mark.everyday("2x4")
def test_loops_that_are_not_the_same(monkeypatch):
    """One gives up its loop before the others have come to it, and begins another one."""
    mesh = _mesh("data across")
    monkeypatch.setenv("MYLIB_EXCHANGE_TIMEOUT", "2")
    train = prefetch(_source(3), P("data"), mesh=mesh)
    test = prefetch(_source(3), P("data"), mesh=mesh)
    if jax.process_index() == 1:
        with pytest.raises(TimeoutError):
            next(train)
        train.close()
    barrier()
    monkeypatch.delenv("MYLIB_EXCHANGE_TIMEOUT")
    text = fails(mylib.PlacementError, next, test if jax.process_index() == 1 else train)
    assert "the loop" in text and text.count("test_data_processes.py:") == 2
    assert "in the same order" in text
    for batches in train, test:
        batches.close()
    assert len(list(prefetch(_source(3), P("data"), mesh=mesh))) == 3


@TWO_OF_THEM
def test_what_has_no_rows_in_batches_that_are_filled_up():
    mesh = _mesh("data across")
    count = 2 if jax.process_index() == 1 else 4

    def loop(scale):
        source = ({"x": np.ones(4, np.float32), "scale": scale(i)} for i in range(count))
        placement = {"x": P("data"), "scale": P()}
        return prefetch(source, placement, mesh=mesh, tail="pad")

    assert len(list(loop(lambda i: np.float32(2)))) == 4
    # Who has ended can't know.
    changing = loop(np.float32)
    assert [float(next(changing)[0]["scale"]) for _ in range(2)] == [0, 1]
    text = fails(mylib.PlacementError, next, changing)
    assert "\n  ['scale']" in text and "it differs between them" in text

    def reused():
        scale = np.float32([2, 2])
        for _ in range(count):
            yield {"x": np.ones(4, np.float32), "scale": scale}
        scale[:] = 3

    placement = {"x": P("data"), "scale": P()}
    filled_up = prefetch(reused(), placement, mesh=mesh, tail="pad")
    assert [batch["scale"].tolist() for batch, _ in filled_up] == [[2, 2]] * 4


@TWO_OF_THEM
def test_a_source_that_begins_again():
    """After its end it is not asked any more, as long as the others go on."""
    mesh = _mesh("data across")

    class Source:
        def __init__(self):
            self.at, self.count = 0, 2 if jax.process_index() == 1 else 4

        def __iter__(self):
            return self

        def __next__(self):
            self.at = (self.at + 1) % (self.count + 1)
            if self.at == 0:
                raise StopIteration
            return np.ones(4, np.float32)

    masks = [mask for _, mask in prefetch(Source(), P("data"), mesh=mesh, tail="pad")]
    each = [4 * jax.process_count()] * 2 + [4 * (jax.process_count() - 1)] * 2
    assert [int(mask.sum()) for mask in masks] == each


@TWO_OF_THEM
def test_nothing_is_left_behind():
    """Neither of loaders that have ended, nor of those that were left."""
    mesh = _mesh("data across")
    for _ in range(3):
        list(prefetch(_source(3), P("data"), mesh=mesh))
        for batch in prefetch(_source(100), P("data"), mesh=mesh):
            if batch["i"] == 3:
                break
        del batch
    deadline = time.monotonic() + 60
    while _threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    barrier()
    assert coordination_client().key_value_dir_get("mylib/prefetch/") == []


@TWO_OF_THEM
def test_a_rule_that_fails_in_one_process():
    mesh = _mesh("data across")

    def rule(leaf):
        return {0: P("data")}[jax.process_index()]

    error = KeyError if jax.process_index() else RuntimeError
    with pytest.raises(error) as caught:
        to_global(np.ones(4), rule, mesh=mesh)
    assert jax.process_index() or "process 1: KeyError" in str(caught.value)


@TWO_OF_THEM
def test_several_at_once():
    mesh = _mesh("data across")
    train, test = (prefetch(_source(n), P("data"), mesh=mesh) for n in (6, 3))
    seen = []
    for batch in train:
        if batch["i"] % 2 == 0:
            seen.append(next(test)["i"])
    assert seen == [0, 1, 2] and list(test) == [] and not _threads()


@TWO_OF_THEM
def test_a_state_to_go_on_from(processes):
    mesh = _mesh("data across")
    shard = reader_shard(P("data"), mesh=mesh)

    def loader():
        options = grain.sharding.ShardOptions(shard.index, shard.count)
        data = grain.MapDataset.source(np.arange(64 * processes))
        data = data[options.shard_index :: options.shard_count]
        return data.shuffle(seed=1).to_iter_dataset().batch(8)

    whole = prefetch(loader(), P("data"), mesh=mesh)
    for _ in range(3):
        next(whole)
    state = whole.get_state()
    rest = [np.asarray(b.addressable_data(0)) for b in whole]
    assert len(rest) == 5
    again = prefetch(loader(), P("data"), mesh=mesh)
    next(again)
    again.set_state(state)
    for one, other in zip(again, rest, strict=True):
        np.testing.assert_array_equal(np.asarray(one.addressable_data(0)), other)
    everything = np.concatenate(gather([b.tolist() for b in iter(loader())]), axis=1)
    assert sorted(everything.reshape(-1)) == list(range(64 * processes))


@pytest.mark.everyday("2x4")
def test_training_is_that_of_one_process(processes):
    """Ten steps with loaders of each process, on meshes over which the axes run in any way."""
    x = np.random.default_rng(0).normal(size=(10, ROWS, 4)).astype(np.float32)
    y = x @ np.arange(4, dtype=np.float32)

    @eqx.filter_value_and_grad
    def loss(model, batch):
        return jnp.mean((jax.vmap(model)(batch["x"])[:, 0] - batch["y"]) ** 2)

    def train(step, model, batches):
        losses = []
        for batch in batches:
            value, model = step(model, batch)
            losses.append(float(value))
        return losses

    def update(model, batch):
        value, grads = loss(model, batch)
        return value, eqx.apply_updates(model, jax.tree.map(lambda g: -0.05 * g, grads))

    model = eqx.nn.Linear(4, 1, key=jax.random.key(0))
    expected = train(
        eqx.filter_jit(update), model, [{"x": a, "y": b} for a, b in zip(x, y, strict=True)]
    )
    for kind in "model across", "shuffled":
        mesh = _mesh(kind)
        rows = np.r_[reader_shard(P("data"), mesh=mesh).rows(ROWS)]
        source = ({"x": a[rows], "y": b[rows]} for a, b in zip(x, y, strict=True))
        step = mylib.filter_jit(update, out_shardings=P(), mesh=mesh)
        batches = prefetch(source, P("data"), mesh=mesh)
        losses = train(step, mylib.filter_shard(model, P(), mesh=mesh), batches)
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
    all_equal([float(x) for x in losses])

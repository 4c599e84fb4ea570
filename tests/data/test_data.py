"""Batches in one process: shares, tails, and loaders that are ahead of the loop."""

import contextlib
import copy
import gc
import importlib.util
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from pathlib import Path

import equinox as eqx
import grain
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import mylib
from mylib.data import prefetch, reader_shard, to_global
from mylib.testing import assert_placed

HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(
    not HAS_TORCH,
    reason="torch is not installed, and no extra brings it: see pyproject.toml",
)


AUTO, EXPLICIT = (
    jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    for kind in (AxisType.Auto, AxisType.Explicit)
)


@pytest.fixture
def mesh() -> Mesh:
    return AUTO


# `mylib.data` asks nowhere which kind of axes there is: of what JAX makes of its arrays.
each_kind = pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])


def _threads() -> list:
    return [t for t in threading.enumerate() if t.name == "mylib.data.prefetch"]


def _come_true(condition, seconds: float = 60) -> bool:
    """Waits for it. The limit is for tests that fail, not for machines that are busy."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(condition())


@pytest.fixture(autouse=True)
def no_thread_is_left(monkeypatch):
    monkeypatch.setattr("mylib._moving.data.feed.PATIENCE", 60)
    yield
    if _threads():
        # An error that was caught refers to what raised it, and to itself.
        gc.collect()
    assert _come_true(lambda: not _threads())


def _fails(kind: type[Exception], fun, *args, **kwargs) -> str:
    with pytest.raises(kind) as caught:
        fun(*args, **kwargs)
    return str(caught.value)


# --- which rows -----------------------------------------------------------------------------------


def test_one_process_reads_everything(mesh):
    shard = reader_shard({"x": P("data"), "y": P(("data", "model"))}, mesh=mesh)
    assert (shard.index, shard.count, shard.block_count) == (0, 1, 8)
    assert shard.rows(64) == (slice(0, 64),)
    assert "64" in str(shard.rows(64)) and shard.rows(0) == (slice(0, 0),)
    text = _fails(ValueError, shard.rows, 12)
    assert "12 rows" in text and "multiple of 8" in text
    assert "-8 rows" in _fails(ValueError, shard.rows, -8)
    _fails(TypeError, shard.rows, 8.0)


@hypothesis.given(
    st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=1, max_size=6), st.integers(1, 3)
)
def test_shares_cover_what_is_needed(needs, times):
    """Whoever needs what: everybody's rows are in one share, shares are equal and disjoint."""
    from mylib._moving.data.rows import _shares

    needs = [{4 * k + i for k in range(times) for i in need} for need in needs]
    needs.append({min(set(range(4 * times)) - set().union(*needs), default=0)})
    covered = set().union(*needs)
    needs.append(set(range(4 * times)) - covered)
    shares = _shares(needs, 4 * times)
    assert sorted(i for share in shares for i in share) == list(range(4 * times))
    assert len({len(share) for share in shares}) == 1
    assert all(any(need <= set(share) for share in shares) for need in needs)
    assert shares == sorted(shares) and all(list(s) == sorted(s) for s in shares)


def test_what_is_no_placement_to_read_by(mesh):
    text = _fails(mylib.PlacementError, reader_shard, mylib.rules.batch("data"), mesh=mesh)
    assert "batch('data')" in text and "mylib.resolve(example, rule, mesh=mesh)" in text
    assert "no axis 'dta'" in _fails(mylib.PlacementError, reader_shard, P("dta"), mesh=mesh)
    assert "needs a mesh" in _fails(mylib.PlacementError, reader_shard, P("data"))
    text = _fails(mylib.PlacementError, reader_shard, P("data"), mesh=mesh.abstract_mesh)
    assert "no devices" in text
    text = _fails(mylib.PlacementError, reader_shard, "data", mesh=mesh)
    assert "write P('data')" in text


def test_placements_that_say_little(mesh):
    for placement in None, {}, {"x": None}, jax.devices()[2]:
        shard = reader_shard(placement, mesh=mesh)
        assert (shard.index, shard.count, shard.rows(7)) == (0, 1, (slice(0, 7),))
    layout = Format(Layout((1, 0)), NamedSharding(mesh, P("data")))
    assert reader_shard(layout).rows(8) == (slice(0, 8),)
    out = to_global({"x": np.ones((8, 4))}, layout)
    assert_placed(out, layout)


# --- to_global ------------------------------------------------------------------------------------


@each_kind
def test_as_filter_shard(mesh):
    batch = {
        "x": np.arange(32.0).reshape(8, 4),
        "keys": jax.random.split(jax.random.key(0), 8),
        "device": jnp.ones(8),
        "step": 3,
        "names": ["a", "b"],
        "text": np.array(["a", "b"]),
        "none": None,
    }
    placement = {**dict.fromkeys(batch, P("data")), "x": P("data", "model")}
    ours, theirs = (f(batch, placement, mesh=mesh) for f in (to_global, mylib.filter_shard))
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for y, z in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        if eqx.is_array(y) and isinstance(y, jax.Array):
            assert y.sharding == z.sharding and y.dtype == z.dtype and bool((y == z).all())
        else:
            assert y is z
    with jax.set_mesh(mesh):
        assert to_global(ours, placement)["x"] is ours["x"]
        assert_placed(to_global(batch["x"], P("data")), P("data"))
    assert to_global(batch["x"], jax.devices()[3]).devices() == {jax.devices()[3]}
    assert to_global(batch["x"], None) is batch["x"]
    out = to_global(batch["x"], mylib.rules.batch("data"), mesh=mesh)
    assert_placed(out, P("data"), mesh=mesh)


@hypothesis.given(st.integers(0, 40), st.sampled_from(["data", "model", ("data", "model"), None]))
def test_tails(rows, axes):
    mesh = AUTO
    parts = {"data": 4, "model": 2, ("data", "model"): 8, None: 1}[axes]
    batch = {"x": np.arange(1.0, rows + 1), "y": np.ones((rows, 3), np.int32), "t": np.ones(5)}
    placement = {"x": P(axes), "y": P("data") if axes == "data" else P(axes), "t": P()}
    if axes is None:
        del batch["t"], placement["t"]
    more, fewer = -(-rows // parts) * parts, rows // parts * parts
    if rows % parts:
        text = _fails(mylib.PlacementError, to_global, batch, placement, mesh=mesh)
        assert f"['x'] ({rows},)" in text and f"['y'] ({rows}, 3)" in text and "['t']" not in text
        assert f"its {rows} rows are not a multiple of {parts}" in text
        assert f"keeps {fewer} of" in text and f"pads to {more} rows" in text
    else:
        assert to_global(batch, placement, mesh=mesh)["x"].shape == (rows,)
    out, mask = to_global(batch, placement, mesh=mesh, tail="pad")
    assert out["x"].shape == mask.shape == (more,) and out["y"].shape == (more, 3)
    np.testing.assert_array_equal(out["x"], [*range(1, rows + 1), *[0] * (more - rows)])
    np.testing.assert_array_equal(mask, np.arange(more) < rows)
    assert mask.dtype == bool and ("t" not in batch or out["t"].shape == (5,))
    assert_placed((out, mask), (placement, P(axes)), mesh=mesh)
    if fewer:
        kept = to_global(batch, placement, mesh=mesh, tail="drop")
        np.testing.assert_array_equal(kept["x"], np.arange(1.0, fewer + 1))
    else:
        text = _fails(mylib.PlacementError, to_global, batch, placement, mesh=mesh, tail="drop")
        assert "all rows are dropped" in text


@each_kind
def test_tails_of_all_kinds(mesh):
    batch = {
        "keys": jax.random.split(jax.random.key(0), 5),
        "device": jnp.arange(5, dtype=jnp.bfloat16),
        "sharded": mylib.filter_shard(np.ones((5, 8), bool), P(None, "data"), mesh=mesh),
        "host": np.arange(5)[::-1],
    }
    for tail, rows in ("pad", 8), ("drop", 4):
        out = to_global(batch, P("data"), mesh=mesh, tail=tail)
        out = out[0] if tail == "pad" else out
        assert all(y.shape[0] == rows for y in out.values())
        assert out["device"].dtype == jnp.bfloat16 and out["sharded"].dtype == bool
        np.testing.assert_array_equal(np.asarray(out["host"])[:4], [4, 3, 2, 1])
        keys, given = (np.asarray(jax.random.key_data(x["keys"])) for x in (out, batch))
        np.testing.assert_array_equal(keys[:4], given[:4])
        assert_placed(out, P("data"), mesh=mesh)


@each_kind
def test_a_mask_that_weighs(mesh):
    """The mean over what was given, on a batch that was filled up."""
    x = np.random.default_rng(0).normal(size=(13, 4)).astype(np.float32)
    (y, mask) = to_global(x, P("data"), mesh=mesh, tail="pad")
    with jax.set_mesh(mesh):
        mean = jax.jit(lambda y, mask: jnp.sum(y * mask[:, None], 0) / jnp.sum(mask))(y, mask)
    np.testing.assert_allclose(mean, x.mean(0), rtol=1e-5)


def test_rows_that_differ(mesh):
    batch = {"x": np.ones(5), "y": np.ones(7), "n": np.float32(1)}
    placement = {"x": P("data"), "y": P("data"), "n": P()}
    for tail in "pad", "drop":
        text = _fails(mylib.PlacementError, to_global, batch, placement, mesh=mesh, tail=tail)
        assert "['y'] (7,)" in text and "it has 7 rows, and ['x'] has 5" in text
    text = _fails(mylib.PlacementError, to_global, {"a": 1}, P(), mesh=mesh, tail="pad")
    assert "no rows that could be padded" in text
    # As they are, they may: nodes and edges of graphs, say.
    out = to_global({"x": np.ones(4), "y": np.ones(8)}, P("data"), mesh=mesh)
    assert out["y"].shape == (8,)


def test_all_faults_at_once(mesh):
    batch = {"x": np.ones((6, 3)), "s": np.float32(1), "y": np.ones(8), "z": np.ones((8, 3))}
    placement = {"x": P("data"), "s": P("data"), "y": P("dat"), "z": P("data", "model")}
    text = _fails(mylib.PlacementError, to_global, batch, placement, mesh=mesh)
    assert "can't place 4 leaves" in text and "rows are not a multiple of 4" in text
    assert "rank 0" in text and "did you mean 'data'" in text and "dimension 1 of size 3" in text
    batch["z"] = np.ones((6, 3))
    text = _fails(mylib.PlacementError, to_global, batch, placement, mesh=mesh, tail="pad")
    assert "can't place 3 leaves" in text and "rows are not" not in text and "['x']" not in text


def test_arguments(mesh):
    assert "'error', 'drop', 'pad'" in _fails(ValueError, to_global, 1, P(), mesh=mesh, tail="cut")
    for buffer in 0, 1.5, float("nan"), None:
        text = _fails(ValueError, prefetch, [], P(), mesh=mesh, buffer=buffer)
        assert f"buffer={buffer}" in text
    assert "check=array" in _fails(TypeError, to_global, 1, P(), mesh=mesh, check=np.zeros(2))
    text = _fails(TypeError, jax.jit(lambda x: to_global(x, P("data"), mesh=mesh)), np.ones(8))
    assert "mylib.filter_shard" in text
    assert "check={'x'" in _fails(TypeError, to_global, 1, P(), mesh=mesh, check={"x": True})
    assert "may_alias={'x'" in _fails(TypeError, to_global, 1, P(), mesh=mesh, may_alias={"x": 1})
    batch = {"x": np.ones(8), "y": np.ones(8)}
    text = _fails(mylib.PlacementError, to_global, batch, P(), mesh=mesh, may_alias={"x": True})
    assert "a prefix that has a dict with keys ['x'] here" in text
    deleted = jnp.ones(8)
    deleted.delete()
    for tail in "error", "pad":
        text = _fails(mylib.PlacementError, to_global, deleted, P("data"), mesh=mesh, tail=tail)
        assert "the array (8,)" in text and "deleted" in text and "no rows" not in text


@pytest.mark.parametrize("dtype", [">i4", ">f8"])
def test_bytes_in_another_order(mesh, dtype):
    """As files have them that come from elsewhere."""
    given = np.frombuffer(np.arange(16).astype(dtype).tobytes(), dtype).reshape(8, 2)
    assert not given.dtype.isnative
    batch = {"x": given, "days": np.zeros(8, ">M8[D]")}
    for out in (
        to_global(batch, P("data"), mesh=mesh),
        next(prefetch([batch], P("data"), mesh=mesh)),
    ):
        assert_placed(out["x"], P("data"), mesh=mesh)
        assert out["x"].tolist() == np.arange(16).reshape(8, 2).tolist()
        assert isinstance(out["days"], np.ndarray)


def test_arrays_of_strings_are_static(mesh):
    names = np.array(["a", "bc"] * 4, np.dtypes.StringDType())
    batch = {"x": np.ones((8, 2), np.float32), "names": names}
    out = to_global(batch, P("data"), mesh=mesh)
    assert out["names"] is names and out["x"].sharding.spec == P("data")
    with prefetch([batch], P("data"), mesh=mesh) as batches:
        (out,) = batches
    assert out["names"] is names


def test_sharing_arrays_of_64_bits(mesh):
    # JAX would warn (an error in tests) about each.
    batch = {"x": np.ones((1024, 256))}
    placed = [
        to_global(batch, P("data"), mesh=mesh, may_alias=True),
        next(prefetch([batch], P("data"), mesh=mesh, may_alias=True)),
        mylib.filter_device_put(batch, P("data"), mesh=mesh, may_alias=True),
        mylib.filter_device_put(batch, may_alias=True),
    ]
    assert [str(x["x"].dtype) for x in placed] == ["float32"] * 4


def test_numbers_that_change(mesh):
    """One program for all values of a NumPy number; Python's are static."""
    traces = []

    @mylib.filter_jit
    def step(batch):
        traces.append(1)
        return jnp.sum(batch["x"]) * batch["lr"]

    rows = {"x": P("data"), "lr": P()}
    for number, times in (np.float32, 1), (float, 4):
        for lr in 0.1, 0.2, 0.3:
            out = step(to_global({"x": np.ones(8), "lr": number(lr)}, rows, mesh=mesh))
            np.testing.assert_allclose(out, 8 * lr, rtol=1e-6)
        assert len(traces) == times


@needs_torch
def test_arrays_of_other_libraries(mesh):
    import torch

    class Table:
        def __array__(self, dtype=None, copy=None):
            return np.array(["a", "b"])

    table = Table()
    batch = {
        "x": torch.arange(16.0).reshape(8, 2),
        "half": torch.arange(8).to(torch.bfloat16),
        "long": torch.arange(8),
        "strided": torch.arange(16).to(torch.bfloat16)[::2],
        "table": table,
    }
    out = to_global(batch, P("data"), mesh=mesh)
    assert_placed([out["x"], out["half"], out["long"]], P("data"), mesh=mesh)
    assert out["half"].dtype == jnp.bfloat16 and out["table"] is table
    np.testing.assert_array_equal(out["x"], batch["x"])
    np.testing.assert_array_equal(out["long"], np.arange(8))
    np.testing.assert_array_equal(out["strided"], np.arange(0, 16, 2))
    with pytest.raises(TypeError, match="to_dense"):
        to_global(torch.ones(8).to_sparse(), P("data"), mesh=mesh)
    batch["x"][:] = 0
    assert float(out["x"].sum()) == 120
    with pytest.raises(RuntimeError, match="requires grad") as caught:
        to_global({"w": torch.ones(8, requires_grad=True)}, P("data"), mesh=mesh)
    assert "Tensor ['w'] of the batch" in "".join(traceback.format_exception(caught.value))


def test_memory_is_shared_only_if_asked(mesh):
    # Where XLA would take the memory over as it is.
    memory = np.zeros(4096 * 8 + 64, np.uint8)
    x = memory[-memory.ctypes.data % 64 :][: 4096 * 8].view(np.float32).reshape(8, -1)
    x[:] = 1
    own = to_global(x, P("data"), mesh=mesh)
    shared = to_global(x, P("data"), mesh=mesh, may_alias=True)
    x[:] = 2
    assert float(own.max()) == 1 and float(shared.max()) == 2


# --- prefetch -------------------------------------------------------------------------------------


def _source(count: int, delay: float = 0.0):
    """One buffer, filled again for each batch, as quick loaders do."""
    buffer = np.zeros((8, 512), np.float32)
    for i in range(count):
        time.sleep(delay)
        buffer[:] = i
        yield {"x": buffer, "i": i}


def _numbers(batches) -> list[int]:
    each = [(np.asarray(batch["x"]), batch["i"]) for batch in batches]
    assert all((x == i).all() for x, i in each)
    return [i for _, i in each]


@each_kind
def test_order_and_a_buffer_that_is_filled_again(mesh):
    for buffer in 1, 2, 7, 50:
        batches = prefetch(_source(20), P("data", "model"), mesh=mesh, buffer=buffer)
        assert _numbers(batches) == list(range(20))
        assert not _threads() and list(batches) == []
    with jax.set_mesh(mesh):
        batches = prefetch(_source(3), P("data"))
    batch = next(batches)
    assert_placed(batch["x"], P("data"), mesh=mesh)
    batches.close()


def test_what_is_not_placed_is_copied_too(mesh):
    """A source fills the same buffers again."""
    y = np.empty(8)

    def source():
        for i in range(6):
            y[:] = i
            yield {"x": y, "y": y}

    placement = {"x": P("data"), "y": None}
    for i, batch in enumerate(prefetch(source(), placement, mesh=mesh)):
        time.sleep(0.01)
        assert (np.asarray(batch["x"]) == i).all()
        assert (batch["y"] == i).all()
    shared = next(prefetch(source(), placement, mesh=mesh, may_alias=True))
    assert shared["y"] is y
    shared = next(prefetch(source(), placement, mesh=mesh, may_alias={"x": None, "y": True}))
    assert shared["y"] is y


def test_static_leaves_are_the_same_objects(mesh):
    static = {"names": np.empty(8, "U8"), "days": np.empty(8, "M8[D]"), "any": np.empty(8, object)}
    batch = {"x": np.ones(8), "static": static}
    for out in (
        to_global(batch, P("data"), mesh=mesh),
        next(prefetch([batch], {"x": P("data"), "static": None}, mesh=mesh)),
    ):
        assert all(out["static"][key] is x for key, x in static.items())


def test_nothing_is_read_before_it_is_asked_for(mesh):
    read = []
    batches = prefetch(map(read.append, range(9)), P(), mesh=mesh)
    time.sleep(0.1)
    assert read == [] and not _threads()
    next(batches)
    assert _come_true(lambda: len(read) == 3)
    time.sleep(0.1)
    assert read == [0, 1, 2]
    batches.close()


def test_an_error_of_the_source_has_its_place(mesh):
    def source():
        yield from _source(3)
        raise KeyError("a file is missing")

    batches = prefetch(source(), P("data"), mesh=mesh, buffer=10)
    assert _numbers(next(batches) for _ in range(3)) == [0, 1, 2]
    with pytest.raises(KeyError, match="a file is missing") as caught:
        next(batches)
    assert "in source" in "".join(traceback.format_tb(caught.value.__traceback__))
    assert list(batches) == [] and not _threads()

    batches = prefetch([np.ones(8), np.ones(7)], P("data"), mesh=mesh)
    next(batches)
    assert "its 7 rows" in _fails(mylib.PlacementError, next, batches)

    def leaves():
        yield np.ones(8)
        raise KeyboardInterrupt

    batches = prefetch(leaves(), P("data"), mesh=mesh)
    next(batches)
    with pytest.raises(KeyboardInterrupt):
        next(batches)

    class Broken:
        def __iter__(self):
            return 3

    batches = prefetch(Broken(), P(), mesh=mesh)
    assert "non-iterator" in _fails(TypeError, next, batches) and list(batches) == []
    assert "could not start: TypeError" in _fails(TypeError, batches.get_state)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["last", "error", "placing", "beginning"])
def test_the_end_leaves_no_cycles(mesh, end):
    """The source is let go of at once, not when Python collects its garbage."""

    class Source:
        count = 0

        def __iter__(self):
            if end == "beginning":
                raise KeyError
            return self

        def __next__(self):
            self.count += 1
            if self.count == 3:
                raise {"last": StopIteration, "error": KeyError, "placing": KeyError}[end]
            return np.ones(7 if end == "placing" else 8)

    def loop():
        source = Source()
        with contextlib.suppress(KeyError, mylib.PlacementError):
            for _ in prefetch(source, P("data"), mesh=mesh):
                pass
        return weakref.ref(source)

    loop()
    gc.collect()
    gc.disable()
    try:
        source = loop()
        assert _come_true(lambda: source() is None)
    finally:
        gc.enable()


def test_an_error_that_cannot_say_what_it_is(mesh):
    class Mute(Exception):
        def __str__(self):
            raise ValueError("no words")

    def source():
        yield np.ones(8)
        raise Mute

    batches = prefetch(source(), P("data"), mesh=mesh)
    next(batches)
    with pytest.raises(Mute):
        next(batches)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["close", "with", "error in with", "break", "del", "cycle"])
def test_an_iterator_that_is_left(mesh, how):
    alive = []

    def source():
        while True:
            x = np.ones((8, 1000))
            alive.append(1)
            weakref.finalize(x, alive.pop)
            yield x

    gc.collect()
    before = len(jax.live_arrays())
    batches = prefetch(source(), P("data"), mesh=mesh, buffer=5)
    next(batches)
    assert _come_true(lambda: len(jax.live_arrays()) > before) and _threads()
    if how == "close":
        batches.close()
        batches.close()
        assert not _threads() and list(batches) == []
    elif how == "with":
        with batches:
            pass
        assert not _threads()
    elif how == "error in with":
        with pytest.raises(ZeroDivisionError):
            with batches:
                raise ZeroDivisionError
        assert not _threads()
    elif how == "break":
        for _ in batches:
            break
        del _, batches
    elif how == "del":
        del batches
    else:
        cycle = [batches]
        cycle.append(cycle)
        del batches, cycle
        gc.collect()
    assert _come_true(lambda: not _threads() and len(jax.live_arrays()) == before)
    gc.collect()
    assert alive == []


@pytest.mark.parametrize("where", ["source", "end"])
def test_closed_while_it_is_waited_for(mesh, where):
    """By another thread, or by the handler of a signal."""
    go_on = threading.Event()

    def source():
        yield np.ones(8)
        if where == "source":
            go_on.wait()
            yield np.ones(8)
        time.sleep(0.3)

    batches = prefetch(source(), P("data"), mesh=mesh)
    next(batches)
    left = []
    waiting = [threading.Thread(target=lambda: left.append(list(batches))) for _ in range(2)]
    for thread in waiting:
        thread.start()
    time.sleep(0.1)
    if where == "source":
        threading.Timer(0.1, go_on.set).start()
        batches.close()
    for thread in waiting:
        thread.join(60)
    assert left == [[], []]


def test_threads_that_share_it(mesh):
    batches = prefetch(_source(60), P("data"), mesh=mesh)
    seen, start = [], threading.Barrier(4)

    def take():
        start.wait()
        for batch in batches:
            seen.append(batch["i"])

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(seen) == list(range(60))


def test_batches_of_which_nothing_is_left(mesh):
    """The thread of a source that has no other ones ends as well."""
    reading = threading.Event()

    def source():
        while True:
            yield np.ones(3)
            reading.set()

    batches = prefetch(source(), P("data"), mesh=mesh, tail="drop")
    waiting = threading.Thread(target=lambda: list(batches))
    waiting.start()
    assert reading.wait(60)
    batches.close()
    waiting.join(60)
    assert not waiting.is_alive() and not _threads()


def test_a_stop_that_is_not_the_sources(mesh):
    def rule(leaf):
        return next(spec for name, spec in [("other", P())] if name == leaf.name)

    batches = prefetch([np.ones(8)] * 3, rule, mesh=mesh)
    with pytest.raises(RuntimeError, match="could not be made") as caught:
        next(batches)
    assert isinstance(caught.value.__cause__, StopIteration)


def test_no_copies(mesh):
    batches = prefetch(_source(3), P("data"), mesh=mesh)
    assert batches and "can't be copied" in _fails(TypeError, copy.copy, batches)


def test_a_source_that_does_not_come_back(mesh, monkeypatch):
    monkeypatch.setattr("mylib._moving.data.feed.PATIENCE", 0.2)
    come_back = threading.Event()

    def source():
        yield np.ones(8)
        come_back.wait()
        yield np.ones(8)

    batches = prefetch(source(), P("data"), mesh=mesh)
    next(batches)
    try:
        # Comes to its end, although the source does not.
        batches.close()
        assert _threads()
    finally:
        come_back.set()


def test_bounded(mesh):
    """Never more than `buffer` batches beyond the one that the loop has."""
    gc.collect()
    before, most = len(jax.live_arrays()), []

    def source():
        for _ in range(30):
            most.append(len(jax.live_arrays()) - before)
            yield np.ones((8, 100))

    batches = prefetch(source(), P("data"), mesh=mesh, buffer=3)
    for batch in batches:
        if len(most) < 10:
            # It comes to the most that there may be, and
            assert _come_true(lambda: len(jax.live_arrays()) - before == 4)
        time.sleep(0.01)
        most.append(len(jax.live_arrays()) - before)
        assert batch.shape == (8, 100)
    assert max(most) == 4 and len(most) == 60


def _resident() -> int:
    """Bytes of memory that this process has, where the system tells."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else 0


@pytest.mark.slow
def test_thousands_of_batches():
    mesh = jax.make_mesh((8,), ("data",))

    def source():
        for i in range(2_500):
            yield {"x": np.full((8, 256), i, np.float32), "i": i}

    sizes = []
    for i, batch in enumerate(prefetch(source(), P("data"), mesh=mesh)):
        assert batch["i"] == i
        if i % 250 == 249:
            gc.collect()
            sizes.append(len(gc.get_objects()))
            if i == 499:
                memory = _resident()
    assert len(sizes) == 10 and sizes[-1] < sizes[1] + 1000
    # 2,000 batches are 16 MB.
    assert _resident() < memory + 8_000_000


def test_length(mesh):
    assert len(prefetch([np.ones(8)] * 3, P("data"), mesh=mesh)) == 3
    with pytest.raises(TypeError, match="has no len"):
        len(prefetch(_source(3), P("data"), mesh=mesh))
    assert len(list(prefetch(_source(3), P("data"), mesh=mesh))) == 3


def _when_slow_enough(measured) -> bool:
    """Whether it holds of something that takes so many seconds. A busy machine may take longer than
    the first few of them for everything else.
    """
    return any(measured(seconds) for seconds in (0.04, 0.2, 1.0))


def test_who_is_slower(mesh):
    def timing(read, compute):
        batches = prefetch(_source(15, read), P("data"), mesh=mesh)
        for _ in batches:
            time.sleep(compute)
        return batches.timing

    def loader_is_slower(slow):
        nonlocal loader
        loader = timing(slow, 0.001)
        return loader.slower == "loader" and loader.waited > loader.idle

    def step_is_slower(slow):
        nonlocal step
        step = timing(0.001, slow)
        assert step.total > 14 * slow
        # The source gave all but the last batches while the step slept.
        return step.slower == "step" and step.idle > step.waited

    loader = step = prefetch([], P(), mesh=mesh).timing
    assert _when_slow_enough(loader_is_slower) and _when_slow_enough(step_is_slower)
    assert loader.total >= loader.waited >= loader.last_waited > 0
    assert step.batches == loader.batches == 15
    assert "batch 15: waited" in str(loader) and "the loader is slower" in str(loader)
    fresh = prefetch([], P(), mesh=mesh).timing
    assert fresh.last_waited == fresh.idle == 0.0
    assert (fresh.batches, fresh.total, fresh.waited) == (0, 0.0, 0.0) and "batch 0" in str(fresh)


def test_a_slow_first_step_is_forgotten(mesh):
    def measured(slow):
        batches = prefetch(_source(30, slow / 4), P("data"), mesh=mesh)
        for batch in batches:
            if batch["i"] == 0:
                time.sleep(10 * slow)
        return batches.timing.slower == "loader" and batches.timing.idle > 5 * slow

    assert _when_slow_enough(measured)


def test_settings_of_the_thread_that_asked(mesh):
    with jax.enable_x64(True):
        batches = prefetch([np.ones(8)], P("data"), mesh=mesh)
        assert next(batches).dtype == np.float64
    assert next(prefetch([np.ones(8)], P("data"), mesh=mesh)).dtype == np.float32


@each_kind
def test_the_mesh_of_the_thread_that_asked(mesh):
    def source():
        yield mylib.filter_shard(np.ones(8), P("model"))

    with jax.set_mesh(mesh):
        assert_placed(next(prefetch(source(), P("data"))), P("data"))


def test_tails_of_a_loader(mesh):
    source = [np.full(n, i, np.float32) for i, n in enumerate((16, 16, 6, 3))]
    batches = list(prefetch(source, P("data"), mesh=mesh, tail="pad"))
    # As many rows as the first: the step is compiled once.
    assert [(y.shape, int(mask.sum())) for y, mask in batches] == [
        ((16,), 16),
        ((16,), 16),
        ((16,), 6),
        ((16,), 3),
    ]
    assert [y.shape for y in prefetch(source, P("data"), mesh=mesh, tail="drop")] == [
        (16,),
        (16,),
        (4,),
    ]


# --- sources --------------------------------------------------------------------------------------


def test_a_state_to_go_on_from(mesh):
    def loader():
        data = grain.MapDataset.source(np.arange(80.0)).shuffle(seed=3)
        return data.to_iter_dataset().batch(8)

    expected = [x.tolist() for x in loader()]
    batches = prefetch(loader(), P("data"), mesh=mesh, buffer=4)
    states = [batches.get_state()]
    for i, batch in enumerate(batches):
        assert batch.tolist() == expected[i]
        time.sleep(0.01)
        states.append(batches.get_state())
    # Each after the batch that the loop has seen, in any order, into a used or a new loader.
    for used in True, False:
        for i in 3, 9, 0, 10:
            if not used:
                batches = prefetch(loader(), P("data"), mesh=mesh)
            batches.set_state(states[i])
            assert batches.get_state() == states[i]
            assert [x.tolist() for x in batches] == expected[i:]
    batches.set_state(states[2])
    next(batches)
    batches.close()
    assert batches.get_state() == states[3]
    assert "closed" in _fails(ValueError, batches.set_state, states[0])


def test_a_state_that_goes_on_changing(mesh):
    class Source:
        def __init__(self):
            self.state = {"i": 0}

        def __iter__(self):
            return self

        def __next__(self):
            self.state["i"] += 1
            return np.full(8, self.state["i"])

        def get_state(self):
            return self.state

        def set_state(self, state):
            self.state["i"] = state["i"] + 0

    batches = prefetch(Source(), P("data"), mesh=mesh, buffer=4)
    next(batches), time.sleep(0.05)
    assert batches.get_state() == {"i": 1}
    idle = batches.timing.idle
    with pytest.raises(KeyError):
        batches.set_state({})
    assert "set_state has failed" in _fails(RuntimeError, next, batches)
    batches.set_state({"i": 7})
    assert next(batches).tolist() == [8] * 8 and batches.timing.idle >= idle
    batches.close()


def test_a_state_that_is_none(mesh):
    batches = prefetch(_source(3), P("data"), mesh=mesh)
    for ask in batches.get_state, lambda: batches.set_state(0):
        text = _fails(TypeError, ask)
        assert "a generator has no" in text and "grain" in text
    next(batches)
    _fails(TypeError, batches.get_state)


def test_a_state_that_cannot_be_copied(mesh):
    """It matters to who asks for it alone."""

    class Source:
        def __iter__(self):
            return self

        def __next__(self):
            return np.ones(8)

        def get_state(self):
            return {"lock": threading.Lock()}

    batches = prefetch(Source(), P("data"), mesh=mesh)
    next(batches)
    text = _fails(TypeError, batches.get_state)
    assert "the state of a Source can't be saved" in text and "lock" in text
    batches.close()


def test_grain_with_processes_of_its_own(mesh):
    loader = grain.DataLoader(
        data_source=np.arange(64.0),
        sampler=grain.samplers.IndexSampler(64, grain.sharding.NoSharding(), num_epochs=1),
        operations=[grain.transforms.Batch(8)],
        worker_count=0,
    )
    assert [x.tolist() for x in prefetch(loader, P("data"), mesh=mesh)] == [
        x.tolist() for x in loader
    ]


@needs_torch
@pytest.mark.parametrize("workers", [0, 2])
def test_torch(mesh, workers):
    import torch

    data = torch.utils.data.TensorDataset(torch.arange(80.0).reshape(40, 2), torch.arange(40))
    loader = torch.utils.data.DataLoader(
        data,
        batch_size=8,
        num_workers=workers,
        # Copies of a process with threads, such as JAX's, may hang.
        multiprocessing_context="spawn" if workers else None,
    )
    batches = prefetch(loader, P("data"), mesh=mesh)
    assert len(batches) == 5
    seen = list(batches)
    assert_placed(seen, P("data"), mesh=mesh)
    np.testing.assert_array_equal(np.concatenate([y for _, y in seen]), np.arange(40))
    np.testing.assert_array_equal(np.concatenate([x for x, _ in seen]).ravel(), np.arange(80.0))


def test_a_file(mesh, tmp_path):
    np.arange(64.0, dtype=np.float32).reshape(16, 4).tofile(tmp_path / "data")
    data = np.memmap(tmp_path / "data", np.float32, "r", shape=(16, 4))
    batches = prefetch((data[i : i + 8] for i in (0, 8)), P("data", "model"), mesh=mesh)
    np.testing.assert_array_equal(np.concatenate(list(batches)), data)


def test_a_loader_in_a_loader(mesh):
    inner = prefetch(_source(5), P("data"), mesh=mesh)
    outer = prefetch(inner, P("data", "model"), mesh=mesh)
    assert _numbers(outer) == list(range(5))


# --- the end of a process -------------------------------------------------------------------------


@contextlib.contextmanager
def _running(script: str, env, *arguments: str):
    """A process that has ended, with all that it has started, when this is left."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        # Which also closes what it has printed to.
        process.communicate()


# For a process that never ends: those that do may have a busy machine.
_LIMIT = 240


_LOOP = """
import threading, time
import jax, numpy as np, mylib
from jax.sharding import PartitionSpec as P
mesh = jax.make_mesh((8,), ("data",))
def source():
    while True:
        yield np.ones(8)
        time.sleep({delay})
batches = mylib.data.prefetch(source(), P("data"), mesh=mesh)
next(batches)
"""


@pytest.mark.slow
@pytest.mark.parametrize("before", ["", "import tempfile; t = tempfile.TemporaryDirectory()"])
def test_python_ends_in_the_midst(checkout_env, before):
    """Also where what ends with Python was begun before JAX was imported."""
    script = before + _LOOP.format(delay=0) + "print('end', flush=True)"
    with _running(script, checkout_env) as process:
        out, err = process.communicate(timeout=_LIMIT)
    assert process.returncode == 0 and out == "end\n" and err == ""


@pytest.mark.slow
def test_a_process_that_is_forked_off(checkout_env):
    """It has no copy of the thread, and would wait for ever; also for a lock that another thread
    has.
    """
    loop = """
import os
enough = threading.Event()
def also_takes_batches():
    while not enough.wait(0):
        next(batches)
other = threading.Thread(target=also_takes_batches)
other.start()
time.sleep(0.05)
if os.fork() == 0:
    try:
        next(batches)
    except RuntimeError as error:
        print(error, flush=True)
    batches.close()
    os._exit(0)
os.wait()
next(batches)
# Before Python ends: JAX aborts a thread that still asks it for arrays then.
enough.set()
other.join()
print("goes on")
"""
    script = "import warnings; warnings.simplefilter('ignore')" + _LOOP.format(delay=0) + loop
    with _running(script, checkout_env) as process:
        out, _ = process.communicate(timeout=_LIMIT)
    told, *rest = out.splitlines()
    assert "belong to the process that this one was forked from" in told
    assert rest == ["goes on"] and process.returncode == 0


@pytest.mark.slow
def test_ctrl_c(checkout_env):
    """While the loop waits for a source that never comes back."""
    loop = """
try:
    for batch in batches:
        seen.set()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    begin = """
import os, signal, sys, threading
# Whoever runs these tests may not care for Ctrl-C, and that is inherited.
signal.signal(signal.SIGINT, signal.default_int_handler)
def interrupted_while_it_waits():
    yield 0
    seen.wait()
    main = threading.main_thread().ident
    while sys._current_frames()[main].f_code.co_name != "wait":
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait()
delays, seen = interrupted_while_it_waits(), threading.Event()
"""
    with _running(begin + _LOOP.format(delay="next(delays)") + loop, checkout_env) as process:
        out, err = process.communicate(timeout=_LIMIT)
    assert (out, err, process.returncode) == ("interrupted\n", "", 0)


_DIES = """
import os, signal, sys
import jax
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]), cluster_detection_method="deactivate")
import numpy as np
import mylib
from jax.sharding import PartitionSpec as P

def source():
    for i in range(10):
        if i == 5 and jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        yield np.full(jax.local_device_count(), i)

mesh = jax.make_mesh((jax.device_count(),), ("data",))
seen = 0
try:
    for batch in mylib.data.prefetch(source(), P("data"), mesh=mesh):
        seen += 1
        if seen == 4:
            # Both have come so far, however long that took.
            os.environ["MYLIB_EXCHANGE_TIMEOUT"] = "6"
except TimeoutError as error:
    print(seen, error, flush=True)
# The others are gone: Python would wait for them.
os._exit(0)
"""


@pytest.mark.slow
def test_a_process_dies(checkout_env):
    """The other one is told, and does not wait for ever."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    with (
        _running(_DIES, checkout_env, address, "0") as survivor,
        _running(_DIES, checkout_env, address, "1") as other,
    ):
        out, err = survivor.communicate(timeout=_LIMIT)
        assert other.wait(timeout=_LIMIT) == -signal.SIGKILL, err
    assert "process 1 did not come within 6 s" in out and out.startswith("5 "), (out, err)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (lambda: [np.ones(8)], r"<lambda> at .*> is no iterable of batches$"),
        (3, "3 is no iterable of batches$"),
    ],
)
def test_a_source_that_is_no_iterable(source, told):
    with pytest.raises(TypeError, match=told):
        prefetch(source, P())

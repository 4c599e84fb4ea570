"""What placing arrays costs, beside the JAX and Equinox calls that would do the same.

    python benchmarks/placement.py            every row, several minutes
    python benchmarks/placement.py --quick    fewer repeats, for a rough look
    python benchmarks/placement.py keep put   some of the sections

Ours and its peers take turns in one loop, and a ratio is the median over the turns of our time by
the peer's in the same turn: what else the machine does in the meantime slows both of a pair, and
cancels out. The times beside it are medians too, and only rough. `ok` says whether the ratio is
what the library promises; a promise that is broken is shown as MISSED, and changes nothing else.
"""

import os

# Read when JAX starts, so they come before it is imported. NPROC is the number of threads that the
# simulated devices share: JAX 0.10 needs as many as there are devices, however few the cores.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["NPROC"] = "32"
os.environ["JAX_PLATFORMS"] = "cpu"
# A first call must compile what it needs.
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from side_by_side import (
    Call,
    Row,
    at_most,
    compare,
    duel,
    print_header,
    print_row,
    race,
    show,
    stopwatch,
)

import mylib

# `equinox.filter_shard` takes Auto axes alone.
LINE = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
GRID = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
ROWS, COLUMNS, REPLICATED = (NamedSharding(LINE, spec) for spec in (P("x"), P(None, "x"), P()))
LAYOUTS = {"by rows": ROWS, "by columns": COLUMNS, "replicated": REPLICATED}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", metavar="section", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--first-call", choices=FIRST_CALLS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}: there are {', '.join(SECTIONS)}")
    if options.first_call:
        print(time_of_first_call(FIRST_CALLS[options.first_call]))
        return
    print_header("8 simulated CPU devices")
    for section in options.sections or SECTIONS:
        for row in SECTIONS[section](0.2 if options.quick else 1.0):
            print_row(row.cells())


# What is placed.


def leaves(count: int) -> list[np.ndarray]:
    """Small arrays of ten shapes, 2 to 20 KB each, as NumPy allocates them."""
    return [np.full((8 + 8 * (i % 10), 64), i, np.float32) for i in range(count)]


def big(offset: int = 16, megabytes: int = 64) -> np.ndarray:
    """A large array that starts so many bytes after a 64-byte boundary. On one, XLA can take the
    memory over as it is; NumPy on Linux starts its own large arrays 16 bytes after one.
    """
    nbytes = megabytes * 1024 * 1024
    memory = np.empty(nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    x = memory[start : start + nbytes].view(np.float32).reshape(-1, 4096)
    x[...] = np.random.default_rng(0).random(x.shape, np.float32)
    return x


def same_work(calls: Sequence[Call], given: Any, target: NamedSharding) -> None:
    """Stops a race in which someone doesn't do the job: the values of `given`, at `target`."""
    for call in calls:
        for y, x in zip(jax.tree.leaves(call(given)), jax.tree.leaves(given), strict=True):
            assert y.committed and y.sharding.is_equivalent_to(target, x.ndim), y.sharding
            np.testing.assert_array_equal(np.asarray(y), np.asarray(x))


# The sections of the table.


def keep(effort: float) -> Iterator[Row]:
    there = jax.block_until_ready(jax.device_put(leaves(1000), ROWS))

    def ours(_: Any) -> Any:
        return mylib.filter_shard(there, ROWS)

    def device_put(_: Any) -> Any:
        return jax.device_put(there, ROWS)

    def filter_shard(_: Any) -> Any:
        return jax.block_until_ready(eqx.filter_shard(there, ROWS))

    same_work([ours, device_put, filter_shard], there, ROWS)
    # The same objects come back: there is nothing to wait for, and asking costs as much again.
    assert all(x is y is z for x, y, z in zip(there, ours(0), device_put(0), strict=True))
    work = "1000 leaves already in place"
    yield duel(work, ours, {"jax.device_put": device_put}, 101 * effort, 0.25, wait=False)
    yield duel(work, ours, {"equinox.filter_shard": filter_shard}, 25 * effort, 0.01, wait=False)


def put(effort: float) -> Iterator[Row]:
    small, large = leaves(1000), big()
    for name, target in LAYOUTS.items():
        if target is not COLUMNS:
            yield from put_one(f"1000 NumPy leaves, {name}", small, target, 61 * effort)
    for name, target in LAYOUTS.items():
        yield from put_one(f"64 MB of NumPy, {name}", large, target, 31 * effort)
    # Plain `device_put` moves no byte here, and neither do we: the fixed costs of two calls.
    lucky = big(offset=0)
    yield duel(
        "64 MB of aligned NumPy, by rows, `may_alias=True`: no byte moves",
        lambda _: mylib.filter_device_put(lucky, ROWS, may_alias=True),
        {"jax.device_put": lambda _: jax.device_put(lucky, ROWS)},
        61 * effort,
    )


def put_one(work: str, tree: Any, target: NamedSharding, repeats: float) -> Iterator[Row]:
    def ours(_: Any) -> Any:
        return mylib.filter_shard(tree, target)

    def device_put_of_copies(_: Any) -> Any:
        # The copies are part of the job: `device_put` may share memory with what it is given.
        return jax.device_put(jax.tree.map(np.copy, tree), target)

    def ours_sharing(_: Any) -> Any:
        return mylib.filter_device_put(tree, target, may_alias=True)

    def device_put(_: Any) -> Any:
        return jax.device_put(tree, target)

    same_work([ours, device_put_of_copies, ours_sharing, device_put], tree, target)
    peers = {"jax.device_put of copies": device_put_of_copies}
    yield duel(work, ours, peers, repeats, 1.1)
    peers = {"jax.device_put": device_put}
    yield duel(f"{work}, `may_alias=True`", ours_sharing, peers, repeats, 1.05)


FIRST_CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "mylib.filter_shard": mylib.filter_shard,
    "equinox.filter_shard": eqx.filter_shard,
    "jax.device_put": jax.device_put,
}


def first_call(effort: float) -> Iterator[Row]:
    """Each measurement in a process of its own: what one call compiles, the next one finds."""
    ours = median(in_new_process("mylib.filter_shard") for _ in range(max(1, round(5 * effort))))
    work = "200 leaves of 200 shapes, one device to a mesh, first call"
    for peer, limit in ("equinox.filter_shard", 0.05), ("jax.device_put", None):
        theirs = in_new_process(peer)
        ratio = ours / theirs
        yield Row(work, show(ours), f"{peer}, {show(theirs)}", ratio, *at_most(limit, ratio))
    yield Row(work, show(ours), "one second", ours, *at_most(1.0, ours))


def in_new_process(name: str) -> float:
    command = [sys.executable, __file__, "--first-call", name]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def time_of_first_call(place: Callable[[Any, Any], Any]) -> float:
    shapes = [(8 + 8 * (i % 20), 1 + i // 20) for i in range(200)]
    # Uncommitted, and so on one device: what initialising a model leaves behind.
    tree = jax.block_until_ready([jnp.asarray(np.full(s, 1, np.float32)) for s in shapes])
    assert len(set(shapes)) == 200 and all(len(x.devices()) == 1 for x in tree)
    seconds = stopwatch(lambda _: place(tree, ROWS), None)
    same_work([lambda _: place(tree, ROWS)], tree, ROWS)
    return seconds


RESHARDS = {
    "rows to columns": (ROWS, COLUMNS),
    "rows to replicated": (ROWS, REPLICATED),
    "replicated to rows": (REPLICATED, ROWS),
    "2-D, axes swapped": (NamedSharding(GRID, P("a", "b")), NamedSharding(GRID, P("b", "a"))),
}


def reshard(effort: float) -> Iterator[Row]:
    for name, (source, target) in RESHARDS.items():
        fresh = fresh_copies(big(), source)
        # `device_put` passes the memory of a replicated array on, so that donating its result
        # deletes the source. What copies nothing is no peer of a copy.
        passes_on = source is REPLICATED
        peers = reshards(target, donate=False)
        if passes_on:
            del peers["jax.device_put"]
        calls: list[Call] = [lambda x, to=target: mylib.filter_shard(x, to), *peers.values()]
        same_work(calls, fresh(), target)
        work = f"64 MB resharded, {name}"
        yield duel(work, calls[0], peers, 31 * effort, 1.1, fresh)


def fresh_copies(x: np.ndarray, source: NamedSharding) -> Callable[[], jax.Array]:
    """New arrays at `source`: `device_put` remembers on an array what it read from it, and a
    donated one is gone.
    """
    base = jax.device_put(x.copy(), source)
    copy = jax.jit(jnp.copy, out_shardings=source)
    return lambda: jax.block_until_ready(copy(base))


def reshards(target: Any, donate: bool) -> dict[str, Call]:
    return {
        "jax.device_put": lambda x: jax.device_put(x, target, donate=donate),
        "a compiled identity": compiled_identity(target, donate),
    }


def compiled_identity(target: Any, donate: bool) -> Call:
    return jax.jit(lambda x: x, out_shardings=target, donate_argnums=(0,) if donate else ())


def trace(effort: float) -> Iterator[Row]:
    tree = [jnp.asarray(x) for x in leaves(200)]
    work = "`jit` tracing of a 200-leaf constraint"
    constrain = jax.lax.with_sharding_constraint
    name = "jax.lax.with_sharding_constraint"
    yield trace_one(work, tree, ROWS, name, constrain, 101 * effort, 1.3)
    explicit = NamedSharding(jax.make_mesh((8,), ("x",)), P("x"))
    tree = jax.device_put(tree, explicit.update(spec=P()))
    work += ", Explicit axes"
    yield trace_one(
        work, tree, explicit, "jax.sharding.reshard", jax.sharding.reshard, 101 * effort
    )


def trace_one(
    work: str,
    tree: Any,
    target: NamedSharding,
    peer_name: str,
    peer: Callable[[Any, Any], Any],
    repeats: float,
    limit: float | None = None,
) -> Row:
    # A new function every time, as JAX remembers the traces of those that it knows.
    def ours(_: Any) -> Any:
        return jax.jit(lambda t: mylib.filter_shard(t, target)).trace(tree)

    def theirs(_: Any) -> Any:
        return jax.jit(lambda t: peer(t, target)).trace(tree)

    equations = [len(traced(None).jaxpr.eqns) for traced in (ours, theirs)]
    assert min(equations) >= len(tree)
    return duel(work, ours, {peer_name: theirs}, repeats, limit)


def growth(effort: float) -> Iterator[Row]:
    """The times are those of one leaf."""
    yield from growth_of("kept", effort)
    yield from growth_of("put from NumPy", effort)


def growth_of(fate: str, effort: float) -> Iterator[Row]:
    each: dict[int, float] = {}
    for count in 10, 100, 1000, 10000:
        tree = leaves(count)
        if fate == "kept":
            tree = jax.block_until_ready(jax.device_put(tree, ROWS))
        calls: list[Call] = [
            lambda _, tree=tree: mylib.filter_shard(tree, ROWS),
            lambda _, tree=tree: jax.device_put(tree, ROWS),
        ]
        times = race(calls, min(201, 30_000 / count) * effort, wait=fate != "kept")
        times = [[seconds / count for seconds in turns] for turns in times]
        each[count] = median(times[0])
        (row,) = compare(f"each of {count} leaves, {fate}", times, ["jax.device_put"])
        if count == 10000:
            # Linear: a leaf of a large tree costs no more than one of a small tree.
            limit = 1.5 * each[1000]
            row = row._replace(promise=f"≤ {show(limit)}", kept=each[count] <= limit)
        yield row


def transports(effort: float) -> Iterator[Row]:
    """Why a tree is moved the way it is."""
    few = max(3, 7 * effort)
    many = "1000 small arrays, rows to columns"
    yield from transports_of(many, leaves(1000), ROWS, COLUMNS, few)
    yield from transports_of("64 MB, rows to columns", big(), ROWS, COLUMNS, few)
    for size in 1, 16, 64:
        work = f"{size} MB, replicated to rows"
        yield from transports_of(work, big(megabytes=size), REPLICATED, ROWS, few)


def transports_of(
    work: str, value: Any, source: NamedSharding, target: NamedSharding, repeats: float
) -> Iterator[Row]:
    copies = [fresh_copies(x, source) for x in jax.tree.leaves(value)]

    def fresh() -> list[jax.Array]:
        return [copy() for copy in copies]

    # A whole copy on every device is too large to be used again for a part of it.
    for donate in (False,) if source is REPLICATED else (False, True):
        # `device_put` passes the memory of a replicated array on, which is no copy.
        peers = reshards([target] * len(copies), donate)
        if source is REPLICATED:
            del peers["jax.device_put"]
        peers["jax.device_put of host copies"] = lambda tree: jax.device_put(
            [np.array(x) for x in tree], target
        )
        calls: list[Call] = [
            lambda tree, donate=donate: mylib.filter_device_put(tree, target, donate=donate),
            *peers.values(),
        ]
        times = race(calls, repeats, fresh)
        yield from compare(f"{work}, `donate=True`" if donate else work, times, peers)
        if not donate:
            # A tree of other shapes, or to other places, needs another program.
            program = compiled_identity([target] * len(copies), donate=False)
            first = stopwatch(program, fresh())
            peer = f"a compiled identity, its first call, {show(first)}"
            yield Row(work, show(median(times[0])), peer, median(times[0]) / first)


SECTIONS: dict[str, Callable[[float], Iterator[Row]]] = {
    "keep": keep,
    "put": put,
    "first": first_call,
    "reshard": reshard,
    "trace": trace,
    "growth": growth,
    "transports": transports,
}

if __name__ == "__main__":
    main()

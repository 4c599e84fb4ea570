"""What `filter_shard_map` costs, beside `jax.shard_map`, and what `opaque` and four bytes save.

    python benchmarks/shard_map.py            every row, some minutes
    python benchmarks/shard_map.py --quick    fewer repeats, for a rough look

How ours and the peers are timed is told in side_by_side.py. A ratio below 1 is in our favour.
"""

import sys
from pathlib import Path

# The example of evolution strategies is what is timed here; it also asks for 8 simulated devices.
# What a program communicates is read as the tests read it.
sys.path += [str(Path(__file__).resolve().parent.parent / name) for name in ("examples", "tests")]
import evolution_strategies as evolution

# isort: split
import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import _hlo
import equinox as eqx
import jax
import jax.numpy as jnp
import opaque_kernel
from jax.sharding import AxisType, PartitionSpec as P
from side_by_side import Row, at_most, compare, duel, print_header, print_row, race

import mylib

MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
ROWS = P("data")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    effort = 0.2 if parser.parse_args().quick else 1.0
    print_header("8 simulated CPU devices")
    for section in calling, tracing, opaque_copies, split_kernels, evolving:
        for row in section(effort):
            print_row(row.cells())


def rows(count: int) -> list[jax.Array]:
    return [mylib.filter_shard(jnp.ones((8, 4)), ROWS, mesh=MESH) for _ in range(count)]


def mapped_by(transform: Callable[..., Any], fun: Callable[..., Any]) -> Callable[..., Any]:
    return transform(fun, mesh=MESH, in_specs=ROWS, out_specs=ROWS)


def by_jax(fun: Callable[..., Any]) -> Any:
    return jax.jit(mapped_by(jax.shard_map, fun))


def by_us(fun: Callable[..., Any]) -> Any:
    return mapped_by(mylib.filter_shard_map, fun)


def calling(effort: float) -> Iterator[Row]:
    """Small arrays: what is measured is not the work. The clock stops when ten calls have returned:
    one alone begins with empty caches, as no loop does.
    """
    for count in 6, 100, 600:
        arrays = rows(count)

        def add_one(xs: list[jax.Array]) -> list[jax.Array]:
            return [x + 1 for x in xs]

        functions = [by_us(add_one), by_jax(add_one)]
        calls = [partial(ten_calls, f, arrays) for f in functions]
        times = race(calls, effort * (100 if count < 600 else 30))
        peers = ["`jax.jit(jax.shard_map)` of a list of arrays"]
        yield from compare(f"ten calls with {count} arrays", times, peers, 1.2)


def ten_calls(f: Callable[..., Any], arrays: list[jax.Array], _: Any) -> list[Any]:
    return [f(arrays) for _ in range(10)]


def tracing(effort: float) -> Iterator[Row]:
    arrays = rows(200)

    def work(xs: list[jax.Array]) -> list[jax.Array]:
        for _ in range(3):
            xs = [jnp.sin(x) * 2 + jax.lax.psum(x, "data") for x in xs]
        return xs

    # A function of its own each time: else JAX has it traced already.
    def lower(how: Callable[..., Any], _: Any) -> Any:
        return how(lambda xs: work(xs)).lower(arrays)

    peers = {"`jax.jit(jax.shard_map)`": partial(lower, by_jax)}
    yield duel("tracing and lowering 200 arrays", partial(lower, by_us), peers, 15 * effort, 1.2)


def opaque_copies(effort: float) -> Iterator[Row]:
    """The gradient of a kernel that copies, split over "data" alone, on a mesh that has "model",
    too. There is nothing to communicate.
    """

    def kernel(source: Any, target: Any) -> None:
        target[...] = source[...]

    def copy_of(x: jax.Array) -> jax.Array:
        return opaque_kernel.call(kernel, x, shape=opaque_kernel.like(x))

    @mylib.opaque(fwd=lambda x: (copy(x), None), bwd=lambda _, g: (copy_of(g),))
    def copy(x: jax.Array) -> jax.Array:
        return copy_of(x)

    x = mylib.filter_shard(jnp.ones((256, 1024)), P("data", None), mesh=MESH)

    def gradient(checked: bool) -> Any:
        spec = P("data", None)
        f = mylib.filter_shard_map(
            copy, mesh=MESH, in_specs=spec, out_specs=spec, check_vma=checked
        )
        return mylib.filter_jit(jax.grad(lambda x: jnp.sum(f(x) ** 2)))

    with_it, without = gradient(True), gradient(False)
    work = "gradient of an opaque copy"
    yield duel(work, lambda _: with_it(x), {"`check_vma=False`": lambda _: without(x)}, 30 * effort)
    ours, theirs = (_hlo.collectives(f.lower(x).compile().as_text()) for f in (with_it, without))
    counts = f"{len(ours)} collectives", f"`check_vma=False`, {len(theirs)}"
    ratio = len(ours) / len(theirs)
    yield Row(work, *counts, ratio, *at_most(0, ratio))


def split_kernels(effort: float) -> Iterator[Row]:
    """A call of many small kernels that the compiler's partitioner splits, beside a `shard_map`
    around each; and on one device, beside the plain function.
    """

    def kernel(x: jax.Array) -> jax.Array:
        return jax.nn.softmax(jnp.sin(x))

    def many(f: Callable[[jax.Array], jax.Array]) -> Any:
        def run(x: jax.Array) -> jax.Array:
            for _ in range(20):
                x = f(x)
            return x

        return jax.jit(run)

    ours = many(mylib.opaque(kernel, like=kernel))
    by_hand = many(mapped_by(jax.shard_map, kernel))
    x = mylib.filter_shard(jnp.ones((1024, 256)), ROWS, mesh=MESH)
    peers = {"`jax.shard_map` around each": lambda _: by_hand(x)}
    yield duel("20 kernels split by opaque", lambda _: ours(x), peers, 30 * effort, 1.05)
    plain, one = many(kernel), jnp.ones((1024, 256))
    peers = {"the plain function": lambda _: plain(one)}
    yield duel("the same on one device", lambda _: ours(one), peers, 30 * effort, 1.05)


def evolving(effort: float) -> Iterator[Row]:
    model, data = evolution.make_model(), evolution.make_data()
    directions = [evolution.direction_made_again, evolution.direction_sent]
    work = f"{evolution.STEPS} steps of evolution strategies"
    calls = [
        partial(lambda d, _: eqx.filter(evolution.train(model, data, d), eqx.is_array), direction)
        for direction in directions
    ]
    yield from compare(work, race(calls, 8 * effort), ["the gradient's way"])
    ours, theirs = (
        sent_in(evolution.train.lower(model, data, direction).compile().as_text())
        for direction in directions
    )
    ratio = ours / theirs
    yield Row(
        "bytes that a device sends in one step",
        f"{ours} B",
        f"the gradient's way, {theirs} B",
        ratio,
        *at_most(1e-4, ratio),
    )


def sent_in(text: str) -> int:
    """The bytes of one device's own part, in all collectives of a program."""
    return sum(
        collective.nbytes // (8 if collective.kind == "all-gather" else 1)
        for collective in _hlo.collectives(text)
    )


if __name__ == "__main__":
    main()

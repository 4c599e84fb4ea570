"""What `filter_jit` costs, beside `equinox.filter_jit` and `jax.jit`.

    python benchmarks/jit.py            every row, some minutes
    python benchmarks/jit.py --quick    fewer repeats, for a rough look

How ours and the peers are timed is told in side_by_side.py. A ratio below 1 is in our favour.
"""

import sys
from pathlib import Path

# The example's model is the one that is trained here; it also asks for 8 simulated devices.
sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
import strategies

# isort: split
import argparse
import itertools
import time
import warnings
from collections.abc import Iterator
from statistics import median
from typing import Any
from unittest import mock

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
)

import mylib
from mylib._training.advice import about_replicated
from mylib._training.jit import advise
from mylib.rules import fsdp, replicated

MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    effort = 0.2 if parser.parse_args().quick else 1.0
    print_header("8 simulated CPU devices")
    for section in calling, calling_static, returning, tracing, warning, training, being_born:
        for row in section(effort):
            print_row(row.cells())


def add_one(tree: Any) -> Any:
    return jax.tree.map(lambda x: x + 1 if eqx.is_array(x) else x, tree)


def calling(effort: float) -> Iterator[Row]:
    """Models of tiny layers: what is measured is not the work. The call returns, and the clock
    stops; Equinox's own waits for the work, which takes 10 or 20 µs here.
    """
    for depth in 2, 49, 299:
        model = eqx.nn.MLP(2, 2, 2, depth, key=jax.random.key(0))
        arrays = eqx.filter(model, eqx.is_array)
        flat = jax.tree.leaves(arrays)
        peers = {
            "equinox.filter_jit": (eqx.filter_jit(add_one), model),
            "jax.jit of the arrays as a tree": (jax.jit(add_one), arrays),
            "jax.jit of a list of arrays": (jax.jit(add_one), flat),
        }
        functions = [(mylib.filter_jit(add_one), model), *peers.values()]
        calls: list[Call] = [lambda _, f=f, x=x: f(x) for f, x in functions]
        times = race(calls, 1001 * effort, wait=False)
        work = f"a call with {len(flat)} arrays"
        for row, limit in zip(compare(work, times, peers), (0.9, None, None), strict=True):
            yield row._replace(
                promise=at_most(limit, row.ratio)[0], kept=at_most(limit, row.ratio)[1]
            )


def calling_static(effort: float) -> Iterator[Row]:
    tree = {"x": jnp.ones(4), **{f"k{i}": i for i in range(20_000)}}
    ours, theirs = mylib.filter_jit(add_one), eqx.filter_jit(add_one)
    peers: dict[str, Call] = {"equinox.filter_jit": lambda _: theirs(tree)}
    times = race([lambda _: ours(tree), *peers.values()], max(5, 31 * effort), wait=False)
    for row in compare("a call with 20,000 static leaves", times, peers):
        promise, kept = at_most(1.0, row.ratio)
        yield row._replace(promise=promise, kept=kept)


def returning(effort: float) -> Iterator[Row]:
    def long(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 100, lambda _, x: jnp.tanh(x @ x), x)

    x = jnp.eye(500)
    ours, theirs = mylib.filter_jit(long), eqx.filter_jit(long)
    bare = jax.jit(long)
    peers: dict[str, Call] = {
        "equinox.filter_jit": lambda _: theirs(x),
        "jax.jit": lambda _: bare(x),
        "the work itself": lambda _: jax.block_until_ready(bare(x)),
    }
    times = race([lambda _: ours(x), *peers.values()], max(5, 15 * effort), wait=False)
    yield from compare("until a call comes back", times, peers)


def tracing(effort: float) -> Iterator[Row]:
    tree = [jnp.ones((8 + 8 * (i % 10), 64)) for i in range(200)]
    targets = [NamedSharding(MESH, P("data"))] * len(tree)

    def ours(_: Any) -> Any:
        return mylib.filter_jit(lambda t: add_one(t), out_shardings=targets).lower(tree)

    def theirs(_: Any) -> Any:
        return eqx.filter_jit(lambda t: eqx.filter_shard(add_one(t), targets[0])).lower(tree)

    def bare(_: Any) -> Any:
        return jax.jit(lambda t: add_one(t), out_shardings=targets).lower(tree)

    work = "tracing and lowering 200 results with shardings"
    peers = {"equinox.filter_jit and filter_shard": theirs, "jax.jit": bare}
    times = race([ours, *peers.values()], 31 * effort, wait=False)
    yield from compare(work, times, peers)


def warning(effort: float) -> Iterator[Row]:
    """The search for products that all devices compute, as a part of the call that compiles. It
    goes on to the end in the first, which tells what it found; in the second the batch is placed.
    CPU time, as other programs' turns would count as the search's.
    """
    seconds: list[float] = []

    def timed(*args: Any) -> bool:
        start = time.thread_time()
        was_told = about_replicated(*args)
        seconds.append(time.thread_time() - start)
        return was_told

    batch = np.ones((2048, 256), np.float32)
    where = {"NumPy": None, "placed": NamedSharding(MESH, P("data"))}
    for (name, target), depth in itertools.product(where.items(), (2, 24)):
        model = eqx.nn.MLP(256, 256, 256, depth, key=jax.random.key(0))
        model = mylib.filter_shard(model, replicated(), mesh=MESH)
        given = batch if target is None else jax.device_put(batch, target)
        spent, parts = [], []
        for _ in range(max(3, round(9 * effort))):
            jax.clear_caches()
            seconds.clear()
            step = mylib.filter_jit(eqx.filter_grad(lambda m, x: jnp.sum(jax.vmap(m)(x) ** 2)))
            with mock.patch.object(advise, "about_replicated", timed), warnings.catch_warnings():
                warnings.simplefilter("ignore", mylib.errors.ReplicatedWarning)
                start = time.process_time()
                jax.block_until_ready(jax.tree.leaves(step(model, given)))
                whole = time.process_time() - start
            spent.append(sum(seconds))
            parts.append(sum(seconds) / whole)
        ratio = median(parts)
        within = ratio <= 0.01 or median(spent) <= 3e-3
        work = f"looking for undivided work, {depth} layers, a batch that is {name}"
        shown = show(median(spent)), f"the call that compiles, {show(median(spent) / ratio)}"
        yield Row(work, *shown, ratio, "≤ 0.01, or 3 ms", within)


def training(effort: float) -> Iterator[Row]:
    text = strategies.texts()[0]
    for name, (kept, used) in strategies.STRATEGIES.items():
        with jax.set_mesh(MESH):
            made = mylib.filter_jit(strategies.make, out_shardings=kept)
            start = made(jax.random.key(0))
            targets = mylib.resolve(start, kept)
            tokens = mylib.filter_shard(text, P("data"))

            def step(
                model: Any, state: Any, tokens: Any, kept: Any = kept, used: Any = used
            ) -> Any:
                def loss(model: Any) -> Any:
                    return strategies.loss_of(
                        mylib.fully_shard(model, strategies.Block, kept, used), tokens
                    )

                grads = eqx.filter_grad(loss)(model)
                arrays = eqx.filter(model, eqx.is_array)
                updates, state = strategies.OPTIMISER.update(grads, state, arrays)
                return eqx.apply_updates(model, updates), state

            def pinned(model: Any, state: Any, tokens: Any, to: Any = targets) -> Any:
                return eqx.filter_shard(step(model, state, tokens), to)

            ours = mylib.filter_jit(step, out_shardings=targets)
            theirs = eqx.filter_jit(pinned)
            yield duel(
                f"a training step, {name}",
                lambda _, f=ours, s=start, t=tokens: jax.tree.leaves(f(*s, t)),
                {
                    "equinox.filter_jit and filter_shard": lambda _, f=theirs, s=start, t=tokens: (
                        jax.tree.leaves(f(*s, t))
                    )
                },
                max(9, 61 * effort),
                1.0,
            )


def being_born(effort: float) -> Iterator[Row]:
    """Memory, not time: what a device needs at most while a model of 32 MiB comes into being, by
    the compiler's own count, and the eighth of the model that it holds in the end.
    """
    rule = fsdp(("data", "model"))
    for name, placement, limit in ("born sharded", rule, 1.1), ("born whole", replicated(), None):
        make = mylib.filter_jit(eqx.nn.MLP, out_shardings=placement, mesh=MESH)
        lowered = make.lower(1024, 1024, 1024, 7, key=jax.random.key(0))
        peak = lowered.compile().compiled.memory_analysis().peak_memory_in_bytes
        model = eqx.filter_eval_shape(eqx.nn.MLP, 1024, 1024, 1024, 7, key=jax.random.key(0))
        share = mylib.explain(model, rule, MESH).most_loaded[1]
        ratio = peak / share
        shown = (f"{peak / 2**20:.3g} MiB at most", f"its share, {share / 2**20:.3g} MiB")
        yield Row(f"memory of a device for a model {name}", *shown, ratio, *at_most(limit, ratio))


if __name__ == "__main__":
    main()

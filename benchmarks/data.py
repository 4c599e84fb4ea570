"""What it saves to make batches ahead of time, and what `to_global` costs.

    python benchmarks/data.py            every row, about four minutes
    python benchmarks/data.py --quick    fewer repeats, for a rough look

Ours and the peer take turns, and a ratio is the median over the turns of our time by the peer's in
the same turn. The times beside it are medians too, and only rough. `ok` says whether the ratio is
what the library promises; a promise that is broken is shown as MISSED.

A source sleeps, as one that waits for a disk or a network does; a step computes, for as long as was
measured to take 50 ms here, and is waited for, as a loop does that reads its loss.
"""

import os
import sys
from pathlib import Path

# Read when JAX starts.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
)
# By default as many threads as cores, and with fewer than devices JAX 0.10 may abort.
os.environ.setdefault("NPROC", "32")
# The language model is that of the tests, not benchmarks/models.py.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

# isort: split
import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
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
from mylib._moving.processes.agreement import _EVERY, checksum

# Auto axes: equinox.filter_shard takes no others.
MESH = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
ROWS = NamedSharding(MESH, P("data"))
STEPS, DELAY = 40, 0.05

Step = Callable[[Any], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    scale = 0.2 if parser.parse_args().quick else 1.0
    print_header("8 simulated CPU devices")
    rows = (*overlapping(scale), *idle(), *compared(), *placing(scale), *language_model(scale))
    for row in rows:
        print_row(row.cells())


def overlapping(scale: float) -> Iterator[Row]:
    ours, theirs = compute(mylib.filter_jit), compute(eqx.filter_jit)
    batch = mylib.filter_shard(next(source(1, 0.0)), ROWS)

    def prefetched(_: Any) -> None:
        with mylib.data.prefetch(source(STEPS, DELAY), ROWS) as batches:
            run(ours, batches)

    def one_after_the_other(_: Any) -> None:
        run(theirs, (eqx.filter_shard(batch, ROWS) for batch in source(STEPS, DELAY)))

    alone: dict[str, Call] = {
        "the source alone": lambda _: list(source(STEPS, DELAY)),
        "the step alone": lambda _: run(ours, [batch] * STEPS),
    }
    peers = {**alone, "for b in loader: eqx.filter_shard, eqx.filter_jit": one_after_the_other}
    times = race([prefetched, *peers.values()], 5 * scale)
    work = f"{STEPS} steps of 50 ms, a source of 50 ms"
    rows = list(compare(work, times, peers))
    longer = min(rows[:2], key=lambda row: row.ratio)
    yield longer._replace(promise="≤ 1.1", kept=longer.ratio <= 1.1)
    yield rows[2]._replace(promise="≤ 0.6", kept=rows[2].ratio <= 0.6)


def idle() -> Iterator[Row]:
    batches = mylib.data.prefetch(source(STEPS, 0.001), ROWS)
    run(compute(mylib.filter_jit), batches)
    timing = batches.timing
    ratio = timing.waited / timing.total
    work = f"{STEPS} steps of 50 ms, a source of 1 ms: time waited for data"
    yield Row(work, show(timing.waited), f"of {show(timing.total)}", ratio, *at_most(0.02, ratio))


def compared() -> Iterator[Row]:
    """Several processes compare whole values in every hundredth call. Here is one, which reads the
    same numbers for it.
    """
    batch = [np.full((512, 512), i, np.float32) for i in range(20)]
    seconds = min(stopwatch(lambda x: checksum(x, np.float32), batch) for _ in range(20))
    ratio = seconds / _EVERY / DELAY
    work = "whole values of 20 MB compared, in every 100th step of 50 ms"
    yield Row(work, show(seconds), f"of {show(_EVERY * DELAY)}", ratio, *at_most(0.01, ratio))


def placing(scale: float) -> Iterator[Row]:
    batch = [np.full((512, 512), i, np.float32) for i in range(20)]
    yield duel(
        "to_global of 20 NumPy arrays of 1 MB",
        lambda _: mylib.data.to_global(batch, ROWS),
        {"device_put of copies": lambda _: jax.device_put([x.copy() for x in batch], ROWS)},
        100 * scale,
        limit=1.1,
    )
    yield duel(
        "the same, `may_alias=True`",
        lambda _: mylib.data.to_global(batch, ROWS, may_alias=True),
        {"device_put": lambda _: jax.device_put(batch, ROWS)},
        300 * scale,
        limit=1.05,
    )


def language_model(scale: float) -> Iterator[Row]:
    """Text is cut up letter by letter in Python, and a disk is waited for a little."""
    model = models.Transformer(width=128, hidden=512, depth=4, key=jax.random.key(0))
    optim = optax.adamw(1e-3)
    state = optim.init(eqx.filter(model, eqx.is_array))
    text = Path(models.__file__).read_text() * 10
    steps, size = 20, 128

    def source() -> Iterator[np.ndarray]:
        starts = np.random.default_rng(0).integers(0, len(text) - models.LENGTH, (steps, size))
        for each in starts:
            time.sleep(0.02)
            letters = [text[start : start + models.LENGTH].encode() for start in each]
            yield np.frombuffer(b"".join(letters), np.uint8).reshape(size, -1) % models.VOCAB

    @mylib.filter_jit(out_shardings=P(), mesh=MESH)
    def step(model: Any, state: Any, tokens: jax.Array) -> Any:
        @eqx.filter_value_and_grad
        def loss(model: Any) -> jax.Array:
            scores = jax.vmap(model)(tokens)[:, :-1]
            found = optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:])
            return jnp.mean(found)

        value, grads = loss(model)
        updates, state = optim.update(grads, state, model)
        return value, eqx.apply_updates(model, updates), state

    def train(batches: Iterable[Any]) -> None:
        current = mylib.filter_shard((model, state), P(), mesh=MESH)
        for tokens in batches:
            value, *current = step(*current, tokens)
            float(value)

    calls = [
        lambda _: train(mylib.data.prefetch(source(), ROWS)),
        lambda _: train(mylib.data.to_global(batch, ROWS) for batch in source()),
    ]
    times = race(calls, 5 * scale)
    (row,) = compare(f"{steps} steps of a small GPT, its loader overlapped", times, ["in turn"])
    tokens = steps * size * models.LENGTH
    rates = [f"{tokens / np.median(each):,.0f} tokens/s" for each in times]
    yield row._replace(ours=rates[0], peer=f"in turn, {rates[1]}")


def source(count: int, delay: float) -> Iterator[np.ndarray]:
    """One buffer, filled again for each batch."""
    x = np.zeros((64, 256), np.float32)
    for i in range(count):
        time.sleep(delay)
        x[:] = i
        yield x


def compute(jit: Any) -> Step:
    """A step that takes 50 ms, whatever the machine: so many products of matrices."""

    @jit
    def step(x: jax.Array, turns: jax.Array) -> jax.Array:
        weight = jnp.eye(x.shape[1]) * 0.5
        return jax.lax.fori_loop(0, turns, lambda _, y: y @ weight + x, x).sum()

    x = mylib.filter_shard(next(source(1, 0.0)), ROWS)
    turns = 100
    for _ in range(5):
        seconds = min(stopwatch(lambda n: step(x, jnp.asarray(n)), turns) for _ in range(5))
        turns = max(1, round(turns * DELAY / seconds))
    wanted = jnp.asarray(turns)
    return lambda x: step(x, wanted)


def run(step: Step, batches: Iterable[Any]) -> None:
    for batch in batches:
        jax.block_until_ready(step(batch))


if __name__ == "__main__":
    main()

"""How good the search of `mylib.plan` is: its choice beside the best of all candidates.

    python benchmarks/plan_search.py             ten steps, all candidates compiled: half an hour
    python benchmarks/plan_search.py --only tall steps with this in their name
    python benchmarks/plan_search.py --measured  six steps, run on 8 simulated devices

The first needs compilers (`pip install '.[gpu-compiler,tpu-compiler]'`), and no GPU or TPU.
"""

import argparse
import math
import os
import time
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("NPROC", "32")

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from side_by_side import print_header, print_row

import mylib
from mylib._planning.plan.candidates import (
    RESERVE,
    LiveCandidate,
    compiled as compile_for,
    ordered,
    priced,
    to_compile,
)
from mylib._planning.plan.price import with_figures
from mylib._planning.plan.trace import PlannedStep, trace

OPTIM = optax.adamw(1e-3)
GIB = 2**30


class Experts(eqx.Module):
    """Two experts for each row, as products over all of them."""

    choose: jax.Array
    up: jax.Array
    down: jax.Array

    def __init__(self, count: int, width: int, hidden: int, key: jax.Array):
        keys = jax.random.split(key, 3)
        self.choose = jax.random.normal(keys[0], (width, count))
        self.up = jax.random.normal(keys[1], (count, width, hidden))
        self.down = jax.random.normal(keys[2], (count, hidden, width))

    def __call__(self, x: jax.Array) -> jax.Array:
        best, _ = jax.lax.top_k(x @ self.choose, 2)
        weights = jax.nn.softmax(jnp.where(x @ self.choose >= best[..., 1:], x @ self.choose, -1e9))
        y = jax.nn.gelu(jnp.einsum("...d,edh->...eh", x, self.up))
        return x + jnp.einsum("...eh,ehd,...e->...d", y, self.down, weights)


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width: int, hidden: int, heads: int, key: jax.Array):
        keys = jax.random.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=keys[0])
        self.up = eqx.nn.Linear(width, hidden, key=keys[1])
        self.down = eqx.nn.Linear(hidden, width, key=keys[2])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(x, x, x)
        return x + jax.vmap(lambda y: self.down(jax.nn.gelu(self.up(y))))(x)


class Convolution(eqx.Module):
    weights: eqx.nn.Conv2d

    def __init__(self, channels: int, key: jax.Array):
        self.weights = eqx.nn.Conv2d(channels, channels, 3, padding=1, key=key)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jax.nn.relu(self.weights(x.astype(self.weights.weight.dtype)))


class Recurrent(eqx.Module):
    cell: eqx.nn.GRUCell

    def __init__(self, width: int, key: jax.Array):
        self.cell = eqx.nn.GRUCell(width, width, key=key)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, x: (self.cell(x, h),) * 2, jnp.zeros_like(x[0]), x)[1]


class Hidden(eqx.Module):
    weights: jax.Array

    def __init__(self, width: int, key: jax.Array):
        self.weights = jax.random.normal(key, (width, width))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jax.nn.relu(x @ self.weights)


class Chain(eqx.Module):
    layers: list[Any]

    def __init__(self, make: Callable[[jax.Array], Any], depth: int, key: jax.Array):
        self.layers = [make(x) for x in jax.random.split(key, depth)]

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


class Words(eqx.Module):
    embed: eqx.nn.Embedding
    chain: Chain

    def __init__(self, vocab: int, width: int, chain: Chain, key: jax.Array):
        self.embed, self.chain = eqx.nn.Embedding(vocab, width, key=key), chain

    def __call__(self, words: jax.Array) -> jax.Array:
        return self.chain(self.embed.weight[words]) @ self.embed.weight.T


def squared(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(jax.vmap(model)(x).astype(jnp.float32)))


def of_words(model: Any, words: jax.Array) -> jax.Array:
    logits = jax.nn.log_softmax(jax.vmap(model)(words).astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(logits, jnp.roll(words, -1, 1)[..., None], -1))


class Case(NamedTuple):
    name: str
    make: Callable[[jax.Array], Any]
    layers: type
    batch: Any
    memory: float | None = None
    loss: Callable[..., jax.Array] = squared


def numbers(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def whole(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def mlp(width: int, hidden: int, depth: int) -> Callable[[jax.Array], Any]:
    return lambda key: eqx.nn.MLP(width, width, hidden, depth, key=key)


def cases(small: int) -> tuple[Case, ...]:
    """`small` divides widths and batches."""

    def n(size: int) -> int:
        return max(size // small, 16)

    blocks = lambda key: Chain(lambda key: Block(n(2048), n(8192), 8, key), 4, key)  # noqa: E731
    linear = eqx.nn.Linear
    return (
        Case("MLP, wide", mlp(n(8192), n(32768), 2), linear, numbers(n(4096), n(8192))),
        Case("MLP, wide, tight", mlp(n(8192), n(32768), 2), linear, numbers(n(4096), n(8192)),
             6 * GIB),
        Case("MLP, tall", mlp(n(4096), n(4096), 16), linear, numbers(n(4096), n(4096))),
        Case("MLP, large batch", mlp(n(2048), n(8192), 2), linear, numbers(n(262144), n(2048))),
        Case("transformer", blocks, Block, numbers(n(256), n(1024), n(2048))),
        Case("transformer, tight", blocks, Block, numbers(n(256), n(1024), n(2048)), 12 * GIB),
        Case("embedding", lambda key: Words(n(131072), n(2048), Chain(
            lambda key: Hidden(n(2048), key), 1, key), key), Hidden,
            whole(n(256), n(512)), loss=of_words),
        Case("convolutions", lambda key: Chain(lambda key: Convolution(n(512), key), 6, key),
             Convolution, numbers(n(512), n(512), 32, 32)),
        Case("experts", lambda key: Chain(lambda key: Experts(16, n(2048), n(4096), key), 3, key),
             Experts, numbers(n(256), n(512), n(2048))),
        Case("recurrent", lambda key: Chain(lambda key: Recurrent(n(2048), key), 2, key),
             Recurrent, numbers(n(512), 64, n(2048))),
    )  # fmt: skip


def step_of(case: Case, dtype: Any = None) -> Callable[..., Any]:
    def step(batch: jax.Array, model: Any, state: Any) -> Any:
        if case.loss is squared:
            batch = batch.astype(dtype)
        value, grads = eqx.filter_value_and_grad(case.loss)(model, batch)
        updates, state = OPTIM.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, value

    return step


def arguments(case: Case) -> tuple[Any, Any, Any]:
    model = eqx.filter_eval_shape(case.make, jax.random.key(0))
    state = eqx.filter_eval_shape(lambda x: OPTIM.init(eqx.filter(x, eqx.is_inexact_array)), model)
    return case.batch, model, state


def planned(case: Case, **options: Any) -> mylib.Plan:
    return mylib.plan(step_of(case), *arguments(case), layers=case.layers, **options)


def candidates(case: Case, known: mylib.machines.Machine, room: float) -> list[LiveCandidate]:
    """Of each policy and mesh the cheapest, as `mylib.plan` finds them."""
    step = PlannedStep.of(step_of(case, jnp.bfloat16), arguments(case))
    traces = [trace(step, x, (case.layers,), jnp.bfloat16) for x in ("full", "all")]
    return [x for traced in traces for x in priced(traced, known, room)]


def fitting(tried: Sequence[LiveCandidate], room: float) -> list[LiveCandidate]:
    return ordered([x for x in tried if not x.figures.why and x.memory <= room * (1 - RESERVE)])


def compiled(only: Sequence[str], machine: str) -> None:
    """Each program is compiled once: what `mylib.plan` chooses after it has compiled eight follows
    from all.
    """
    columns = "step", "strategies", "compiled", "first by price", "chosen", "best of all"
    print_header(f"seconds by the compiled program, {machine}",
                 (*columns, "first, times the best", "chosen, times the best", "s"))  # fmt: skip
    target = mylib.machines.Machine.of(machine)
    known, _ = with_figures(target)
    # Steps that differ only in the memory have the same programs.
    done: dict[Any, list[LiveCandidate]] = {}
    for case in cases(1):
        if not any(part in case.name for part in only):
            continue
        start, room = time.monotonic(), case.memory or float(target.memory or math.inf)
        tried = candidates(case, known, room)
        first = fitting(tried, room)[0].name
        left = ordered([x for x in tried if not x.figures.why])
        eight = [x.name for x in to_compile(left, 8)]
        programs = done.setdefault(case.name.removesuffix(", tight"), [])
        found: list[LiveCandidate] = []
        for x in left:
            program = next((y for y in programs if y.strategy == x.strategy), x)
            if program is x:
                compile_for(x, target, known, math.inf, jnp.bfloat16)
                programs.append(x)
            found.append(program)
        fits = fitting(found, room)
        seconds = {x.name: x.seconds for x in fits}
        best = min(seconds, key=seconds.__getitem__)
        chosen = ordered([x for x in fits if x.name in eight])[0].name
        ratios = (seconds.get(x, math.inf) / seconds[best] for x in (first, chosen))
        print_row([case.name, str(len(tried)), str(len(found)), first, chosen, best,
                   *(f"{x:.3f}" for x in ratios), f"{time.monotonic() - start:.0f}"])  # fmt: skip


def agreement(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau."""
    signs = [(a - c) * (b - d) for (a, b), (c, d) in combinations(pairs, 2)]
    return sum((x > 0) - (x < 0) for x in signs) / max(len(signs), 1)


def measured(only: Sequence[str], runs: int) -> None:
    columns = "step", "run", "strategies", "tau", "fastest", "best of 4", "times the fastest"
    print_header("8 simulated devices, measured", columns)
    kinds = "MLP, wide", "MLP, tall", "MLP, large batch", "transformer", "convolutions", "experts"
    for case in (x for x in cases(16) if x.name in kinds and any(p in x.name for p in only)):
        for run in range(runs):
            options: dict[str, Any] = {"policies": ("full",), "budget": math.inf}
            every = planned(case, compile=16, measure=16, **options)
            found = [x for x in (every.chosen, *every.others) if x.measured]
            times = {x.name: x.measured or math.inf for x in found}
            modelled = planned(case, compile=0, **options)
            by_price = {x.name: x.seconds or 0.0 for x in (modelled.chosen, *modelled.others)}
            pairs = [(by_price[x], times[x]) for x in times if x in by_price]
            four = planned(case, compile=8, measure=4, **options).chosen.name
            best = min(times, key=times.__getitem__)
            print_row([case.name, str(run + 1), str(len(found)), f"{agreement(pairs):.2f}", best,
                       four, f"{times.get(four, math.inf) / times[best]:.2f}"])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], help="steps with one of these")
    parser.add_argument("--machine", default="h100 x 8")
    parser.add_argument("--measured", action="store_true", help="run on 8 simulated devices")
    parser.add_argument("--runs", type=int, default=2, help="how often --measured plans a step")
    given = parser.parse_args()
    if given.measured:
        measured(given.only, given.runs)
    else:
        compiled(given.only, given.machine)


if __name__ == "__main__":
    main()

"""Trains a small transformer with weights that are gathered in bfloat16, float8 and int8, on the
sources of Python's standard library, and prints the losses.

    python benchmarks/send_dtype.py                          three seeds
    python benchmarks/send_dtype.py --seeds 0 --steps 200 --save losses.txt
    python benchmarks/send_dtype.py --read losses.txt --until 2 --draw curve.svg

All runs compute in bfloat16 and keep float32. With the same seed they have the same weights at the
start and the same batches.
"""

import argparse
import os
import sysconfig
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "32")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

import mylib

WIDTH, DEPTH, HEADS, TIME, ROWS = 256, 3, 8, 64, 8
SENT = {"bfloat16": None, "float8_e4m3fn": jnp.float8_e4m3fn, "int8": jnp.int8}


class Block(eqx.Module):
    norms: Array
    mix: Array
    out: Array
    up: Array
    down: Array

    def __init__(self, key: Array):
        keys = jax.random.split(key, 4)
        shapes = (WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)
        weights = [jax.random.normal(k, s) / s[0] ** 0.5 for k, s in zip(keys, shapes, strict=True)]
        self.mix, self.out, self.up, self.down = weights
        self.norms = jnp.ones((2, WIDTH))

    def __call__(self, x: Array) -> Array:
        q, k, v = jnp.split(normalised(x) * self.norms[0] @ self.mix, 3, -1)
        heads = [y.reshape(*y.shape[:2], HEADS, -1) for y in (q, k, v)]
        x = x + jax.nn.dot_product_attention(*heads, is_causal=True).reshape(x.shape) @ self.out
        return x + jax.nn.gelu(normalised(x) * self.norms[1] @ self.up) @ self.down


def normalised(x: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


class Model(eqx.Module):
    embed: Array
    places: Array
    blocks: list[Block]
    head: Array

    def __init__(self, key: Array):
        keys = jax.random.split(key, DEPTH + 3)
        self.embed = jax.random.normal(keys[0], (256, WIDTH)) / 8
        self.places = jax.random.normal(keys[1], (TIME, WIDTH)) / 8
        self.head = jax.random.normal(keys[2], (WIDTH, 256)) / WIDTH**0.5
        self.blocks = [Block(key) for key in keys[3:]]

    def __call__(self, tokens: Array) -> Array:
        x = self.embed[tokens] + self.places
        for block in self.blocks:
            x = block(x)
        return (normalised(x) @ self.head).astype(jnp.float32)


def text() -> np.ndarray[Any, Any]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    return np.frombuffer(b"\n".join(x.read_bytes() for x in sorted(folder.glob("*.py"))), np.uint8)


def train(send: Any, seed: int, steps: int) -> list[float]:
    mesh, kept = mylib.make_mesh(data=-1), mylib.rules.fsdp("data")
    optim = optax.adamw(optax.warmup_constant_schedule(0, 2e-3, 100))

    def make(key: Array) -> Any:
        model = Model(key)
        return model, optim.init(eqx.filter(model, eqx.is_array))

    @mylib.filter_jit(
        in_shardings={"tokens": P("data")},
        out_shardings=(kept, kept, None),
        donate="all-except-first",
        mesh=mesh,
    )
    def step(tokens: Array, model: Model, state: Any) -> Any:
        def loss_fn(model: Model) -> Array:
            model = mylib.fully_shard(
                model, Block, kept, mesh=mesh, dtype=jnp.bfloat16, send_dtype=send
            )
            logits = jax.nn.log_softmax(model(tokens[:, :-1]))
            return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], -1))

        loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
        updates, state = optim.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, loss

    model, state = mylib.filter_jit(make, out_shardings=kept, mesh=mesh)(jax.random.key(seed))
    rng, data, losses = np.random.default_rng(seed), text(), list[float]()
    for _ in range(steps):
        starts = rng.integers(len(data) - TIME, size=ROWS)
        tokens = np.stack([data[i : i + TIME + 1] for i in starts]).astype(np.int32)
        model, state, loss = step(tokens, model, state)
        losses.append(float(loss))
    return losses


def compared(runs: dict[tuple[str, int], np.ndarray[Any, Any]], until: float) -> None:
    """Prints the mean loss of each run until bfloat16's, smoothed, has reached a value."""
    for seed in sorted({seed for _, seed in runs}):
        reached = smoothed(runs["bfloat16", seed]) <= until
        step = int(np.argmax(reached)) if reached.any() else len(reached)
        means = [
            f"{sent} {runs[sent, seed][:step].mean():.4f}" for sent in SENT if (sent, seed) in runs
        ]
        print(f"seed {seed}, {step} steps: {', '.join(means)}")


def smoothed(losses: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The mean of the last 50 losses at each step."""
    sums = np.cumsum([0.0, *losses])
    ends = np.arange(1, len(sums))
    starts = np.maximum(ends - 50, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def drawn(runs: dict[tuple[str, int], np.ndarray[Any, Any]]) -> str:
    """The losses as an SVG."""
    width, height, left, top = 760, 330, 50, 20
    steps = max(map(len, runs.values()))
    curves = {key: smoothed(x)[49:] for key, x in runs.items()}
    low, high = np.floor(min(x.min() for x in curves.values()) * 2) / 2, 3.5

    def at(step: float, loss: float) -> str:
        x = left + (width - left - 40) * step / steps
        y = top + (height - top - 40) * (high - min(loss, high)) / (high - low)
        return f"{x:.1f} {y:.1f}"

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="13">',
        "<title>Losses of training with weights that are sent in 16 and in 8 bits</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
    ]
    for loss in np.arange(low, high + 0.01, 0.5):
        lines.append(f'<path d="M{at(0, loss)}L{at(steps, loss)}" stroke="#ddd"/>')
        lines.append(f'<text transform="translate({at(0, loss)})" x="-34" y="4">{loss:.1f}</text>')
    for step in range(0, steps + 1, 500):
        lines.append(f'<text transform="translate({at(step, low)})" y="22">{step}</text>')
    for i, (sent, style) in enumerate(STYLES.items()):
        y = top + 30 + 22 * i
        of_dtype = [x for (name, _), x in curves.items() if name == sent]
        paths = [[at(49 + j, x[j]) for j in range(0, len(x), 10)] for x in of_dtype]
        paths += [[f"520 {y}", f"560 {y}"]] * bool(of_dtype)
        lines += [f'<path d="M{"L".join(path)}" {style} fill="none"/>' for path in paths]
        lines += [f'<text x="570" y="{y + 4}">{sent}</text>'] * bool(of_dtype)
    return "\n".join([*lines, "</svg>", ""])


STYLES = {
    "bfloat16": 'stroke="#9fa8da" stroke-width="3"',
    "float8_e4m3fn": 'stroke="#e65100"',
    "int8": 'stroke="#1b5e20" stroke-dasharray="4 3"',
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--sent", nargs="+", choices=[*SENT], default=[*SENT])
    parser.add_argument("--save", type=Path)
    parser.add_argument("--read", type=Path)
    parser.add_argument("--until", type=float, default=2.0)
    parser.add_argument("--draw", type=Path)
    options = parser.parse_args()
    if options.read:
        rows = [line.split() for line in options.read.read_text().splitlines()]
        runs = {(sent, int(seed)): np.array(x, float) for sent, seed, *x in rows}
        compared(runs, options.until)
        if options.draw:
            options.draw.write_text(drawn(runs))
        return
    for seed in options.seeds:
        for sent in options.sent:
            start = time.perf_counter()
            losses = train(SENT[sent], seed, options.steps)
            took = time.perf_counter() - start
            line = (
                f"{sent} seed {seed}: {np.mean(losses):.4f}, last 100 {np.mean(losses[-100:]):.4f}"
            )
            print(f"{line}, {took:.0f} s", flush=True)
            if options.save:
                with options.save.open("a") as file:
                    print(sent, seed, *(f"{x:.4f}" for x in losses), file=file)


if __name__ == "__main__":
    main()

"""A Llama: grouped queries, rotary positions, gated MLPs, layers in a scan.

    python examples/models/llama.py
    python examples/models/llama.py --machine "h100 x 16" --strategy "FSDP"

Trains a small one under five strategies; or compiles one of 1.2 billion parameters for a machine
that you needn't have, and reports what a step needs and communicates.
"""

import running  # first: it simulates devices

# isort: split
from dataclasses import dataclass
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PRNGKeyArray
from running import Strategy, Task, report, trained

import mylib
from mylib.contracts import fsdp as is_fsdp, tensor_parallel as is_tensor_parallel
from mylib.rules import fsdp, replicated, tensor_parallel, where_present


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    groups: int  # of heads that share keys and values
    hidden: int
    vocab: int
    time: int
    rows: int  # of a batch
    tied: bool = False
    dtype: type = jnp.float32


SMALL = Size(2, width=64, heads=8, groups=4, hidden=128, vocab=64, time=16, rows=16)
LARGE = Size(
    16,
    width=2048,
    heads=32,
    groups=8,
    hidden=8192,
    vocab=32768,
    time=2048,
    rows=64,
    dtype=jnp.bfloat16,
)


class Block(eqx.Module):
    norm1: eqx.nn.RMSNorm
    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    mix: eqx.nn.Linear
    norm2: eqx.nn.RMSNorm
    gate: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    heads: int = eqx.field(static=True)
    groups: int = eqx.field(static=True)

    def __init__(self, size: Size, key: PRNGKeyArray):
        keys = iter(jax.random.split(key, 7))
        width, each = size.width, size.width // size.heads

        def linear(inputs: int, outputs: int) -> eqx.nn.Linear:
            return eqx.nn.Linear(inputs, outputs, use_bias=False, dtype=size.dtype, key=next(keys))

        self.norm1, self.norm2 = norm(size), norm(size)
        self.query, self.mix = linear(width, width), linear(width, width)
        self.key, self.value = (linear(width, size.groups * each) for _ in range(2))
        self.gate, self.up = linear(width, size.hidden), linear(width, size.hidden)
        self.down = linear(size.hidden, width)
        self.heads, self.groups = size.heads, size.groups

    def __call__(self, x: Float[Array, "time width"]) -> Float[Array, "time width"]:
        query, key, value = self.project(x, jnp.arange(len(x)))
        return self.finish(x, jax.nn.dot_product_attention(query, key, value, is_causal=True))

    def project(self, x: Float[Array, "time width"], positions: Array) -> tuple[Array, ...]:
        """Queries, keys and values: of each time a row for each head, or group of heads."""
        y = jax.vmap(self.norm1)(x)
        query, key, value = (
            jax.vmap(layer)(y).reshape(len(x), heads, -1)
            for layer, heads in [
                (self.query, self.heads),
                (self.key, self.groups),
                (self.value, self.groups),
            ]
        )
        return rotated(query, positions), rotated(key, positions), value

    def finish(self, x: Float[Array, "time width"], attended: Array) -> Float[Array, "time width"]:
        x = x + jax.vmap(self.mix)(attended.reshape(x.shape))
        y = jax.vmap(self.norm2)(x)
        hidden = jax.nn.silu(jax.vmap(self.gate)(y)) * jax.vmap(self.up)(y)
        return x + jax.vmap(self.down)(hidden)


def rotated(x: Float[Array, "time heads size"], positions: Array) -> Array:
    """Rotary positions: pairs of numbers are turned by angles that grow with time."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * 10000.0 ** (-jnp.arange(half) / half)
    sin, cos = jnp.sin(angles).astype(x.dtype), jnp.cos(angles).astype(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


class Llama(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: Block  # all of them, stacked
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear | None  # None: tied to the embedding

    def __init__(self, size: Size, key: PRNGKeyArray):
        keys = jax.random.split(key, 3)
        table = jax.random.normal(keys[0], (size.vocab, size.width), size.dtype) * 0.02
        self.embed = eqx.nn.Embedding(weight=table)
        each = jax.random.split(keys[1], size.layers)
        self.blocks = eqx.filter_vmap(lambda key: Block(size, key))(each)
        self.norm = norm(size)
        self.head = (
            None
            if size.tied
            else eqx.nn.Linear(
                size.width, size.vocab, use_bias=False, dtype=size.dtype, key=keys[2]
            )
        )

    def __call__(self, tokens: Int[Array, "time"]) -> Float[Array, "time vocab"]:  # noqa: F821
        x = jax.vmap(self.embed)(tokens)
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        def layer(x: Array, arrays: Block) -> tuple[Array, None]:
            # With sequence parallelism: between the blocks each device has a part of the time.
            x = mylib.filter_shard(x, where_present(P("time")))
            return eqx.combine(arrays, static)(x), None

        x = jax.vmap(self.norm)(jax.lax.scan(layer, x, arrays)[0])
        return x @ self.embed.weight.T if self.head is None else jax.vmap(self.head)(x)


def norm(size: Size) -> eqx.nn.RMSNorm:
    return eqx.nn.RMSNorm(size.width, use_bias=False, dtype=size.dtype)


def loss(model: Llama, tokens: Int[Array, "rows time+1"]) -> Float[Array, ""]:
    logits = jax.vmap(model)(tokens[:, :-1]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return jnp.mean(losses)


def task(size: Size) -> Task:
    def batch(number: int) -> np.ndarray:
        # Something to learn: each number follows from the one before it.
        start = np.random.default_rng(number).integers(0, size.vocab, (size.rows, 1))
        return ((start + 3 * np.arange(size.time + 1)) % size.vocab).astype(np.int32)

    return Task(lambda key: Llama(size, key), loss, batch, Block)


USED = (
    tensor_parallel("model", column=["query", "key", "value", "gate", "up"], row=["mix", "down"])
    | replicated()
)
STRATEGIES = {
    "FSDP": Strategy(
        {"data": -1}, fsdp("data"), replicated(), "data", (is_fsdp("data", argument="model"),)
    ),
    "tensor parallel": Strategy(
        {"data": -1, "model": 2},
        USED,
        USED,
        "data",
        (is_tensor_parallel("model", argument="model"),),
    ),
    "FSDP, tensor parallel": Strategy(
        {"data": -1, "model": 2}, USED & fsdp("data"), USED, "data", ()
    ),
    "HSDP": Strategy({"copies": 2, "data": -1}, fsdp("data"), replicated(), ("copies", "data"), ()),
    "FSDP, sequence parallel": Strategy(
        {"data": -1, "time": 2}, fsdp(("data", "time")), replicated(), "data", ()
    ),
}

if __name__ == "__main__":
    running.main(STRATEGIES, trained(task(SMALL)), partial(report, task(LARGE)))

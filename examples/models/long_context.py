"""Attention over a sequence that is split over devices: in a ring, or gathered; balanced or not.

    python examples/models/long_context.py
    python examples/models/long_context.py --machine "h100 x 16" --strategy "ring, balanced"

Each device has a part of the time of each row. Everything but attention is of each time alone. In
the ring, keys and values travel from device to device; gathered, each device gets all of them. With
causal attention the last part has most to do, so balanced, each device has an early and a late one.
"""

import running  # first: it simulates devices

# isort: split
from collections.abc import Callable
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PRNGKeyArray
from running import Strategy, Task, report, trained

import mylib
from mylib.contracts import never
from mylib.rules import fsdp, replicated, where_present

AXIS = "sequence"


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    vocab: int
    time: int
    rows: int  # of a batch


SMALL = Size(2, width=32, heads=4, vocab=64, time=64, rows=4)
LARGE = Size(8, width=1024, heads=8, vocab=32768, time=16384, rows=2)

Part = Float[Array, "time heads size"]


def attend(query: Part, key: Part, value: Part, seen: Array) -> tuple[Array, Array, Array]:
    """What the queries find here, not yet divided by `total`, and the largest score of each."""
    scores = jnp.einsum("thc,shc->hts", query, key) / query.shape[-1] ** 0.5
    scores = jnp.where(seen, scores, -1e30)
    most = jnp.max(scores, -1)
    weights = jnp.where(seen, jnp.exp(scores - most[..., None]), 0)
    return jnp.einsum("hts,shc->htc", weights, value), jnp.sum(weights, -1), most


def merged(one: tuple, two: tuple) -> tuple[Array, Array, Array]:
    most = jnp.maximum(one[2], two[2])
    first, second = jnp.exp(one[2] - most), jnp.exp(two[2] - most)
    found = one[0] * first[..., None] + two[0] * second[..., None]
    return found, one[1] * first + two[1] * second, most


def ring(query: Part, key: Part, value: Part, times: Int[Array, "time"]) -> Part:  # noqa: F821
    """Of one device: keys and values come from all devices, one after the other."""
    size = jax.lax.axis_size(AXIS)
    to_next = [(i, (i + 1) % size) for i in range(size)]

    @jax.checkpoint
    def here(key: Part, value: Part, others: Array) -> tuple[Array, Array, Array]:
        return attend(query, key, value, others <= times[:, None])

    def turn(carry: tuple, _: None) -> tuple[tuple, None]:
        found, *visitors = carry
        # Sent first, so that it is under way while this device computes.
        sent = [jax.lax.ppermute(x, AXIS, to_next) for x in visitors]
        return (merged(found, here(*visitors)), *sent), None

    found = here(key, value, times)
    visitors = [jax.lax.ppermute(x, AXIS, to_next) for x in (key, value, times)]
    (found, *_), _ = jax.lax.scan(turn, (found, *visitors), None, length=size - 1)
    return jnp.swapaxes(found[0] / found[1][..., None], 0, 1)


def gathered(query: Part, key: Part, value: Part, times: Int[Array, "time"]) -> Part:  # noqa: F821
    """Of one device: it gets the keys and values of all."""
    key, value, others = (jax.lax.all_gather(x, AXIS, tiled=True) for x in (key, value, times))
    found, total, _ = attend(query, key, value, others <= times[:, None])
    return jnp.swapaxes(found / total[..., None], 0, 1)


def alone(query: Part, key: Part, value: Part, times: Int[Array, "time"]) -> Part:  # noqa: F821
    found, total, _ = attend(query, key, value, times <= times[:, None])
    return jnp.swapaxes(found / total[..., None], 0, 1)


def order(time: int, parts: int) -> np.ndarray:
    """The times as the devices have them: each an early part, and the late one opposite."""
    pieces = np.arange(time).reshape(2 * parts, -1)
    pairs = [(i, 2 * parts - 1 - i) for i in range(parts)]
    return np.concatenate([pieces[i] for pair in pairs for i in pair])


def attention_over_parts(
    attention: Callable, query: Array, key: Array, value: Array, times: Array
) -> Array:
    """Attention of all rows; each device calls it with its own part of the time."""
    of_rows = jax.vmap(attention, (0, 0, 0, None))
    if attention is alone:
        return of_rows(query, key, value, times)
    rows = P("data", AXIS)
    split = mylib.filter_shard_map(of_rows, in_specs=(rows, rows, rows, P(AXIS)), out_specs=rows)
    return split(query, key, value, times)


class Block(eqx.Module):
    norm1: eqx.nn.LayerNorm
    project: eqx.nn.Linear
    mix: eqx.nn.Linear
    norm2: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP
    heads: int = eqx.field(static=True)
    attention: Callable = eqx.field(static=True)

    def __init__(self, size: Size, attention: Callable, key: PRNGKeyArray):
        keys = jax.random.split(key, 3)
        width = size.width
        self.norm1, self.norm2 = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.project = eqx.nn.Linear(width, 3 * width, use_bias=False, key=keys[0])
        self.mix = eqx.nn.Linear(width, width, use_bias=False, key=keys[1])
        self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=keys[2])
        self.heads, self.attention = size.heads, attention

    def __call__(self, x: Float[Array, "rows time width"], times: Array) -> Array:
        def each(f: Callable, x: Array) -> Array:
            return jax.vmap(jax.vmap(f))(x)

        y = each(self.project, each(self.norm1, x))
        query, key, value = jnp.moveaxis(y.reshape(*x.shape[:2], 3, self.heads, -1), 2, 0)
        found = attention_over_parts(self.attention, query, key, value, times)
        x = x + each(self.mix, found.reshape(x.shape))
        return x + each(self.mlp, each(self.norm2, x))


class Model(eqx.Module):
    embed: Float[Array, "vocab width"]
    positions: Float[Array, "time width"]
    blocks: Block  # all of them, stacked
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear
    is_balanced: bool = eqx.field(static=True)

    def __init__(self, size: Size, attention: Callable, is_balanced: bool, key: PRNGKeyArray):
        keys = jax.random.split(key, 4)
        self.embed = jax.random.normal(keys[0], (size.vocab, size.width)) * 0.02
        self.positions = jax.random.normal(keys[1], (size.time, size.width)) * 0.02
        each = jax.random.split(keys[2], size.layers)
        self.blocks = eqx.filter_vmap(lambda key: Block(size, attention, key))(each)
        self.norm = eqx.nn.LayerNorm(size.width)
        self.head = eqx.nn.Linear(size.width, size.vocab, use_bias=False, key=keys[3])
        self.is_balanced = is_balanced

    def __call__(self, tokens: Int[Array, "rows time"], times: Array) -> Array:
        x = self.embed[tokens] + self.positions[times]
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        def layer(x: Array, arrays: Block) -> tuple[Array, None]:
            x = mylib.filter_shard(x, where_present(P("data", AXIS)))
            return eqx.combine(arrays, static)(x, times), None

        x = jax.vmap(jax.vmap(self.norm))(jax.lax.scan(layer, x, arrays)[0])
        return jax.vmap(jax.vmap(self.head))(x)


def loss(model: Model, tokens: Int[Array, "rows time+1"]) -> Float[Array, ""]:
    mesh = jax.sharding.get_abstract_mesh()
    time, parts = tokens.shape[1] - 1, mesh.shape.get(AXIS, 1)
    times = order(time, parts) if model.is_balanced else np.arange(time)
    # A device embeds its own tokens, and predicts what comes after each.
    inputs, targets = (
        mylib.filter_shard(tokens[:, at], where_present(P("data", AXIS)))
        for at in (times, times + 1)
    )
    logits = model(inputs, jnp.asarray(times))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.mean(losses)


def task(size: Size, attention: Callable = alone, is_balanced: bool = False) -> Task:
    def batch(number: int) -> np.ndarray:
        start = np.random.default_rng(number).integers(0, size.vocab, (size.rows, 1))
        return ((start + 3 * np.arange(size.time + 1)) % size.vocab).astype(np.int32)

    def make(key: PRNGKeyArray) -> Model:
        return Model(size, attention, is_balanced, key)

    return Task(make, loss, batch, Block)


def no_part_is_gathered(report: mylib.results.Report) -> list[str]:
    """A contract: weights are gathered over all devices, and nothing over the sequence alone."""
    found = report.among("all-gather", AXIS)
    return [f"an all-gather over {AXIS} of {c.bytes} bytes at {c.source}" for c in found]


STRATEGIES = {
    name: Strategy(
        {"data": 2, AXIS: -1},
        fsdp(("data", AXIS), min_size=1024),
        replicated(),
        "data",
        contracts,
        {"attention": attention, "is_balanced": name.endswith("balanced")},
    )
    for name, attention, contracts in [
        ("ring", ring, (no_part_is_gathered,)),
        ("ring, balanced", ring, (no_part_is_gathered,)),
        ("gathered", gathered, (never("collective-permute", AXIS),)),
        ("gathered, balanced", gathered, (never("collective-permute", AXIS),)),
    ]
}

if __name__ == "__main__":
    running.main(
        STRATEGIES,
        lambda how, mesh: trained(task(SMALL, **how.options))(how, mesh),
        lambda how, mesh: report(task(LARGE, **how.options), how, mesh),
    )

"""A mixture of experts: two of them for each token, with a capacity, over an axis of experts.

    python examples/models/experts.py
    python examples/models/experts.py --machine "h100 x 16"

Each device has some of the experts and some rows of the batch. Tokens are sent to the devices of
their experts and back, by an all-to-all each way. With FSDP alone the experts come to the tokens.
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
from mylib.contracts import never
from mylib.rules import by_path, fsdp, replicated, where_present


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    experts: int
    hidden: int
    vocab: int
    time: int
    rows: int  # of a batch
    spare: float = 1.5  # the capacity of an expert, over its share of the tokens


SMALL = Size(2, width=32, heads=4, experts=8, hidden=64, vocab=64, time=16, rows=16)
LARGE = Size(8, width=1024, heads=16, experts=16, hidden=4096, vocab=32768, time=1024, rows=64)


class Experts(eqx.Module):
    router: eqx.nn.Linear
    gate: Float[Array, "expert hidden width"]
    up: Float[Array, "expert hidden width"]
    down: Float[Array, "expert width hidden"]
    capacity: int = eqx.field(static=True)  # tokens of a row that an expert takes

    def __init__(self, size: Size, key: PRNGKeyArray):
        keys = jax.random.split(key, 4)
        inner, outer = (size.experts, size.hidden, size.width), (size.hidden, size.width)
        self.router = eqx.nn.Linear(size.width, size.experts, use_bias=False, key=keys[0])
        self.gate = jax.random.normal(keys[1], inner) / size.width**0.5
        self.up = jax.random.normal(keys[2], inner) / size.width**0.5
        self.down = jax.random.normal(keys[3], (size.experts, *outer[::-1])) / size.hidden**0.5
        self.capacity = int(np.ceil(2 * size.time / size.experts * size.spare))

    def __call__(self, x: Float[Array, "rows time width"]) -> tuple[Array, Float[Array, ""]]:
        """What the experts add, and how unbalanced their loads are (1 is balanced)."""
        chances = jax.nn.softmax(jax.vmap(jax.vmap(self.router))(x))
        send, receive, load = jax.vmap(partial(plan, capacity=self.capacity))(chances)
        sent = jnp.einsum("rtec,rtw->recw", send, x)
        # From rows to experts, and back: two all-to-alls. Both ends of each are named, or the
        # compiler would choose others in the backward pass.
        by_rows = where_present(P(("data", "expert")))
        by_experts = where_present(P("data", "expert"))
        sent = mylib.filter_shard(mylib.filter_shard(sent, by_rows), by_experts)
        hidden = jax.nn.silu(jnp.einsum("recw,ehw->rech", sent, self.gate))
        hidden = hidden * jnp.einsum("recw,ehw->rech", sent, self.up)
        hidden = mylib.filter_shard(hidden, by_experts)
        done = jnp.einsum("rech,ewh->recw", hidden, self.down)
        done = mylib.filter_shard(mylib.filter_shard(done, by_experts), by_rows)
        balance = len(self.gate) * jnp.sum(jnp.mean(load, 0) * jnp.mean(chances, (0, 1)))
        return jnp.einsum("rtec,recw->rtw", receive, done), balance


def plan(chances: Float[Array, "time expert"], capacity: int) -> tuple[Array, Array, Array]:
    """For one row: which token goes to which place of which expert; the same with the weights of
    the answers; and the share of the tokens that each expert is the first choice of.
    """
    time, experts = chances.shape
    # Not by top_k, for which XLA would gather the chances of all rows.
    first = jax.nn.one_hot(jnp.argmax(chances, -1), experts)
    second = jax.nn.one_hot(jnp.argmax(chances - first, -1), experts)
    wanted = jnp.stack([first, second])
    weights = jnp.sum(wanted * chances, -1)
    weights = weights / jnp.sum(weights, 0)
    before = jnp.cumsum(wanted.reshape(-1, experts), 0) - 1
    place = before.astype(int).reshape(2, time, experts)
    # No place for those that come after an expert is full: they are left out.
    seats = wanted[..., None] * jax.nn.one_hot(place, capacity)
    return jnp.sum(seats, 0), jnp.einsum("kt,ktec->tec", weights, seats), jnp.mean(first, 0)


class Block(eqx.Module):
    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    experts: Experts

    def __init__(self, size: Size, key: PRNGKeyArray):
        keys = jax.random.split(key)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(size.width), eqx.nn.LayerNorm(size.width)
        self.attention = eqx.nn.MultiheadAttention(size.heads, size.width, key=keys[0])
        self.experts = Experts(size, keys[1])

    def __call__(self, x: Float[Array, "rows time width"]) -> tuple[Array, Array]:
        causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        y = jax.vmap(jax.vmap(self.norm1))(x)
        x = x + jax.vmap(lambda y: self.attention(y, y, y, causal))(y)
        more, balance = self.experts(jax.vmap(jax.vmap(self.norm2))(x))
        return x + more, balance


class Mixture(eqx.Module):
    embed: Float[Array, "vocab width"]
    blocks: Block  # all of them, stacked
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, size: Size, key: PRNGKeyArray):
        keys = jax.random.split(key, 3)
        self.embed = jax.random.normal(keys[0], (size.vocab, size.width)) * 0.02
        each = jax.random.split(keys[1], size.layers)
        self.blocks = eqx.filter_vmap(lambda key: Block(size, key))(each)
        self.norm = eqx.nn.LayerNorm(size.width)
        self.head = eqx.nn.Linear(size.width, size.vocab, use_bias=False, key=keys[2])

    def __call__(self, tokens: Int[Array, "rows time"]) -> tuple[Array, Array]:
        arrays, static = eqx.partition(self.blocks, eqx.is_array)
        x, balances = jax.lax.scan(
            lambda x, arrays: eqx.combine(arrays, static)(x), self.embed[tokens], arrays
        )
        x = jax.vmap(jax.vmap(self.norm))(x)
        return jax.vmap(jax.vmap(self.head))(x), jnp.mean(balances)


def loss(model: Mixture, tokens: Int[Array, "rows time+1"]) -> Float[Array, ""]:
    logits, balance = model(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return jnp.mean(losses) + 0.01 * balance


def task(size: Size) -> Task:
    def batch(number: int) -> np.ndarray:
        start = np.random.default_rng(number).integers(0, size.vocab, (size.rows, 1))
        return ((start + 3 * np.arange(size.time + 1)) % size.vocab).astype(np.int32)

    return Task(lambda key: Mixture(size, key), loss, batch, Block)


# In front of the experts is the dimension of the stacked layers.
EXPERTS = by_path({f"experts.{name}": P(None, "expert") for name in ("gate", "up", "down")})
ROWS = ("data", "expert")

STRATEGIES = {
    "experts": Strategy(
        {"data": -1, "expert": 4},
        EXPERTS | replicated(),
        EXPERTS | replicated(),
        ROWS,
        (never("all-gather", "expert"),),
    ),
    "experts, FSDP": Strategy(
        {"data": -1, "expert": 4},
        (EXPERTS | replicated()) & fsdp("data", min_size=1024),
        EXPERTS | replicated(),
        ROWS,
        (never("all-gather", "expert"),),
    ),
    "FSDP": Strategy(
        {"data": -1},
        fsdp("data", min_size=1024),
        replicated(),
        "data",
        # No contract of FSDP: the balance of the loads is a mean over all rows.
        (never("collective-permute", "data"),),
    ),
}

if __name__ == "__main__":
    running.main(STRATEGIES, trained(task(SMALL)), partial(report, task(LARGE)))

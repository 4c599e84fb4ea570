"""A state-space model: linear recurrences with complex eigenvalues, by an associative scan.

    python examples/models/state_space.py
    python examples/models/state_space.py --machine "v5e 4x4" --strategy "FSDP"

Each state decays and turns on its own, so states can be split over devices: with tensor parallelism
the scan itself communicates nothing. (It is the LRU of Orvieto et al., "Resurrecting Recurrent
Neural Networks for Long Sequences", 2023.)
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

from mylib.contracts import fsdp as is_fsdp, never
from mylib.rules import by_path, fsdp, replicated


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    states: int
    vocab: int
    time: int
    rows: int  # of a batch


SMALL = Size(2, width=32, states=32, vocab=64, time=32, rows=16)
LARGE = Size(8, width=1024, states=1024, vocab=32768, time=2048, rows=64)


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    decay: Float[Array, "states"]  # noqa: F821
    angle: Float[Array, "states"]  # noqa: F821
    # Real and imaginary parts: the gradient of a complex number points along its conjugate.
    into: Float[Array, "2 states width"]
    out: Float[Array, "2 width states"]
    gate: eqx.nn.Linear

    def __init__(self, size: Size, key: PRNGKeyArray):
        keys, width, states = jax.random.split(key, 5), size.width, size.states
        radius = jax.random.uniform(keys[0], (states,), minval=0.9, maxval=0.999)
        self.norm = eqx.nn.LayerNorm(width)
        self.decay = jnp.log(-jnp.log(radius))
        self.angle = jax.random.uniform(keys[1], (states,), maxval=jnp.pi / 4)
        scale = jnp.sqrt((1 - radius**2) / (2 * width))[:, None]
        self.into = jax.random.normal(keys[2], (2, states, width)) * scale
        self.out = jax.random.normal(keys[3], (2, width, states)) / states**0.5
        self.gate = eqx.nn.Linear(width, width, key=keys[4])

    def __call__(self, x: Float[Array, "time width"]) -> Float[Array, "time width"]:
        y = jax.vmap(self.norm)(x)
        eigenvalues = jnp.exp(-jnp.exp(self.decay) + 1j * self.angle)
        inputs = y @ self.into[0].T + 1j * (y @ self.into[1].T)
        factors = jnp.broadcast_to(eigenvalues, inputs.shape)
        _, states = jax.lax.associative_scan(after, (factors, inputs))
        y = jax.nn.gelu(states.real @ self.out[0].T - states.imag @ self.out[1].T)
        return x + y * jax.nn.sigmoid(jax.vmap(self.gate)(y))


def after(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
    """Two pieces of time as one: what they multiply the state by, and what they add to it."""
    return first[0] * second[0], first[1] * second[0] + second[1]


class StateSpace(eqx.Module):
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

    def __call__(self, tokens: Int[Array, "time"]) -> Float[Array, "time vocab"]:  # noqa: F821
        arrays, static = eqx.partition(self.blocks, eqx.is_array)
        x, _ = jax.lax.scan(
            lambda x, arrays: (eqx.combine(arrays, static)(x), None), self.embed[tokens], arrays
        )
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


def loss(model: StateSpace, tokens: Int[Array, "rows time+1"]) -> Float[Array, ""]:
    logits = jax.vmap(model)(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return jnp.mean(losses)


def task(size: Size) -> Task:
    def batch(number: int) -> np.ndarray:
        start = np.random.default_rng(number).integers(0, size.vocab, (size.rows, 1))
        return ((start + 3 * np.arange(size.time + 1)) % size.vocab).astype(np.int32)

    return Task(lambda key: StateSpace(size, key), loss, batch, Block)


# In front of the states is the dimension of the stacked layers.
STATES = {
    "blocks.decay": P(None, "model"),
    "blocks.angle": P(None, "model"),
    "blocks.into": P(None, None, "model"),
    "blocks.out": P(None, None, None, "model"),
}
USED = by_path(STATES) | replicated()
STRATEGIES = {
    "FSDP": Strategy(
        {"data": -1},
        fsdp("data", min_size=1024),
        replicated(),
        "data",
        (is_fsdp("data", argument="model"),),
    ),
    "states split": Strategy(
        {"data": -1, "model": 2},
        USED,
        USED,
        "data",
        (never("all-gather", "model"), never("all-to-all", "model")),
    ),
}

if __name__ == "__main__":
    running.main(STRATEGIES, trained(task(SMALL)), partial(report, task(LARGE)))

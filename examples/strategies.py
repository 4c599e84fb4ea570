"""Trains a small language model, letter by letter, under four strategies of sharding.

The model is written once. What differs is a rule: how the weights are kept. For each strategy this
prints where every array of the model is and why, how much memory a device needs for the model and
its optimiser state, and how long a step takes. The devices are simulated on the CPU, so this runs
anywhere; the times say little about real devices, the losses are those of one device.
"""

import os

# Read when JAX starts, so they come before it is imported. NPROC is the number of threads that the
# simulated devices share: JAX 0.10 needs as many as there are devices, however few the cores.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["NPROC"] = "32"
os.environ["JAX_PLATFORMS"] = "cpu"

import time
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

import mylib
from mylib.rules import Rule, batch, by_axes, fsdp, replicated

STEPS, BATCH, LENGTH, WIDTH, HIDDEN, HEADS, VOCAB = 10, 16, 32, 64, 256, 4, 128


class Block(eqx.Module):
    """One layer. The annotations of `up` and `down` name the dimensions that a rule may shard."""

    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    up: Float[Array, "hidden embed"]
    down: Float[Array, "embed hidden"]

    def __init__(self, key: PRNGKeyArray):
        keys = jax.random.split(key, 3)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=keys[0])
        self.up = jax.random.normal(keys[1], (HIDDEN, WIDTH)) / WIDTH**0.5
        self.down = jax.random.normal(keys[2], (WIDTH, HIDDEN)) / HIDDEN**0.5

    def __call__(self, x: Float[Array, "time embed"]) -> Float[Array, "time embed"]:
        y = jax.vmap(self.norm1)(x)
        causal = jnp.tril(jnp.ones((len(x), len(x)), bool))
        x = x + self.attention(y, y, y, causal)
        y = jax.vmap(self.norm2)(x)
        return x + jax.nn.gelu(y @ self.up.T) @ self.down.T


class Transformer(eqx.Module):
    embed: eqx.nn.Embedding
    position: Float[Array, "time embed"]
    blocks: list[Block]
    unembed: eqx.nn.Linear

    def __init__(self, key: PRNGKeyArray):
        keys = jax.random.split(key, 5)
        self.embed = eqx.nn.Embedding(VOCAB, WIDTH, key=keys[0])
        self.position = 0.1 * jax.random.normal(keys[1], (LENGTH, WIDTH))
        self.blocks = [Block(key) for key in keys[2:4]]
        self.unembed = eqx.nn.Linear(WIDTH, VOCAB, key=keys[4])

    def __call__(self, letters: Int[Array, "time"]) -> Float[Array, "time vocab"]:  # noqa: F821
        x = jax.vmap(self.embed)(letters) + self.position
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.unembed)(x)


# Attention by heads, the hidden layer by its width, the embedding by letters: the dimensions of
# `eqx.nn`'s layers have names, and those of Block are in its annotations. The rest is copied.
TENSOR_PARALLEL = by_axes({"heads": "model", "hidden": "model", "vocab": "model"}) | replicated()

# How the weights are kept, and how they are used. What is used otherwise than it is kept is
# gathered by each block that is called, and its gradient is summed and cut on the way back.
STRATEGIES: dict[str, tuple[Rule, Rule]] = {
    "data parallel": (replicated(), replicated()),
    "fully sharded": (fsdp("data"), replicated()),
    "tensor parallel": (TENSOR_PARALLEL, TENSOR_PARALLEL),
    "tensor parallel, and fully sharded": (TENSOR_PARALLEL & fsdp("data"), TENSOR_PARALLEL),
}
OPTIMISER = optax.adamw(3e-3, eps=1e-5)


def loss_of(model: Transformer, text: Int[Array, "batch time+1"]) -> Float[Array, ""]:
    predicted = jax.nn.log_softmax(jax.vmap(model)(text[:, :-1]))
    return -jnp.mean(jnp.take_along_axis(predicted, text[:, 1:, None], axis=-1))


# The old model and optimiser state are donated: the new ones take their memory.
@mylib.filter_jit(donate="all-except-first", in_shardings={"text": batch("data")})
def step(text: Array, model: Transformer, state: optax.OptState, kept: Rule, used: Rule) -> PyTree:
    def loss_as_used(model: Transformer) -> Float[Array, ""]:
        return loss_of(mylib.fully_shard(model, Block, kept, used), text)

    loss, grads = eqx.filter_value_and_grad(loss_as_used)(model)
    updates, state = OPTIMISER.update(grads, state, eqx.filter(model, eqx.is_array))
    model = eqx.apply_updates(model, updates)
    model, state = mylib.filter_shard((model, state), kept)
    return model, state, loss


def make(key: PRNGKeyArray) -> tuple[Transformer, optax.OptState]:
    model = Transformer(key)
    return model, OPTIMISER.init(eqx.filter(model, eqx.is_array))


def texts() -> list[np.ndarray]:
    """Pieces of the only text that is surely at hand: this one."""
    letters = np.frombuffer(Path(__file__).read_bytes(), np.uint8) % VOCAB
    rng = np.random.default_rng(0)
    starts = rng.integers(0, len(letters) - LENGTH - 1, (STEPS, BATCH))
    return [np.stack([letters[s : s + LENGTH + 1] for s in row]).astype(np.int32) for row in starts]


def train(
    mesh: Mesh, kept: Rule, used: Rule
) -> tuple[mylib.results.Explanation, list[float], float]:
    with jax.set_mesh(mesh):
        # Created sharded: each device creates its own part.
        model, state = mylib.filter_jit(make, out_shardings=kept)(jax.random.key(0))
        explanation = mylib.explain((model, state), kept)
        losses, seconds = [], []
        for text in texts():
            start = time.perf_counter()
            model, state, loss = step(text, model, state, kept, used)
            losses.append(float(loss))
            seconds.append(time.perf_counter() - start)
    return explanation, losses, sorted(seconds)[STEPS // 2]


def model_only(explanation: mylib.results.Explanation) -> mylib.results.Explanation:
    """Without the optimiser state, whose moments are where their weights are."""
    rows = tuple(row for row in explanation.rows if row.leaf.parts[0] == "0")
    return mylib.results.Explanation(rows, explanation.faults)


def main() -> None:
    one = mylib.make_mesh(data=1, model=1, devices=jax.devices()[:1])
    several = mylib.make_mesh(data=4, model=2)
    _, reference, _ = train(one, replicated(), replicated())
    summary = []
    for name, (kept, used) in STRATEGIES.items():
        explanation, losses, seconds = train(several, kept, used)
        np.testing.assert_allclose(losses, reference, rtol=1e-3)
        assert explanation.most_loaded is not None
        print(f"\n{name}\n\n{model_only(explanation)}")
        kib = f"{explanation.most_loaded[1] / 1024:.0f} KiB"
        summary.append((name, kib, f"{1e3 * seconds:.0f} ms", f"{losses[-1]:.4f}"))
    row = "{:<36} {:>24} {:>14} {:>14}".format
    print("\n" + row("strategy", "model and state, a device", "time per step", "loss at last"))
    for cells in summary:
        print(row(*cells))
    print(row("on one device", "", "", f"{reference[-1]:.4f}"))


if __name__ == "__main__":
    main()

"""A training step of a model like Llama 7B with `mylib.fully_shard`, compiled for 64 devices: does
it fit, and are memory and bytes what `docs/fsdp-explained.md` derives?

    python benchmarks/fsdp_llama.py h100
    python benchmarks/fsdp_llama.py v5p

Layers are in a scan, kept in f32 and sent in bf16; the optimiser is AdamW; a sequence has 4096
tokens, a batch 256 sequences. Attention and the loss are computed in blocks. Nothing is run.
"""

import argparse
import math
import os
from functools import partial
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float
from side_by_side import print_header, print_row

import mylib
from mylib import machines

DEPTH, WIDTH, HIDDEN, HEADS, VOCAB, TIME, BATCH = 32, 4096, 11008, 32, 32000, 4096, 256
QUERIES, WORDS = 128, 1024  # the blocks of attention, and of the loss
GIB = 2**30
MACHINES = {
    "h100": partial(machines.gpu, "h100", hosts=8),
    "v5p": partial(machines.tpu, "v5p", (4, 4, 4)),
}
# The TPU compiler's own, for embeddings: on each device by itself, the second on its SparseCore.
LOCAL = ("GatherScatterIndicesBitpacked", "TODO(b/522284627)")


class Block(eqx.Module):
    norms: Float[Array, "two embed"]
    attention: Float[Array, "four embed heads"]
    gate: Float[Array, "embed mlp"]
    up: Float[Array, "embed mlp"]
    down: Float[Array, "mlp embed"]

    def __call__(self, x: jax.Array) -> jax.Array:
        y = normalised(x) * self.norms[0]
        q, k, v = ((y @ w).reshape(*x.shape[:2], HEADS, -1) for w in self.attention[:3])
        x = x + attention(turned(q), turned(k), v).reshape(x.shape) @ self.attention[3]
        y = normalised(x) * self.norms[1]
        return x + (jax.nn.silu(y @ self.gate) * (y @ self.up)) @ self.down


class Llama(eqx.Module):
    embed: Float[Array, "vocab embed"]
    blocks: Block
    unembed: Float[Array, "embed vocab"]


def normalised(x: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32**2, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def turned(x: jax.Array) -> jax.Array:
    """Rotary positions."""
    half = x.shape[-1] // 2
    angles = jnp.arange(TIME)[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    sin, cos = (f(angles)[:, None].astype(x.dtype) for f in (jnp.sin, jnp.cos))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def in_blocks(f: Any, size: int, *arrays: jax.Array) -> jax.Array:
    """`f` of the number of each block and of the blocks, along time; nothing inside is saved."""

    def cut(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)

    count = arrays[0].shape[1] // size
    return jax.lax.map(lambda xs: jax.checkpoint(f)(*xs), (jnp.arange(count), *map(cut, arrays)))


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    def block(i: jax.Array, q: jax.Array) -> jax.Array:
        scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32) / q.shape[-1] ** 0.5
        after = jnp.arange(TIME) > i * QUERIES + jnp.arange(QUERIES)[:, None]
        weights = jax.nn.softmax(jnp.where(after, -jnp.inf, scores)).astype(q.dtype)
        return jnp.einsum("bhts,bshd->bthd", weights, v)

    return jnp.moveaxis(in_blocks(block, QUERIES, q), 0, 1).reshape(q.shape)


def loss_of(model: Llama, tokens: jax.Array) -> jax.Array:
    x = model.embed[tokens]
    x = normalised(jax.lax.scan(lambda x, block: (block(x), None), x, model.blocks)[0])

    def block(_: jax.Array, x: jax.Array, words: jax.Array) -> jax.Array:
        logits = jax.nn.log_softmax((x @ model.unembed).astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(logits, words[..., None], -1))

    return jnp.mean(in_blocks(block, WORDS, x, jnp.roll(tokens, -1, 1)))


def abstract_model() -> Llama:
    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    wide = array(DEPTH, WIDTH, HIDDEN)
    blocks = Block(
        array(DEPTH, 2, WIDTH),
        array(DEPTH, 4, WIDTH, WIDTH),
        wide,
        wide,
        array(DEPTH, HIDDEN, WIDTH),
    )
    return Llama(array(VOCAB, WIDTH), blocks, array(WIDTH, VOCAB))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("machine", choices=MACHINES)
    machine = MACHINES[parser.parse_args().machine]()
    mesh = machine.mesh(data=-1)
    kept = mylib.rules.fsdp("data", min_size=2**14)
    optimiser = optax.adamw(1e-4)

    def step(model: Llama, state: Any, tokens: jax.Array) -> Any:
        def loss(model: Llama) -> jax.Array:
            whole = mylib.fully_shard(model, Block, kept, mesh=mesh, dtype=jnp.bfloat16)
            return loss_of(whole, tokens)

        value, grads = jax.value_and_grad(loss)(model)
        updates, state = optimiser.update(grads, state, model)
        return optax.apply_updates(model, updates), state, value

    model = abstract_model()
    given = mylib.filter_shard((model, jax.eval_shape(optimiser.init, model)), kept, mesh=mesh)
    tokens = jax.ShapeDtypeStruct((BATCH, TIME), jnp.int32)
    tokens = mylib.filter_shard(tokens, P("data"), mesh=mesh)
    out = (*jax.tree.map(lambda x: x.sharding, given), None)
    compiled = jax.jit(step, out_shardings=out, donate_argnums=(0, 1)).lower(*given, tokens)
    compiled = compiled.compile()

    report, memory = mylib.audit(compiled, mesh=mesh, local=LOCAL), compiled.memory_analysis()
    numbers = sum(math.prod(x.shape) for x in jax.tree.leaves(model))
    sent, parts = 2 * numbers, 4 * numbers / mesh.size
    layer = 2 * sum(math.prod(x.shape[1:]) for x in jax.tree.leaves(model.blocks))
    of_input = 2 * BATCH * TIME * WIDTH // mesh.size
    # The backward pass of a layer holds about four arrays of the hidden layer's size (`gate`, `up`
    # and their cotangents) and four of its input's.
    inside = 4 * (of_input * HIDDEN // WIDTH + of_input)
    columns = ["what", "GiB", "formula", "GiB by the formula"]
    print_header(f"a model like Llama 7B on {machine}", columns)
    rows = [
        ("weights and optimiser", memory.argument_size_in_bytes, "3 x 4 bytes / N", 3 * parts),
        (
            "temporaries",
            memory.temp_size_in_bytes,
            "L C + S / N + 4 B",
            DEPTH * of_input + parts + 4 * layer,
        ),
        (
            "the same",
            memory.temp_size_in_bytes,
            "L C + S / N + 4 B + A",
            DEPTH * of_input + parts + 4 * layer + inside,
        ),
        (
            "received a step",
            report.wire_bytes(),
            "3 S (N - 1) / N",
            3 * sent * (mesh.size - 1) / mesh.size,
        ),
    ]
    for what, found, formula, expected in rows:
        print_row([what, f"{found / GIB:.2f}", formula, f"{expected / GIB:.2f}"])
    print(f"\nmemory of a device: {machine.memory / GIB:.0f} GiB" if machine.memory else "")
    print(report)


if __name__ == "__main__":
    main()

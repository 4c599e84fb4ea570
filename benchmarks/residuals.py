"""Split residuals: a Llama-like model with FSDP and tensor parallelism, with and without `saved=`
of `mylib.fully_shard`, compiled: temporary memory, and what is sent over the axis of tensor
parallelism beside Megatron's.

    python benchmarks/residuals.py h100
    python benchmarks/residuals.py h100-70b
    python benchmarks/residuals.py v5e

Layers are in a scan, kept in f32 and sent in bf16; a sequence has 4096 tokens. Attention and the
loss are computed in blocks. Nothing is run.
"""

import argparse
import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import equinox as eqx
import jax
import jax.numpy as jnp
from fsdp_llama import in_blocks, normalised
from jax.sharding import Mesh, PartitionSpec as P
from jaxtyping import Array, Float
from side_by_side import print_header, print_row

import mylib
from mylib import machines
from mylib.rules import by_axes, fsdp, replicated

GIB = 2**30
HEAD, TIME, VOCAB = 128, 4096, 32000
QUERIES, WORDS = 128, 1024  # the blocks of attention, and of the loss


class Size(NamedTuple):
    depth: int
    width: int
    hidden: int
    heads: int
    kv_heads: int


class Case(NamedTuple):
    machine: Callable[[], machines.Machine]
    size: Size
    tensor: int
    rows: int  # sequences for each group of devices


SMALL = Size(depth=64, width=4096, hidden=11264, heads=32, kv_heads=32)
LARGE = Size(depth=80, width=8192, hidden=28672, heads=64, kv_heads=8)
CASES = {
    "h100": Case(partial(machines.gpu, "h100", hosts=4), SMALL, tensor=8, rows=4),
    "h100-70b": Case(partial(machines.gpu, "h100", hosts=32), LARGE, tensor=8, rows=16),
    "v5e": Case(partial(machines.tpu, "v5e", (4, 4)), SMALL._replace(depth=16), tensor=4, rows=2),
}
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")


class Block(eqx.Module):
    norms: Float[Array, "two embed"]
    query: Float[Array, "embed heads"]
    key: Float[Array, "embed heads"]
    value: Float[Array, "embed heads"]
    out: Float[Array, "heads embed"]
    gate: Float[Array, "embed mlp"]
    up: Float[Array, "embed mlp"]
    down: Float[Array, "mlp embed"]

    def __call__(self, x: Float[Array, "batch time embed"]) -> jax.Array:
        y = normalised(x) * self.norms[0]
        q, k, v = (
            (y @ w).reshape(*x.shape[:2], -1, HEAD) for w in (self.query, self.key, self.value)
        )
        x = x + attention(turned(q), turned(k), v).reshape(*x.shape[:2], -1) @ self.out
        y = normalised(x) * self.norms[1]
        return x + (jax.nn.silu(y @ self.gate) * (y @ self.up)) @ self.down


class Llama(eqx.Module):
    embed: Float[Array, "vocab embed"]
    blocks: Block
    unembed: Float[Array, "embed vocab"]


def turned(x: jax.Array) -> jax.Array:
    """Rotary positions."""
    half = HEAD // 2
    angles = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    sin, cos = (f(angles)[:, None].astype(x.dtype) for f in (jnp.sin, jnp.cos))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    q = q.reshape(*k.shape[:3], -1, HEAD)  # the queries of each key

    def block(i: jax.Array, q: jax.Array) -> jax.Array:
        scores = jnp.einsum("btkgd,bskd->bkgts", q, k).astype(jnp.float32) / HEAD**0.5
        after = jnp.arange(k.shape[1]) > i * QUERIES + jnp.arange(QUERIES)[:, None]
        weights = jax.nn.softmax(jnp.where(after, -jnp.inf, scores)).astype(q.dtype)
        return jnp.einsum("bkgts,bskd->btkgd", weights, v)

    return jnp.moveaxis(in_blocks(block, QUERIES, q), 0, 1).reshape(q.shape)


def loss_of(model: Llama, tokens: jax.Array) -> jax.Array:
    x = model.embed[tokens]
    x = normalised(jax.lax.scan(lambda x, block: (block(x), None), x, model.blocks)[0])

    def block(_: jax.Array, x: jax.Array, words: jax.Array) -> jax.Array:
        logits = jax.nn.log_softmax((x @ model.unembed).astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(logits, words[..., None], -1))

    return jnp.mean(in_blocks(block, WORDS, x, jnp.roll(tokens, -1, 1)))


def abstract_model(size: Size) -> Llama:
    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    depth, width, hidden, heads, kv_heads = size
    wide, keys = array(depth, width, hidden), array(depth, width, kv_heads * HEAD)
    blocks = Block(
        norms=array(depth, 2, width),
        query=array(depth, width, heads * HEAD),
        key=keys,
        value=keys,
        out=array(depth, heads * HEAD, width),
        gate=wide,
        up=wide,
        down=array(depth, hidden, width),
    )
    return Llama(array(VOCAB, width), blocks, array(width, VOCAB))


def compiled(size: Size, rows: int, mesh: Mesh, saved: P | None) -> Any:
    """The loss and the gradient, with `rows` sequences for each group of devices."""
    tensor = by_axes({"heads": "model", "mlp": "model", "vocab": "model"}) | replicated()
    kept = tensor & fsdp("data", min_size=2**14)

    def gradient(model: Llama, tokens: jax.Array) -> Any:
        def loss(model: Llama) -> jax.Array:
            options = {"mesh": mesh, "dtype": jnp.bfloat16, "saved": saved}
            return loss_of(mylib.fully_shard(model, Block, kept, tensor, **options), tokens)

        return jax.value_and_grad(loss)(model)

    model = mylib.filter_shard(abstract_model(size), kept, mesh=mesh)
    tokens = jax.ShapeDtypeStruct((rows * mesh.shape["data"], TIME), jnp.int32)
    tokens = mylib.filter_shard(tokens, P("data"), mesh=mesh)
    out = None, jax.tree.map(lambda x: x.sharding, model)
    return jax.jit(gradient, out_shardings=out).lower(model, tokens).compile()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("machine", choices=CASES)
    case = CASES[parser.parse_args().machine]
    mesh = case.machine().mesh(data=-1, model=case.tensor)
    # An all-gather and a reduce-scatter for each of a layer's six all-reduces: two in the forward
    # pass, two when it is computed again, two in the backward pass.
    whole = case.rows * TIME * case.size.width * 2
    formula = case.size.depth * 6 * 2 * whole * (case.tensor - 1) / case.tensor
    columns = ["saved", "temporaries", *KINDS, "all over model", "Megatron", "ratio"]
    print_header(f"{case.size} on {mesh.shape}, GiB a device, sent over the axis model", columns)
    for saved in None, P("data", "model"):
        program = compiled(case.size, case.rows, mesh, saved)
        report = mylib.audit(program, mesh=mesh)
        sent = [report.wire_bytes(kind, "model") for kind in (*KINDS, None)]
        numbers = [program.memory_analysis().temp_size_in_bytes, *sent, formula]
        ratio = f"{sent[-1] / formula:.2f}"
        print_row([str(saved), *(f"{x / GIB:.2f}" for x in numbers), ratio])


if __name__ == "__main__":
    main()

"""Split residuals: a Llama-like model with FSDP and tensor parallelism, with and without
`fully_shard(..., saved=...)`, compiled: temporary memory, and bytes over the axis of tensor
parallelism beside Megatron's.

    python benchmarks/residuals.py h100
    python benchmarks/residuals.py h100 --model 70b
    python benchmarks/residuals.py v5e

Layers are in a scan, kept in f32 and sent in bf16. It computes the loss and the gradient. Nothing is run.
"""

import argparse
import math
import os
import time
from functools import partial
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import equinox as eqx
import jax
import jax.numpy as jnp
from fsdp_llama import in_blocks, normalised
from jax.sharding import PartitionSpec as P
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


SIZES = {"small": Size(64, 4096, 11264, 32, 32), "70b": Size(80, 8192, 28672, 64, 8)}
MACHINES = {
    "h100": lambda hosts: machines.gpu("h100", hosts=hosts),
    "v5e": lambda hosts: machines.tpu("v5e", (4, 2 * hosts)),
    "v5p": lambda hosts: machines.tpu("v5p", (4, 4, hosts // 2)),
}


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
        q, k, v = ((y @ w).reshape(*x.shape[:2], -1, HEAD) for w in (self.query, self.key, self.value))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("machine", choices=MACHINES)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--tensor", type=int, default=8)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--depth", type=int, default=None)
    parser.add_argument("--which", default="both")
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    size = SIZES[args.size]
    if args.depth: size = size._replace(depth=args.depth)
    machine = MACHINES[args.machine](args.hosts)
    mesh = machine.mesh(data=-1, model=args.tensor)
    tensor = by_axes({"heads": "model", "mlp": "model", "vocab": "model"}) | replicated()
    kept = tensor & fsdp("data", min_size=2**14)
    model = mylib.filter_shard(abstract_model(size), kept, mesh=mesh)
    rows = args.rows * mesh.shape["data"]
    tokens = mylib.filter_shard(jax.ShapeDtypeStruct((rows, TIME), jnp.int32), P("data"), mesh=mesh)
    whole = args.rows * TIME * size.width * 2
    n = args.tensor
    formula = size.depth * 12 * whole * (n - 1) / n
    print("input of a layer", whole / GIB, "all layers", whole * size.depth / GIB, "formula", formula / GIB, flush=True)
    for saved in {"both": (None, P("data", "model")), "with": (P("data", "model"),), "without": (None,)}[args.which]:
        def gradient(model: Llama, tokens: jax.Array) -> Any:
            def loss(model: Llama) -> jax.Array:
                return loss_of(mylib.fully_shard(model, Block, kept, tensor, mesh=mesh, dtype=jnp.bfloat16, saved=saved), tokens)
            return jax.value_and_grad(loss)(model)
        out = None, jax.tree.map(lambda x: x.sharding, model)
        start = time.time()
        compiled = jax.jit(gradient, out_shardings=out).lower(model, tokens).compile()
        seconds = time.time() - start
        report = mylib.audit(compiled, mesh=mesh)
        kinds = ["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"]
        sent = {kind: report.wire_bytes(kind, "model") / GIB for kind in kinds}
        print(saved, f"{seconds:.0f} s; temporaries {compiled.memory_analysis().temp_size_in_bytes / GIB:.2f}", {k: round(v, 2) for k, v in sent.items()}, "ratio", sum(sent.values()) * GIB / formula,
              "all", report.wire_bytes() / GIB, "over data", report.wire_bytes(None, "data") / GIB, flush=True)
        if args.report:
            print(report)


if __name__ == "__main__":
    main()

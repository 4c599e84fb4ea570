"""Attention as a Pallas kernel, in the Llama of `llama.py`: split as its reference may be.

    python examples/models/flash.py
    python examples/models/flash.py --machine "v5e 4x4" --strategy "FSDP, tensor parallel"

JAX can't see into a kernel. `mylib.opaque(..., like=reference)` reads from plain JAX that each
device may have some of the rows and heads, and takes the derivative from it, too. On the CPU the
kernel is interpreted; for GPUs and TPUs it is a real one.
"""

import running  # first: it simulates devices

# isort: split
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import llama
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, PRNGKeyArray
from llama import LARGE as LARGE, SMALL as SMALL, Block, Llama, Size, loss
from running import Strategy, Task, report, trained

import mylib

Heads = Float[Array, "time heads size"]


def kernel(q: Any, k: Any, v: Any, out: Any, *, block: int) -> None:
    """Attention of some times of one head to those before them, one block of these after another:
    a softmax whose largest number and sum so far are corrected on the way.
    """
    rows, size = q.shape[1:]
    first = pl.program_id(1) * rows

    def turn(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        so_far, largest, total = state
        at = (0, pl.ds(i * block, block), slice(None))
        scores = jnp.dot(q[0], k[at].T, preferred_element_type=jnp.float32) / size**0.5
        time = first + jax.lax.broadcasted_iota(jnp.int32, (rows, block), 0)
        before = i * block + jax.lax.broadcasted_iota(jnp.int32, (rows, block), 1)
        scores = jnp.where(time >= before, scores, -1e30)
        new = jnp.maximum(largest, jnp.max(scores, 1, keepdims=True))
        weights, correction = jnp.exp(scores - new), jnp.exp(largest - new)
        part = jnp.dot(weights.astype(v.dtype), v[at], preferred_element_type=jnp.float32)
        total = total * correction + jnp.sum(weights, 1, keepdims=True)
        return so_far * correction + part, new, total

    start = jnp.zeros((rows, v.shape[2])), jnp.full((rows, 1), -1e30), jnp.zeros((rows, 1))
    so_far, _, total = jax.lax.fori_loop(0, k.shape[1] // block, turn, start)
    out[0] = (so_far / total).astype(out.dtype)


def call(q: Heads, k: Heads, v: Heads, *, interpret: bool) -> Heads:
    q, k, v = (jnp.swapaxes(x, 0, 1) for x in (q, k, v))
    (heads, time, size), groups = q.shape, k.shape[0]
    block = min(128, time)

    def some(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, block, size), lambda head, i: (head, i, 0))

    def whole(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, time, size), lambda head, i: (head * groups // heads, 0, 0))

    out = pl.pallas_call(
        partial(kernel, block=block),
        out_shape=jax.ShapeDtypeStruct((heads, time, v.shape[2]), q.dtype),
        grid=(heads, time // block),
        in_specs=[some(size), whole(size), whole(v.shape[2])],
        out_specs=some(v.shape[2]),
        interpret=interpret,
    )(q, k, v)
    return jnp.swapaxes(out, 0, 1)


@mylib.opaque(like=partial(jax.nn.dot_product_attention, is_causal=True))
def attention(q: Heads, k: Heads, v: Heads) -> Heads:
    return jax.lax.platform_dependent(
        q, k, v, cpu=partial(call, interpret=True), default=partial(call, interpret=False)
    )


class FlashBlock(Block):
    def __init__(self, size: Size, key: PRNGKeyArray):
        super().__init__(size, key)

    def __call__(self, x: Float[Array, "time width"]) -> Float[Array, "time width"]:
        return self.finish(x, attention(*self.project(x, jnp.arange(len(x)))))


def make(size: Size, key: PRNGKeyArray) -> Llama:
    each = jax.random.split(jax.random.split(key, 3)[1], size.layers)
    blocks = eqx.filter_vmap(lambda key: FlashBlock(size, key))(each)
    return eqx.tree_at(lambda model: model.blocks, Llama(size, key), blocks)


def task(size: Size) -> Task:
    return Task(partial(make, size), loss, llama.task(size).batch, FlashBlock)


STRATEGIES = {
    name: Strategy(how.axes, how.kept, how.used, how.rows, how.contracts)
    for name, how in llama.STRATEGIES.items()
    if name in ("FSDP", "tensor parallel", "FSDP, tensor parallel")
}

if __name__ == "__main__":
    running.main(STRATEGIES, trained(task(SMALL)), partial(report, task(LARGE)))

"""Generating text with a cache of keys and values: one program for the prompt and all new tokens.

    python examples/models/generate.py
    python examples/models/generate.py --machine "h100 x 16"

Trains the Llama of llama.py to count, and lets it go on with rows of numbers. The cache is split
over the rows of the batch and over the heads; nothing of it is ever communicated.
"""

import running  # first: it simulates devices

# isort: split
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import llama
from jax.sharding import Mesh, PartitionSpec as P
from jaxtyping import Array, Float, Int, PRNGKeyArray
from running import Strategy

import mylib
from mylib.contracts import at_most, never
from mylib.rules import batch, replicated, where_present

PROMPT, NEW = 4, 8
Cache = tuple[Float[Array, "layers time groups size"], Float[Array, "layers time groups size"]]
# The rows of a batch are in front of the cache's own dimensions.
CACHE = where_present(P("data", None, None, "model"))


def prefill(model: llama.Llama, tokens: Int[Array, "time"], length: int) -> tuple[Array, Cache]:  # noqa: F821
    """What comes after the prompt, as scores, and a cache for `length` tokens."""
    positions = jnp.arange(len(tokens))

    def layer(x: Array, block: llama.Block) -> tuple[Array, tuple[Array, Array]]:
        query, key, value = block.project(x, positions)
        attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        more = ((0, length - len(tokens)), (0, 0), (0, 0))
        return block.finish(x, attended), (jnp.pad(key, more), jnp.pad(value, more))

    x, cache = through(model, layer, jax.vmap(model.embed)(tokens))
    return scores(model, x[-1]), cache


def decode(model: llama.Llama, token: Array, at: Array, cache: Cache) -> tuple[Array, Cache]:
    """What comes after the token at one position."""
    seen = jnp.arange(cache[0].shape[1]) <= at

    def layer(x: Array, block: llama.Block, kept: tuple[Array, Array]) -> tuple[Array, Cache]:
        query, key, value = block.project(x, at[None])
        keys, values = kept[0].at[at].set(key[0]), kept[1].at[at].set(value[0])
        attended = jax.nn.dot_product_attention(query, keys, values, mask=seen[None, None])
        return block.finish(x, attended), (keys, values)

    x, cache = through(model, layer, model.embed(token)[None], cache)
    return scores(model, x[0]), cache


def through(model: llama.Llama, layer: Callable, x: Array, *given: Cache) -> tuple[Array, Cache]:
    """Through all blocks, with what is given to each."""
    arrays, static = eqx.partition(model.blocks, eqx.is_array)

    def one(x: Array, each: tuple) -> tuple[Array, Cache]:
        return layer(x, eqx.combine(each[0], static), *each[1:])

    return jax.lax.scan(one, x, (arrays, *given))


def scores(model: llama.Llama, x: Float[Array, "width"]) -> Float[Array, "vocab"]:  # noqa: F821
    x = model.norm(x)
    return model.embed.weight @ x if model.head is None else model.head(x)


def generate(
    model: llama.Llama,
    prompts: Int[Array, "rows time"],
    new: int,
    key: PRNGKeyArray | None = None,
) -> Int[Array, "rows new"]:
    """New tokens for each prompt: the most likely ones, or with a key drawn at random."""
    time = prompts.shape[1]
    logits, cache = jax.vmap(lambda tokens: prefill(model, tokens, time + new))(prompts)

    def choose(logits: Array, number: Array) -> Array:
        if key is None:
            return jnp.argmax(logits, -1)
        return jax.random.categorical(jax.random.fold_in(key, number), logits)

    def step(carry: tuple[Array, Cache], number: Array) -> tuple[tuple[Array, Cache], Array]:
        logits, cache = carry
        tokens = choose(logits, number)
        run = jax.vmap(lambda token, cache: decode(model, token, time + number, cache))
        logits, cache = run(tokens, cache)
        return (logits, mylib.filter_shard(cache, (CACHE, CACHE))), tokens

    carry = logits, mylib.filter_shard(cache, (CACHE, CACHE))
    return jax.lax.scan(step, carry, jnp.arange(new))[1].T


def program(strategy: Strategy, mesh: Mesh) -> Callable:
    return mylib.filter_jit(
        generate,
        in_shardings={"model": strategy.used, "prompts": batch(strategy.rows)},
        out_shardings=batch(strategy.rows),
        mesh=mesh,
    )


# Of the scores, which are split by the vocabulary, each device sends its largest one alone.
FEW = at_most("4 KiB", "all-gather", "model")
STRATEGIES = {
    name: strategy._replace(kept=strategy.used, contracts=(never("all-gather", "data"), FEW))
    for name, strategy in llama.STRATEGIES.items()
    if name == "tensor parallel"
} | {
    "data parallel": Strategy(
        {"data": -1}, replicated(), replicated(), "data", (never("all-gather", "data"),)
    )
}


def run(strategy: Strategy, mesh: Mesh) -> str:
    model, _ = running.fit(llama.task(llama.SMALL), strategy, mesh, 60)
    prompts = llama.task(llama.SMALL).batch(99)[:, :PROMPT]
    with jax.set_mesh(mesh):
        tokens = program(strategy, mesh)(model, prompts, NEW)
        drawn = program(strategy, mesh)(model, prompts, NEW, jax.random.key(0))
    return f"{prompts[0].tolist()} -> {tokens[0].tolist()}, drawn {drawn[0].tolist()}"


def report(strategy: Strategy, mesh: Mesh, size: llama.Size = llama.LARGE) -> mylib.results.Report:
    key = jax.eval_shape(lambda: jax.random.key(0))
    with jax.set_mesh(mesh):
        model = eqx.filter_eval_shape(llama.Llama, size, key)
        prompts = jax.ShapeDtypeStruct((size.rows, size.time // 2), jnp.int32)
        return mylib.audit(program(strategy, mesh), model, prompts, size.time // 2)


if __name__ == "__main__":
    running.main(STRATEGIES, run, report)

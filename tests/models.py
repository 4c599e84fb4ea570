"""Real models, small: what the tests of rules place and train."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

WIDTH, HIDDEN, HEADS, VOCAB, LENGTH = 32, 64, 4, 64, 8


class Block(eqx.Module):
    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width: int, hidden: int, heads: int, *, key: PRNGKeyArray):
        keys = jax.random.split(key, 3)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=keys[0])
        self.up = eqx.nn.Linear(width, hidden, key=keys[1])
        self.down = eqx.nn.Linear(hidden, width, key=keys[2])

    def __call__(self, x: Float[Array, "time embed"]) -> Float[Array, "time embed"]:
        y = jax.vmap(self.norm1)(x)
        mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
        x = x + self.attention(y, y, y, mask)
        y = jax.vmap(self.norm2)(x)
        return x + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(y)))


class Transformer(eqx.Module):
    """A language model. `layers` are a list of blocks, or one block of stacked arrays."""

    embed: eqx.nn.Embedding
    position: Float[Array, "time embed"]
    layers: list[Block] | Block
    norm: eqx.nn.LayerNorm
    unembed: eqx.nn.Linear

    def __init__(
        self,
        width: int = WIDTH,
        hidden: int = HIDDEN,
        heads: int = HEADS,
        vocab: int = VOCAB,
        depth: int = 2,
        *,
        scanned: bool = False,
        key: PRNGKeyArray,
    ):
        keys = jax.random.split(key, 4)
        self.embed = eqx.nn.Embedding(vocab, width, key=keys[0])
        self.position = jax.random.normal(keys[1], (LENGTH, width))

        def make(key: PRNGKeyArray) -> Block:
            return Block(width, hidden, heads, key=key)

        each = jax.random.split(keys[2], depth)
        self.layers = eqx.filter_vmap(make)(each) if scanned else [make(key) for key in each]
        self.norm = eqx.nn.LayerNorm(width)
        self.unembed = eqx.nn.Linear(width, vocab, use_bias=False, key=keys[3])

    def __call__(self, tokens: Int[Array, "time"]) -> Float[Array, "time vocab"]:
        x = jax.vmap(self.embed)(tokens) + self.position[: len(tokens)]
        if isinstance(self.layers, list):
            for layer in self.layers:
                x = layer(x)
        else:
            arrays, rest = eqx.partition(self.layers, eqx.is_array)
            x, _ = jax.lax.scan(lambda x, a: (eqx.combine(a, rest)(x), None), x, arrays)
        return jax.vmap(self.unembed)(jax.vmap(self.norm)(x))


class ConvNet(eqx.Module):
    convs: list[eqx.nn.Conv2d]
    norm: eqx.nn.GroupNorm
    head: eqx.nn.Linear

    def __init__(self, *, key: PRNGKeyArray):
        keys = jax.random.split(key, 3)
        self.convs = [
            eqx.nn.Conv2d(8, 16, 3, padding=1, key=keys[0]),
            eqx.nn.Conv2d(16, 32, 3, padding=1, key=keys[1]),
        ]
        self.norm = eqx.nn.GroupNorm(4, 32)
        self.head = eqx.nn.Linear(32, 8, key=keys[2])

    def __call__(self, image: Float[Array, "in height width"]) -> Float[Array, "out"]:
        for conv in self.convs:
            image = jax.nn.relu(conv(image))
        return self.head(jnp.mean(self.norm(image), axis=(1, 2)))


class AnnotatedMLP(eqx.Module):
    """The MLP of Megatron, its dimensions named as jaxtyping names them."""

    up: Float[Array, "mlp embed"]
    up_bias: Float[Array, "mlp"] | None
    down: Float[Array, "embed mlp"]

    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN, *, key: PRNGKeyArray):
        keys = jax.random.split(key, 2)
        self.up = jax.random.normal(keys[0], (hidden, width)) / width**0.5
        self.up_bias = jnp.zeros(hidden)
        self.down = jax.random.normal(keys[1], (width, hidden)) / hidden**0.5

    def __call__(self, x: Float[Array, "embed"]) -> Float[Array, "embed"]:
        hidden = self.up @ x
        if self.up_bias is not None:
            hidden = hidden + self.up_bias
        return self.down @ jax.nn.gelu(hidden)

"""Models and training steps as for one device, without a placement."""

from collections import Counter

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import mylib
from mylib._planning.plan.trace import PlannedStep, layers_of, trace

OPTIM = optax.adam(1e-3)


class PlainBlock(eqx.Module):
    norm: eqx.nn.LayerNorm
    attend: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width, heads, key):
        keys = jax.random.split(key, 3)
        self.norm = eqx.nn.LayerNorm(width)
        self.attend = eqx.nn.MultiheadAttention(heads, width, key=keys[0])
        self.up = eqx.nn.Linear(width, 4 * width, key=keys[1])
        self.down = eqx.nn.Linear(4 * width, width, key=keys[2])

    def __call__(self, x):
        y = jax.vmap(self.norm)(x)
        x = x + self.attend(y, y, y)
        return x + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(x)))


class PlainTransformer(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: list[PlainBlock]
    head: eqx.nn.Linear

    def __init__(self, key, width=64, heads=4, depth=2, vocab=128):
        keys = jax.random.split(key, depth + 2)
        self.embed = eqx.nn.Embedding(vocab, width, key=keys[0])
        self.blocks = [PlainBlock(width, heads, key) for key in keys[2:]]
        self.head = eqx.nn.Linear(width, vocab, use_bias=False, key=keys[1])

    def __call__(self, tokens):
        x = jax.vmap(self.embed)(tokens)
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(x)


class StackedTransformer(PlainTransformer):
    def __init__(self, key, **sizes):
        super().__init__(key, **sizes)
        self.blocks = jax.tree.map(
            lambda *x: jnp.stack(x) if eqx.is_array(x[0]) else x[0], *self.blocks
        )

    def __call__(self, tokens):
        x = jax.vmap(self.embed)(tokens)
        arrays, rest = eqx.partition(self.blocks, eqx.is_array)
        x, _ = jax.lax.scan(lambda x, block: (eqx.combine(block, rest)(x), None), x, arrays)
        return jax.vmap(self.head)(x)


def language_loss(model, tokens):
    logits = jax.vmap(model)(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def squared_loss(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


def step_of(loss, sharded=lambda model: model):
    def step(batch, model, state):
        value, grads = eqx.filter_value_and_grad(lambda m: loss(sharded(m), batch))(model)
        updates, state = OPTIM.update(grads, state)
        return eqx.apply_updates(model, updates), state, value

    return step


def with_state(model):
    return model, OPTIM.init(eqx.filter(model, eqx.is_array))


def abstract(make, batch):
    """A batch, a model and a state without numbers."""
    return batch, *eqx.filter_eval_shape(lambda: with_state(make(key=jax.random.key(0))))


class Decoder(eqx.Module):
    query: jax.Array
    key: jax.Array
    out: jax.Array

    def __call__(self, x, cache, position):
        q, k = ((x @ w).reshape(x.shape[0], 8, -1) for w in (self.query, self.key))
        cache = jax.lax.dynamic_update_slice(cache, k[:, None], (0, position, 0, 0))
        weights = jax.nn.softmax(jnp.einsum("bhd,bthd->bht", q, cache))
        return x + jnp.einsum("bht,bthd->bhd", weights, cache).reshape(
            x.shape[0], -1
        ) @ self.out, cache


def decode(x, model, cache, position):
    return model(x, cache, position)


class Recurrent(eqx.Module):
    cell: eqx.nn.GRUCell

    def __init__(self, key, width=64):
        self.cell = eqx.nn.GRUCell(width, width, key=key)

    def __call__(self, x):
        return jax.lax.scan(lambda h, x: (self.cell(x, h),) * 2, jnp.zeros_like(x[0]), x)[1]


def mlp(key, size=64, hidden=256, depth=2):
    return eqx.nn.MLP(size, size, hidden, depth, key=key)


_array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
DECODED = (
    _array(32, 64),
    Decoder(*(_array(64, 64) for _ in range(3))),
    _array(32, 16, 8, 8),
    jax.ShapeDtypeStruct((), jnp.int32),
)
TOKENS = jax.ShapeDtypeStruct((16, 17), jnp.int32)
ROWS = jax.ShapeDtypeStruct((16, 64), jnp.float32)
# The simplest step, and its arguments.
STEP, MLP = step_of(squared_loss), abstract(mlp, ROWS)


def modelled(step, *args, **options):
    """A plan for which nothing is compiled."""
    return mylib.plan(step, *args, **{"compile": 0, "policies": ("full",), **options})


def traced(make, batch, loss):
    step = PlannedStep.of(step_of(loss), abstract(make, batch))
    return trace(step, "full", layers_of(trace(step, "full", None)))


def sent(report):
    return Counter((x.kind, x.axes, x.times, x.bytes, x.dtype) for x in report.collectives)

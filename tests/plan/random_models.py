"""Parts and models for random training steps, written as for one device."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

# The length of what is no image.
TIME = 6


# --- parts of a model: each maps an array of time and width to one of the same shape ---


def linear(n, m, key, **options):
    return eqx.nn.Linear(n, m, key=key, **options)


class Feed(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    norm: eqx.nn.LayerNorm

    def __init__(self, width, hidden, key):
        self.up, self.down = linear(width, hidden, key), linear(hidden, width, key)
        self.norm = eqx.nn.LayerNorm(width)

    def __call__(self, x, key):
        y = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norm)(x)))
        return x + jax.vmap(self.down)(y)


class Gated(eqx.Module):
    """Two halves of one product."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width, hidden, key):
        self.up = linear(width, 2 * hidden, key, use_bias=False)
        self.down = linear(hidden, width, key)

    def __call__(self, x, key):
        a, b = jnp.split(jax.vmap(self.up)(x), 2, axis=-1)
        return x + jax.vmap(self.down)(jax.nn.silu(a) * b)


class Dropped(eqx.Module):
    up: eqx.nn.Linear
    drop: eqx.nn.Dropout

    def __init__(self, width, hidden, key):
        self.up, self.drop = linear(width, width, key), eqx.nn.Dropout(0.3)

    def __call__(self, x, key):
        return x + self.drop(jax.vmap(self.up)(x), key=key)


class Attend(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.RMSNorm

    def __init__(self, width, hidden, key):
        heads = 4 if width % 4 == 0 else 1
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=key, use_query_bias=True)
        self.norm = eqx.nn.RMSNorm(width)

    def __call__(self, x, key):
        y = jax.vmap(self.norm)(x)
        return x + self.attention(y, y, y, jnp.tril(jnp.ones((len(x), len(x)), bool)))


class Bare(eqx.Module):
    """Attention with bare arrays, whose heads have a dimension of their own."""

    qkv: jax.Array
    out: jax.Array
    places: jax.Array
    scale: jax.Array

    def __init__(self, width, hidden, key):
        self.qkv = jax.random.normal(key, (3, width, 4, 3)) / 4
        self.out = jax.random.normal(key, (4, 3, width)) / 4
        self.places = jax.random.normal(key, (TIME, width))
        self.scale = jnp.ones(())

    def __call__(self, x, key):
        q, k, v = jnp.einsum("td,ndhk->nthk", x + self.places[: len(x)], self.qkv)
        weights = jax.nn.softmax(jnp.einsum("thk,shk->hts", q, k) * self.scale)
        return x + jnp.einsum("hts,shk,hkd->td", weights, v, self.out)


class Convolved(eqx.Module):
    conv: eqx.nn.Conv1d
    norm: eqx.nn.GroupNorm

    def __init__(self, width, hidden, key):
        groups = 2 if width % 2 == 0 else 1
        self.conv = eqx.nn.Conv1d(width, width, 3, padding=1, key=key)
        self.norm = eqx.nn.GroupNorm(groups, width)

    def __call__(self, x, key):
        return x + jax.nn.relu(self.norm(self.conv(x.T))).T


class Recurrent(eqx.Module):
    cell: eqx.nn.GRUCell
    first: jax.Array

    def __init__(self, width, hidden, key):
        self.cell = eqx.nn.GRUCell(width, width, key=key)
        self.first = jax.random.normal(key, (width,))

    def __call__(self, x, key):
        return jax.lax.scan(lambda h, x: (self.cell(x, h),) * 2, self.first, x)[1]


class LongShort(eqx.Module):
    cell: eqx.nn.LSTMCell

    def __init__(self, width, hidden, key):
        self.cell = eqx.nn.LSTMCell(width, width, key=key)

    def __call__(self, x, key):
        def turn(carry, x):
            carry = self.cell(x, carry)
            return carry, carry[0]

        zeros = jnp.zeros_like(x[0])
        return x + jax.lax.scan(turn, (zeros, zeros), x, reverse=True)[1]


class Adapted(eqx.Module):
    """A frozen weight with a trained one of low rank."""

    base: eqx.nn.Linear
    a: jax.Array
    b: jax.Array
    scale: float = eqx.field(static=True)

    def __init__(self, width, hidden, key):
        self.base = linear(width, width, key)
        self.a = jax.random.normal(key, (2, width))
        self.b = jnp.zeros((width, 2)) + 0.1
        self.scale = 0.5

    def __call__(self, x, key):
        base = jax.lax.stop_gradient(self.base)
        return x + jax.vmap(base)(x) + self.scale * x @ self.a.T @ self.b.T


class Experts(eqx.Module):
    gate: eqx.nn.Linear
    up: jax.Array
    down: jax.Array

    def __init__(self, width, hidden, key):
        self.gate = linear(width, 4, key)
        self.up = jax.random.normal(key, (4, width, hidden)) / 8
        self.down = jax.random.normal(key, (4, hidden, width)) / 8

    def __call__(self, x, key):
        values, chosen = jax.lax.top_k(jax.vmap(self.gate)(x), 2)
        weights = jax.nn.one_hot(chosen, 4) * jax.nn.softmax(values)[..., None]
        y = jnp.einsum("td,edh->teh", x, self.up)
        y = jnp.einsum("teh,ehd->ted", jax.nn.relu(y), self.down)
        return x + jnp.einsum("ted,tke->td", y, weights)


class Inner(eqx.Module):
    """Members in a dict and a tuple, one of them twice, one a function, one None."""

    parts: dict[str, Any]
    pair: tuple[Any, ...]
    activation: Any
    nothing: None

    def __init__(self, width, hidden, key):
        one = linear(width, width, key)
        self.parts = {"a": one, "b c": linear(width, width, key)}
        self.pair = (one, linear(width, width, key, use_bias=False))
        self.activation, self.nothing = jnp.tanh, None

    def __call__(self, x, key):
        for part in (*self.parts.values(), *self.pair):
            x = x + self.activation(jax.vmap(part)(x)) / 4
        return x


class Chosen(eqx.Module):
    """A condition, a loop, a sort, a cumulative sum, and reshapes that cut dimensions."""

    a: eqx.nn.Linear
    b: eqx.nn.Linear

    def __init__(self, width, hidden, key):
        self.a, self.b = linear(width, width, key), linear(width, width, key)

    def __call__(self, x, key):
        x = jax.lax.cond(x.sum() > 0, jax.vmap(self.a), jax.vmap(self.b), x)
        x = jax.lax.fori_loop(0, 2, lambda i, x: jnp.roll(x, i, axis=-1) * 0.9, x)
        y = jnp.sort(x, axis=0) + jnp.cumsum(x, axis=-1)[:, ::-1] / x.shape[1]
        return x + y.reshape(-1)[: x.size].reshape(x.shape[1], x.shape[0]).T


class Checkpointed(eqx.Module):
    feed: Feed

    def __init__(self, width, hidden, key):
        self.feed = Feed(width, hidden, key)

    def __call__(self, x, key):
        return eqx.filter_checkpoint(self.feed)(x, key)


class Sequenced(eqx.Module):
    inner: eqx.nn.Sequential

    def __init__(self, width, hidden, key):
        self.inner = eqx.nn.Sequential([
            linear(width, hidden, key), eqx.nn.Lambda(jax.nn.relu), eqx.nn.Identity(),
            linear(hidden, width, key), eqx.nn.Lambda(jnp.tanh),
        ])  # fmt: skip

    def __call__(self, x, key):
        return x + jax.vmap(lambda x: self.inner(x, key=key))(x)


class Normed(eqx.Module):
    """Weights that are computed from weights, and a custom derivative."""

    inner: eqx.nn.WeightNorm
    mlp: eqx.nn.MLP

    def __init__(self, width, hidden, key):
        self.inner = eqx.nn.WeightNorm(linear(width, width, key))
        self.mlp = eqx.nn.MLP(width, width, hidden, 1, key=key)

    def __call__(self, x, key):
        return jax.vmap(self.mlp)(x) + halved(jax.vmap(self.inner)(x))


@jax.custom_vjp
def halved(x):
    return x / 2


halved.defvjp(lambda x: (x / 2, x.sum(-1)), lambda kept, g: (g / 2 + 0 * kept[:, None],))

PARTS = {
    cls.__name__: cls
    for cls in (
        Feed, Gated, Dropped, Attend, Bare, Convolved, Recurrent, LongShort, Adapted, Experts,
        Inner, Chosen, Checkpointed, Sequenced, Normed,
    )
}  # fmt: skip


# --- models ---


class Net(eqx.Module):
    """Rows, or tokens, through parts in a list, a tuple, or stacked; one may be called twice."""

    first: Any
    parts: Any
    norm: Any
    head: Any
    arrangement: str = eqx.field(static=True)

    def __init__(self, program, key):
        keys = iter(jax.random.split(key, 20))
        width, size = program.width, program.inputs
        make = [lambda key, cls=PARTS[x]: cls(width, program.hidden, key) for x in program.parts]
        self.arrangement = program.arrangement
        self.first = linear(width, width, next(keys))
        if program.batch == "tokens":
            self.first = eqx.nn.Embedding(size, width, key=next(keys))
        if program.arrangement == "stacked":
            self.parts = eqx.filter_vmap(make[0])(jax.random.split(next(keys), 3))
        else:
            self.parts = [one(next(keys)) for one in make]
        if program.arrangement == "tuple":
            self.parts = tuple(self.parts)
        self.norm = eqx.nn.BatchNorm(width, "rows", mode="batch") if program.norm else None
        self.head = linear(width, size, next(keys), use_bias=False)
        if program.head == "tied":
            self.head = None
        if program.head == "shared" and program.batch == "tokens":
            weight = lambda pair: pair[1].weight  # noqa: E731
            self.head = eqx.nn.Shared((self.first, self.head), weight, lambda pair: pair[0].weight)
            self.first = None

    def __call__(self, x, state, key):
        first, head = self.first, self.head
        if isinstance(head, eqx.nn.Shared):
            first, head = head()
        x = jax.vmap(first)(x)
        if self.arrangement == "stacked":
            arrays, rest = eqx.partition(self.parts, eqx.is_array)
            turn = lambda x, part: (eqx.combine(part, rest)(x, key), None)  # noqa: E731
            x = jax.lax.scan(turn, x, arrays)[0]
        else:
            for part in self.parts:
                x = part(x, key)
            x = self.parts[0](x, key) if self.arrangement == "twice" else x
        if self.norm is not None:
            mean, state = self.norm(x.mean(0), state)
            x = x + mean
        if head is None:
            return x @ first.weight.T, state
        return jax.vmap(head)(x), state


class Images(eqx.Module):
    convs: list[Any]
    norm: Any
    head: eqx.nn.Linear

    def __init__(self, program, key):
        wide = program.hidden
        # Gradients of grouped convolutions are refused on other meshes.
        depth = wide if program.mesh == "8" else 1
        self.convs = [
            eqx.nn.Conv2d(3, wide, 3, padding=1, key=key),
            eqx.nn.MaxPool2d(2, 2),
            eqx.nn.Conv2d(wide, wide, 3, stride=2, padding=1, groups=depth, key=key),
            eqx.nn.ConvTranspose2d(wide, wide, 2, key=key),
            eqx.nn.AdaptiveAvgPool2d(2),
        ]
        self.norm = eqx.nn.BatchNorm(wide, "rows", mode="batch") if program.norm else None
        self.head = linear(4 * wide, program.inputs, key)

    def __call__(self, x, state, key):
        for layer in self.convs:
            x = layer(x)
        if self.norm is not None:
            x, state = self.norm(x, state)
        return self.head(jax.nn.relu(x).reshape(-1))[None], state


class Train(eqx.Module):
    """A model and the state of its optimiser in one argument."""

    model: Any
    state: Any
    count: Any

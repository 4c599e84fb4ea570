"""Layers as people write them, one class for each kind, for `random_layers.py`.

Each takes and returns arrays of shape (..., TIME, WIDTH).
"""

from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Complex, Float

TIME, WIDTH, HIDDEN = 4, 8, 16
# By their names, as a program that fails is repeated by hand.
KINDS: dict[str, type["Kind"]] = {}
# Those that no random program is made of: they need other arguments, or a kind of mesh.
SPECIAL = ("Author", "Batched")


def normal(key: Any, *shape: int) -> Array:
    return jr.normal(key, shape) / (shape[-2] if len(shape) > 1 else 4) ** 0.5


def each(fun: Callable[..., Any], rank: int, x: Any) -> Any:
    """`fun` for each of the last `rank` dimensions."""
    for _ in range(x.ndim - rank):
        fun = jax.vmap(fun)
    return fun(x)


class Kind(eqx.Module):
    """A layer, made of a key. `takes` is what it is called with, besides its input."""

    takes: ClassVar[str] = ""
    methods: ClassVar[tuple[str, ...]] = ("__call__",)

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        KINDS.setdefault(cls.__name__, cls)  # the classes that fully_shard makes come later


class Mlp(Kind):
    up: Float[Array, "embed mlp"]
    down: Float[Array, "mlp embed"]
    scale: Float[Array, ""]
    name: str = eqx.field(static=True, default="a layer")

    def __init__(self, key):
        keys = jr.split(key)
        self.up, self.down = normal(keys[0], WIDTH, HIDDEN), normal(keys[1], HIDDEN, WIDTH)
        self.scale = jnp.ones(())

    def __call__(self, x):
        return x + self.scale * (jax.nn.gelu(x @ self.up) @ self.down)


class Linears(Kind):
    first: eqx.nn.Linear
    second: eqx.nn.Linear
    norm: eqx.nn.LayerNorm

    def __init__(self, key):
        keys = jr.split(key)
        self.first = eqx.nn.Linear(WIDTH, HIDDEN, key=keys[0])
        self.second = eqx.nn.Linear(HIDDEN, WIDTH, key=keys[1])
        self.norm = eqx.nn.LayerNorm(WIDTH)

    def __call__(self, x):
        return x + each(lambda x: self.second(jnp.tanh(self.first(self.norm(x)))), 1, x)


class Attention(Kind):
    qkv: Float[Array, "embed three heads head"]
    out: Float[Array, "heads head embed"]

    def __init__(self, key):
        keys = jr.split(key)
        self.qkv = jr.normal(keys[0], (WIDTH, 3, 2, 8)) / 3
        self.out = jr.normal(keys[1], (2, 8, WIDTH)) / 4

    def __call__(self, x):
        q, k, v = (jnp.einsum("...td,dhk->...htk", x, self.qkv[:, i]) for i in range(3))
        scores = jnp.einsum("...htk,...hsk->...hts", q, k) / 3
        mask = jnp.tril(jnp.ones((TIME, TIME), bool))
        scores = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
        mixed = jnp.einsum("...hts,...hsk->...htk", scores, v)
        return x + jnp.einsum("...htk,hkd->...td", mixed, self.out)


class EquinoxAttention(Kind):
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.RMSNorm

    def __init__(self, key):
        self.attention = eqx.nn.MultiheadAttention(2, WIDTH, key=key)
        self.norm = eqx.nn.RMSNorm(WIDTH)

    def __call__(self, x):
        def one(x):
            y = jax.vmap(self.norm)(x)
            return x + self.attention(y, y, y)

        return each(one, 2, x)


class Convolution(Kind):
    conv: eqx.nn.Conv1d
    norm: eqx.nn.GroupNorm

    def __init__(self, key):
        self.conv = eqx.nn.Conv1d(WIDTH, WIDTH, 3, padding=1, key=key)
        self.norm = eqx.nn.GroupNorm(2, WIDTH)

    def __call__(self, x):
        def one(x):
            y = self.conv(x.T.astype(self.conv.weight.dtype))
            return jnp.tanh(self.norm(y)).T

        return x + each(one, 2, x)


class Depthwise(Kind):
    filters: Array

    def __init__(self, key):
        self.filters = normal(key, 3, 1, WIDTH)

    def __call__(self, x):
        def one(x):
            return jax.lax.conv_general_dilated(
                x[None].astype(self.filters.dtype),
                self.filters,
                (1,),
                "SAME",
                dimension_numbers=("NWC", "WIO", "NWC"),
                feature_group_count=WIDTH,
            )[0]

        return x + each(one, 2, x)


class Gru(Kind):
    cell: eqx.nn.GRUCell

    def __init__(self, key):
        self.cell = eqx.nn.GRUCell(WIDTH, WIDTH, key=key)

    def __call__(self, x):
        def one(x):
            def turn(h, x):
                h = self.cell(x, h)
                return h, h

            return jax.lax.scan(turn, jnp.zeros(WIDTH, x.dtype), x)[1]

        return x + each(one, 2, x)


class InitialState(Kind):
    """A weight is the initial carry of its scan, and the output of the last turn comes first."""

    start: Array
    weight: Array

    def __init__(self, key):
        self.start, self.weight = normal(key, WIDTH), normal(key, WIDTH, WIDTH)

    def __call__(self, x):
        def one(x):
            def turn(h, x):
                h = jnp.tanh(h @ self.weight + x)
                return h, h

            start = self.start.astype(jnp.result_type(self.start, self.weight, x))
            return jax.lax.scan(turn, start, x, reverse=True)[1]

        return each(one, 2, x)


class StateSpace(Kind):
    decay: Array
    weight: Array

    def __init__(self, key):
        self.decay, self.weight = normal(key, WIDTH), normal(key, WIDTH, WIDTH)

    def __call__(self, x):
        def one(x):
            u = x @ self.weight
            a = jnp.broadcast_to(jnp.exp(-jax.nn.softplus(self.decay)), u.shape).astype(u.dtype)
            compose = lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1])  # noqa: E731
            return jax.lax.associative_scan(compose, (a, u))[1]

        return each(one, 2, x)


class Eigenvalues(Kind):
    """LRU: complex eigenvalues made of real weights."""

    nu: Array
    theta: Array
    b: Array

    def __init__(self, key):
        self.nu, self.theta = normal(key, WIDTH), 1 + normal(jr.fold_in(key, 1), WIDTH)
        self.b = normal(key, WIDTH, WIDTH)

    def __call__(self, x):
        lam = jnp.exp(-jnp.exp(self.nu) + 1j * self.theta)

        def one(x):
            def turn(h, u):
                h = lam * h + u
                return h, h.real

            u = (x @ self.b).astype(lam.dtype)
            return jax.lax.scan(turn, jnp.zeros(WIDTH, lam.dtype), u)[1].astype(x.dtype)

        return x + each(one, 2, x)


class ComplexWeight(Kind):
    weight: Complex[Array, "in out"]

    def __init__(self, key):
        self.weight = jax.lax.complex(normal(key, WIDTH, WIDTH), normal(key, WIDTH, WIDTH).T)

    def __call__(self, x):
        return (x + jnp.abs(x @ self.weight + (1 + 1j))).astype(x.dtype)


class Spectrum(Kind):
    weight: Array

    def __init__(self, key):
        self.weight = normal(key, TIME, WIDTH)

    def __call__(self, x):
        def one(x):
            product = jnp.fft.rfft(x, axis=0) * jnp.fft.rfft(as_real(self.weight), axis=0)
            return jnp.fft.irfft(product, TIME, axis=0).astype(x.dtype)

        return x + each(one, 2, x)


def as_real(x):
    """In a dtype that linear algebra and transforms have."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


class Experts(Kind):
    gate: Array
    weight: Array

    def __init__(self, key):
        self.gate, self.weight = normal(key, WIDTH, 4), jr.normal(key, (4, WIDTH, WIDTH)) / 3

    def __call__(self, x):
        gates = jax.nn.softmax(x @ self.gate, axis=-1)
        return x + jnp.einsum("...td,edf,...te->...tf", x, self.weight, gates)


class Routed(Kind):
    """Each position goes to the best of its experts, whose weights are looked up."""

    gate: Array
    weight: Array

    def __init__(self, key):
        self.gate, self.weight = normal(key, WIDTH, 4), jr.normal(key, (4, WIDTH, WIDTH)) / 3

    def __call__(self, x):
        def one(x):
            gates = jax.nn.softmax(x @ self.gate)
            best = jnp.argmax(gates)
            return x + gates[best] * (x @ self.weight[best])

        return each(one, 1, x)


class Quantised(Kind):
    """Integers with a learned scale."""

    weight: Array
    scale: Array

    def __init__(self, key):
        self.weight = jnp.round(20 * jr.normal(key, (WIDTH, WIDTH))).astype(jnp.int8)
        self.scale = 0.02 + 0.001 * jnp.arange(WIDTH)

    def __call__(self, x):
        return x + x @ (self.weight.astype(self.scale.dtype) * self.scale)


class Rounded(Kind):
    """What it multiplies by has passed through fewer bits."""

    weight: Array
    scale: Array

    def __init__(self, key):
        self.weight, self.scale = normal(key, WIDTH, WIDTH), jnp.asarray(0.7)

    def __call__(self, x):
        few = (self.weight / self.scale).astype(jnp.float8_e4m3fn)
        return x + x @ (few.astype(self.weight.dtype) * self.scale)


@jax.custom_vjp
def straight_through(x):
    return jnp.sign(x)


straight_through.defvjp(lambda x: (jnp.sign(x), x), lambda x, g: (g * (1 - jnp.tanh(x) ** 2),))


@jax.custom_jvp
def softened(x, y):
    return jnp.logaddexp(x, y)


@softened.defjvp
def _softened(primals, tangents):
    x, y = primals
    weight = jax.nn.sigmoid(x - y)
    return softened(x, y), weight * tangents[0] + (1 - weight) * tangents[1]


class CustomVjp(Kind):
    weight: Array
    bias: Array

    def __init__(self, key):
        self.weight, self.bias = normal(key, WIDTH, WIDTH), normal(key, WIDTH)

    def __call__(self, x):
        return x + x @ straight_through(self.weight) / 3 + straight_through(x + self.bias)


class CustomJvp(Kind):
    weight: Array
    bias: Array

    def __init__(self, key):
        self.weight, self.bias = normal(key, WIDTH, WIDTH), normal(key, WIDTH)

    def __call__(self, x):
        return softened(x @ self.weight, jnp.broadcast_to(self.bias, x.shape).astype(x.dtype))


class Closing(Kind):
    """The rule of its derivative is a function that closes over weights."""

    weight: Array

    def __init__(self, key):
        self.weight = normal(key, WIDTH, WIDTH)

    def __call__(self, x):
        @jax.checkpoint
        def inner(x):
            return jnp.sin(x @ self.weight)

        return x + inner(x)


class Checked(Kind):
    weight: Array

    def __init__(self, key):
        self.weight = normal(key, WIDTH, WIDTH)

    def __call__(self, x):
        return x + eqx.error_if(x, jnp.any(jnp.isnan(x)), "not a number") @ self.weight


class CheckedWeight(Kind):
    weight: Array

    def __init__(self, key):
        self.weight = normal(key, WIDTH, WIDTH)

    def __call__(self, x):
        return x + x @ eqx.error_if(self.weight, self.weight > 1e6, "too large")


class Reporting(Kind):
    weight: Array

    def __init__(self, key):
        self.weight = normal(key, WIDTH, WIDTH)

    def __call__(self, x):
        jax.debug.callback(lambda _: None, jnp.sum(self.weight))
        return x + x @ self.weight


class Dropout(Kind):
    takes = "key"
    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        self.linear, self.dropout = eqx.nn.Linear(WIDTH, WIDTH, key=key), eqx.nn.Dropout(0.5)

    def __call__(self, x, *, key):
        return x + self.dropout(each(self.linear, 1, x), key=key)


class Noise(Kind):
    """Its key is an array of the model."""

    weight: Array
    key: Array

    def __init__(self, key):
        self.weight, self.key = normal(key, WIDTH, WIDTH), key

    def __call__(self, x):
        noise = jr.normal(self.key, (TIME, WIDTH), x.dtype)
        return x + (x + noise) @ self.weight


class Permuted(Kind):
    """With integers and booleans, a number, an array without elements, and nothing."""

    weight: Array
    table: Array
    mask: Array
    empty: Array
    times: float
    none: None = None

    def __init__(self, key):
        self.weight, self.table = normal(key, WIDTH, WIDTH), jr.permutation(key, WIDTH)
        self.mask, self.empty = jnp.arange(WIDTH) % 3 > 0, jnp.zeros((0, WIDTH))
        self.times = 0.5

    def __call__(self, x):
        rows = jnp.concatenate([self.weight, self.empty.astype(self.weight.dtype)])
        return x + jnp.where(self.mask, x @ rows[self.table], self.times * x)


class Jitted(Kind):
    weight: Array

    def __init__(self, key):
        self.weight = normal(key, WIDTH, WIDTH)

    @eqx.filter_jit
    def __call__(self, x, flag=True):
        return x + jax.jit(lambda x, w: jnp.tanh(x @ w))(x, self.weight) if flag else x


class Checkpointed(Kind):
    up: Float[Array, "embed mlp"]
    down: Float[Array, "mlp embed"]

    def __init__(self, key):
        self.up, self.down = normal(key, WIDTH, HIDDEN), normal(key, HIDDEN, WIDTH)

    def __call__(self, x):
        saving = jax.checkpoint_policies.dots_saveable
        inner = jax.checkpoint(lambda x, w: jax.nn.silu(x @ w), policy=saving)
        return eqx.filter_checkpoint(lambda x: x + inner(x, self.up) @ self.down)(x)


class Branching(Kind):
    """Branches and loops that read weights."""

    weight: Array
    other: Array

    def __init__(self, key):
        self.weight, self.other = normal(key, WIDTH, WIDTH), normal(key, WIDTH, WIDTH).T

    def __call__(self, x):
        def one(x):
            x = jax.lax.cond(x[0, 0] > 0, lambda x: x @ self.weight, lambda x: x @ self.other, x)
            x = jax.lax.fori_loop(0, 2, lambda i, x: jnp.tanh(x @ self.weight), x)
            return jax.lax.switch(1, [jnp.sin, lambda x: x * self.other[0]], x)

        return x + each(one, 2, x)


class Codec(Kind):
    methods = ("__call__", "decode")
    weight: Array

    def __init__(self, key):
        self.weight = normal(key, WIDTH, HIDDEN)

    def __call__(self, x):
        return jnp.tanh(x @ self.weight)

    def decode(self, h):
        return h @ self.weight.T


class Batched(Kind):
    """BatchNorm: called under `vmap`, with the axis that it is normed over."""

    takes = "state"
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, key, mode="batch"):
        self.linear = eqx.nn.Linear(WIDTH, WIDTH, key=key)
        self.norm = eqx.nn.BatchNorm(WIDTH, "batch", mode=mode)

    def __call__(self, x, state):
        y, state = self.norm(each(self.linear, 1, x).T, state)
        return x + y.T, state


class Counting(Kind):
    takes = "state"
    weight: Array
    index: eqx.nn.StateIndex

    def __init__(self, key):
        self.weight = normal(key, WIDTH, WIDTH)
        self.index = eqx.nn.StateIndex(jnp.zeros(()))

    def __call__(self, x, state):
        count = state.get(self.index) + 1
        return x + jnp.sin(count).astype(x.dtype) * (x @ self.weight), state.set(self.index, count)


class Algebra(Kind):
    weight: Array

    def __init__(self, key):
        self.weight = normal(key, WIDTH, WIDTH) / 3

    def __call__(self, x):
        w = as_real(self.weight)
        turned = jax.scipy.linalg.expm(w - w.T)
        return x + x @ jnp.linalg.solve(2 * jnp.eye(WIDTH, dtype=w.dtype) + w, turned)


class Structured(Kind):
    """Takes and returns trees."""

    takes = "tree"
    weight: Array

    def __init__(self, key):
        self.weight = normal(key, WIDTH, WIDTH)

    def __call__(self, tree, *, options):
        y = tree["x"] + tree["x"] @ self.weight * options["times"]
        return {"y": y, "none": None, "text": "text", "number": 3}


class Table(Kind):
    """Rows of a weight are looked up, and added to."""

    table: Array
    more: Array

    def __init__(self, key):
        self.table, self.more = normal(key, HIDDEN, WIDTH), normal(key, WIDTH)

    def __call__(self, x):
        def one(x):
            row = jnp.argmax(x)
            return x + self.table.at[3].add(self.more)[row] + self.table[3]

        return each(one, 1, x)


class LowRank(Kind):
    """A frozen weight and a learned difference."""

    base: Array
    a: Array
    b: Array

    def __init__(self, key):
        self.base = normal(key, WIDTH, WIDTH)
        self.a, self.b = normal(key, WIDTH, 2), normal(key, 2, WIDTH)

    def __call__(self, x):
        return x + x @ (jax.lax.stop_gradient(self.base) + self.a @ self.b)


class Pieces(Kind):
    """Weights are cut, joined, turned and repeated before they are used."""

    weight: Array
    bias: Array

    def __init__(self, key):
        self.weight, self.bias = normal(key, HIDDEN, WIDTH), normal(key, WIDTH)

    def __call__(self, x):
        parts = jnp.split(self.weight, 2)
        joined = jnp.concatenate([parts[1].T, parts[0]], axis=1)
        start = jax.lax.dynamic_slice(joined, (0, 4), (WIDTH, WIDTH))
        rows = jnp.einsum("ij,kj->ik", start, jnp.flip(parts[0], 0)).reshape(-1, 2, 4)
        y = jnp.tensordot(x, rows.reshape(WIDTH, WIDTH), 1)
        return x + jnp.tanh(y) + jnp.repeat(self.bias[::2], 2) ** 2


class Inner(Kind):
    """A loop over layers of its own."""

    blocks: eqx.nn.Linear

    def __init__(self, key):
        make = lambda key: eqx.nn.Linear(WIDTH, WIDTH, key=key)  # noqa: E731
        self.blocks = eqx.filter_vmap(make)(jr.split(key, 3))

    def __call__(self, x):
        arrays, rest = eqx.partition(self.blocks, eqx.is_array)

        def turn(x, arrays):
            return x + jnp.tanh(each(eqx.combine(arrays, rest), 1, x)), None

        return jax.lax.scan(turn, x, arrays)[0]


class Mapped(Kind):
    """`vmap` over its weights."""

    heads: Array

    def __init__(self, key):
        self.heads = jr.normal(key, (4, WIDTH, 2)) / 3

    def __call__(self, x):
        y = jax.vmap(lambda w: jnp.tanh(x @ w), out_axes=-2)(self.heads)
        return x + y.reshape(x.shape)


class Normed(Kind):
    linear: eqx.nn.WeightNorm
    prelu: eqx.nn.PReLU

    def __init__(self, key):
        self.linear = eqx.nn.WeightNorm(eqx.nn.Linear(WIDTH, WIDTH, key=key))
        self.prelu = eqx.nn.PReLU()

    def __call__(self, x):
        return x + each(lambda x: self.prelu(self.linear(x)), 1, x)


class Sequential(Kind):
    """Of parts that are functions."""

    inner: eqx.nn.Sequential

    def __init__(self, key):
        parts = [eqx.nn.Lambda(jnp.tanh), eqx.nn.MLP(WIDTH, WIDTH, HIDDEN, 1, key=key)]
        self.inner = eqx.nn.Sequential(parts)

    def __call__(self, x):
        return x + each(self.inner, 1, x)


class SharedInside(Kind):
    shared: eqx.nn.Shared

    def __init__(self, key):
        keys = jr.split(key)
        make = lambda key: eqx.nn.Linear(WIDTH, WIDTH, key=key)  # noqa: E731
        pair = make(keys[0]), make(keys[1])
        self.shared = eqx.nn.Shared(pair, lambda p: p[1].weight, lambda p: p[0].weight)

    def __call__(self, x):
        first, second = self.shared()
        return x + each(lambda x: second(jnp.tanh(first(x))), 1, x)


class Energy(Kind):
    """Its result is a gradient."""

    weight: Array

    def __init__(self, key):
        self.weight = normal(key, WIDTH, WIDTH)

    def __call__(self, x):
        energy = lambda x: jnp.sum(jnp.log(jnp.cosh(x @ self.weight)))  # noqa: E731
        return x - each(jax.grad(energy), 1, x)


class Elementwise(Kind):
    """No product at all."""

    scale: Array
    power: Array

    def __init__(self, key):
        self.scale, self.power = 1 + normal(key, WIDTH), normal(key, TIME, WIDTH)

    def __call__(self, x):
        size = jnp.linalg.norm(as_real(self.scale)).astype(x.dtype)
        y = x * self.scale / size + jnp.cumsum(jax.nn.softmax(self.power, axis=0), axis=0)
        return y + jnp.max(self.power) ** 2


class Fixed(eqx.Module):
    times: eqx.AbstractVar[float]

    def scaled(self, x):
        return x * self.times


class Inherited(Fixed, Kind):
    """Of an abstract class."""

    weight: Array
    times: float = 2.0

    def __init__(self, key):
        self.weight = normal(key, WIDTH, WIDTH)

    def __call__(self, x):
        return jnp.tanh(self.scaled(x) @ self.weight)


class Author(Kind):
    """Written for Explicit axes, of which `axes` are the names."""

    up: Float[Array, "embed mlp"]
    down: Float[Array, "mlp embed"]
    axes: tuple[str, ...] = eqx.field(static=True)

    def __init__(self, key, axes=()):
        self.up, self.down = normal(key, WIDTH, HIDDEN), normal(key, HIDDEN, WIDTH)
        self.axes = axes

    def at(self, x, last):
        if not self.axes:
            return None
        lead = ["data" if "data" in self.axes else None] * (x.ndim - 2)
        return P(*lead, None, last if last in self.axes else None)

    def __call__(self, x):
        h = jnp.dot(x, self.up, out_sharding=self.at(x, "model"))
        y = jnp.dot(jax.nn.relu(h), self.down, out_sharding=self.at(x, None))
        if self.axes:
            y = jax.sharding.reshard(y, jax.typeof(x).sharding.spec)
        return x + y


ORDINARY = [name for name in KINDS if name not in SPECIAL and name != "Kind"]

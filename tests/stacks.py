"""Stacks of layers, to see what is kept of them for the backward pass, and what it takes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import _hlo
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float

import mylib
from mylib import filter_shard

ROWS = P("data")
AUTO = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
EXPLICIT = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))

Loss = Callable[..., jax.Array]
# Takes a function, and the options of `filter_checkpoint` but for the policy.
Checkpoint = Callable[..., Callable[..., Any]]


@dataclass(frozen=True)
class Size:
    width: int
    hidden: int
    heads: int
    depth: int
    batch: int
    time: int

    @property
    def matrices(self) -> int:
        return 6 * self.depth

    @property
    def weights(self) -> int:
        """The bytes of the blocks' matrices."""
        return 4 * self.depth * (4 * self.width**2 + 2 * self.width * self.hidden)

    @property
    def activations(self) -> int:
        """The bytes of what goes from layer to layer, once for each of them."""
        return 4 * self.depth * self.batch * self.time * self.width


class Block(eqx.Module):
    """Attention and an MLP, made of matrices only."""

    query: Float[Array, "embed embed"]
    key: Float[Array, "embed embed"]
    value: Float[Array, "embed embed"]
    out: Float[Array, "embed embed"]
    up: Float[Array, "embed mlp"]
    down: Float[Array, "mlp embed"]
    heads: int = eqx.field(static=True)

    def __init__(self, size: Size, key: jax.Array):
        square, up = (size.width, size.width), (size.width, size.hidden)
        shapes = [square, square, square, square, up, up[::-1]]
        keys = jax.random.split(key, 6)
        made = [jax.random.normal(k, s) / s[0] ** 0.5 for k, s in zip(keys, shapes, strict=True)]
        self.query, self.key, self.value, self.out, self.up, self.down = made
        self.heads = size.heads

    def __call__(self, x: Float[Array, "batch time embed"]) -> Float[Array, "batch time embed"]:
        y = normalised(x)
        q, k, v = [
            (y @ w).reshape(*x.shape[:2], self.heads, -1)
            for w in (self.query, self.key, self.value)
        ]
        weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) / 6)
        x = x + jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape) @ self.out
        return x + jax.nn.gelu(checkpoint_name(normalised(x) @ self.up, "product")) @ self.down


def normalised(x: Float[Array, "... embed"]) -> Float[Array, "... embed"]:
    mean, variance = jnp.mean(x, -1, keepdims=True), jnp.var(x, -1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5)


def through_all(step: Callable[..., Any], layers: Any, x: jax.Array) -> jax.Array:
    if isinstance(layers, list):
        for layer in layers:
            x = step(layer, x)
        return x
    return jax.lax.scan(lambda x, layer: (step(layer, x), None), x, layers)[0]


def through(layers: Any, x: jax.Array) -> jax.Array:
    return through_all(lambda layer, x: layer(x), layers, x)


def stacked(layers: list[Any]) -> Any:
    return jax.jit(lambda layers: jax.tree.map(lambda *xs: jnp.stack(xs), *layers))(layers)


def not_at_all(fun: Callable[..., Any], **_: Any) -> Callable[..., Any]:
    return fun


def gathered_weights(
    size: Size, mode: str, stacking: str, checkpoint: Checkpoint
) -> tuple[Loss, Any, jax.Array]:
    """Blocks whose weights are gathered before each of them: a loss, and its arguments."""
    mesh = EXPLICIT if mode == "explicit" else AUTO
    unrolled = stacking == "unrolled"
    blocks = [Block(size, key) for key in jax.random.split(jax.random.key(0), size.depth)]
    params, kept = (blocks, ROWS) if unrolled else (stacked(blocks), P(None, "data"))
    x = jax.random.normal(jax.random.key(1), (size.batch, size.time, size.width))
    args = filter_shard(params, kept, mesh=mesh), filter_shard(x, ROWS, mesh=mesh)
    if mode != "shard_map":
        step = checkpoint(
            lambda block, x: filter_shard(block, P(), mesh=mesh)(x),
            prevent_cse=unrolled,
            in_shardings=(ROWS, ROWS),
            mesh=mesh,
        )
        return (lambda params, x: jnp.mean(through_all(step, params, x) ** 2)), *args

    def gathering(block: Any, x: jax.Array) -> jax.Array:
        return jax.tree.map(lambda w: jax.lax.all_gather(w, "data", tiled=True), block)(x)

    step = checkpoint(gathering, prevent_cse=unrolled)

    @mylib.filter_shard_map(mesh=mesh, in_specs=(kept, ROWS), out_specs=P())
    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jax.lax.pmean(jnp.mean(through_all(step, params, x) ** 2), "data")

    return loss, *args


class Attention(eqx.Module):
    """Each device along "tensor" has some of the heads."""

    query: Float[Array, "embed heads size"]
    key: Float[Array, "embed heads size"]
    value: Float[Array, "embed heads size"]
    out: Float[Array, "heads size embed"]
    mesh: Mesh = eqx.field(static=True)

    def __init__(self, size: Size, mesh: Mesh, key: jax.Array):
        keys = jax.random.split(key, 4)
        shape = (size.width, size.heads, size.width // size.heads)
        scale = size.width**-0.5
        self.query, self.key, self.value = (scale * jax.random.normal(k, shape) for k in keys[:3])
        self.out = scale * jax.random.normal(keys[3], (*shape[1:], size.width))
        self.mesh = mesh

    def __call__(self, x: Float[Array, "batch time embed"]) -> Float[Array, "batch time embed"]:
        q, k, v = (
            self._product("btd,dhe->bthe", x, w, P("data", None, "tensor"))
            for w in (self.query, self.key, self.value)
        )
        scores = self._product("bthe,bshe->bhts", q, k, P("data", "tensor"))
        mixed = self._product(
            "bhts,bshe->bthe", jax.nn.softmax(scores / 6), v, P("data", None, "tensor")
        )
        return self._product("bthe,hed->btd", mixed, self.out, P("data", "tensor"))

    def _product(self, subscripts: str, x: jax.Array, y: jax.Array, spec: P) -> jax.Array:
        if self.mesh.axis_types[0] == AxisType.Auto:
            return jnp.einsum(subscripts, x, y)
        return jnp.einsum(subscripts, x, y, out_sharding=NamedSharding(self.mesh, spec))


def gathered_activations(
    size: Size, mode: str, stacking: str, checkpoint: Checkpoint, pinned: bool = True
) -> tuple[Loss, Any, jax.Array]:
    """Sequence parallelism, as in https://github.com/jax-ml/jax/issues/25010: each device
    normalises its part of a sequence, and has some of the heads attend to all of it.
    """
    axis_type = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(axis_type,) * 2)
    apart, together = P("data", "tensor"), P("data")

    def block(attention: Attention, x: jax.Array) -> jax.Array:
        y = normalised(filter_shard(x, apart, mesh=mesh))
        if pinned:
            y = filter_shard(y, apart, mesh=mesh)
        return x + attention(filter_shard(y, together, mesh=mesh))

    step = checkpoint(
        block, prevent_cse=stacking == "unrolled", in_shardings={"x": apart}, mesh=mesh
    )
    keys = jax.random.split(jax.random.key(0), size.depth)
    by_heads = mylib.rules.by_path({"out": P("tensor"), "**": P(None, "tensor")}, ordered=True)
    layers = filter_shard([Attention(size, mesh, key) for key in keys], by_heads, mesh=mesh)
    x = jax.random.normal(jax.random.key(1), (size.batch, size.time, size.width))
    args = stacked(layers) if stacking == "scan" else layers, filter_shard(x, apart, mesh=mesh)
    return (lambda layers, x: jnp.mean(through_all(step, layers, x) ** 2)), *args


class Measured(NamedTuple):
    results: Any
    gathers: int
    gathered_bytes: int
    kept_bytes: int  # by a device, between the forward and the backward pass
    needed_bytes: int  # at the most, beside arguments and results
    flops: float


def measure(fun: Loss, *args: Any) -> Measured:
    """The gradients of all arguments, where these are, and what it takes to compute them."""
    gradients = jax.value_and_grad(fun, tuple(range(len(args))))
    wanted = jax.tree.map(lambda x: x.sharding, args)
    compiled = jax.jit(gradients, out_shardings=(None, wanted)).lower(*args).compile()
    forward = jax.jit(lambda *args: jax.vjp(fun, *args)).lower(*args).compile()
    kept = forward.memory_analysis().output_size_in_bytes
    needed = compiled.memory_analysis().temp_size_in_bytes
    results = jax.tree.map(np.asarray, compiled(*args))
    gathered = _hlo.gathered(compiled.as_text())
    return Measured(results, *gathered, kept, needed, compiled.cost_analysis()["flops"])


def assert_close(ours: Any, theirs: Any, rtol: float = 1e-4) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol / 10 * np.abs(b).max())

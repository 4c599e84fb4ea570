"""Training steps written by hand in `shard_map`, right and wrong, each device's part explicit."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import known
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import mylib

WIDTH, HIDDEN = 16, 32
SHAPES = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH), "scale": ()}
WHOLE = {"up": P(), "down": P()}
ROWS = {"up": P("data"), "down": P("data")}


def loss(model: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ model["up"]) @ model["down"]) ** 2)


def updated(model: Any, gradients: Any) -> Any:
    return jax.tree.map(lambda w, g: w - 0.1 * g, model, gradients)


def audited(
    mesh: Mesh, fun: Callable[..., Any], specs: Any, *, rows: int = 64, out: Any = None
) -> mylib.results.Report:
    """A function of a model and a batch, with `specs` for the model."""
    model = {
        k: jax.ShapeDtypeStruct(SHAPES[k], jnp.float32, sharding=NamedSharding(mesh, spec))
        for k, spec in specs.items()
    }
    x = known.abstract(mesh, P("data"), (rows, WIDTH))
    step = jax.shard_map(
        fun,
        mesh=mesh,
        in_specs=(specs, P("data")),
        out_specs=specs if out is None else out,
        check_vma=False,
    )
    return mylib.audit(jax.jit(step), model, x)


def psum(g: Any) -> Any:
    return lax.psum(g, "data")


def summing(**how: Callable[[Any], Any]) -> Callable[..., Any]:
    """Data parallelism that sums each gradient in some way."""

    def step(model: Any, x: Any) -> Any:
        gradients = jax.grad(loss)(model, x)
        return updated(model, {k: how[k](g) for k, g in gradients.items()})

    return step


def in_pieces(model: Any, x: Any) -> Any:
    """Sums the gradients of each of 4 pieces of the batch."""

    def one(total: Any, piece: Any) -> Any:
        return jax.tree.map(lambda t, g: t + psum(g), total, jax.grad(loss)(model, piece)), None

    zero = jax.tree.map(jnp.zeros_like, model)
    return updated(model, lax.scan(one, zero, x.reshape(4, -1, WIDTH))[0])


def activations_alone(model: Any, x: Any) -> Any:
    """Sums what the model computes, and no gradient."""

    def loss(model: Any) -> Any:
        h = jnp.tanh(x @ model["up"])
        return jnp.mean(((h + psum(h)) @ model["down"]) ** 2)

    return updated(model, jax.grad(loss)(model))


def gathers(model: Any, x: Any) -> Any:
    """Sums the gradients once, and gathers 4 KiB in each of 5000 steps."""

    def one(h: Any, _: Any) -> Any:
        every = lax.all_gather(h, "data")
        return jnp.tanh(h + every.sum(0)), None

    def loss(model: Any) -> Any:
        h, _ = lax.scan(one, x @ model["up"], None, length=5000)
        return jnp.mean((h @ model["down"]) ** 2)

    return updated(model, jax.tree.map(psum, jax.grad(loss)(model)))


def hierarchical(g: Any) -> Any:
    """A sum over 8 devices on 2 hosts: scattered in each host, summed between them, gathered."""
    hosts, pairs = [[0, 1, 2, 3], [4, 5, 6, 7]], [[i, i + 4] for i in range(4)]
    part = lax.psum_scatter(g, "data", axis_index_groups=hosts, tiled=True)
    part = lax.psum(part, "data", axis_index_groups=pairs)
    return lax.all_gather(part, "data", axis_index_groups=hosts, tiled=True)


def in_bytes(g: Any) -> Any:
    """A sum of 8-bit numbers, with a scale for each row."""
    scale = lax.pmax(jnp.max(jnp.abs(g), -1, keepdims=True), "data") / 127
    small = jnp.round(g / scale).astype(jnp.int8)
    return lax.all_gather(small, "data").astype(jnp.float32).sum(0) * scale


def exchanged(g: Any) -> Any:
    """The parts of one device, from all devices."""
    return lax.all_to_all(g.reshape(8, -1, *g.shape[1:]), "data", 0, 0)


def sent(g: Any) -> Any:
    """Around a ring."""
    return lax.ppermute(g, "data", [(i, (i + 1) % 8) for i in range(8)])


def gathered(model: Any) -> Any:
    return jax.tree.map(lambda w: lax.all_gather(w, "data", tiled=True), model)


def scattered(g: Any) -> Any:
    return lax.psum_scatter(g, "data", tiled=True)


def own_part(g: Any, axis: str = "data") -> Any:
    n = len(g) // lax.axis_size("data")
    return lax.dynamic_slice_in_dim(g, lax.axis_index(axis) * n, n)


def sharded(**how: Callable[[Any], Any]) -> Callable[..., Any]:
    """FSDP that brings each gradient to its devices in some way."""

    def step(model: Any, x: Any) -> Any:
        gradients = jax.grad(loss)(gathered(model), x)
        return updated(model, {k: how[k](g) for k, g in gradients.items()})

    return step


def sharded_in_pieces(model: Any, x: Any) -> Any:
    def one(total: Any, piece: Any) -> Any:
        gradients = jax.grad(loss)(gathered(model), piece)
        return jax.tree.map(lambda t, g: t + scattered(g), total, gradients), None

    zero = jax.tree.map(jnp.zeros_like, model)
    return updated(model, lax.scan(one, zero, x.reshape(4, -1, WIDTH))[0])


def whole_batch(model: Any, x: Any) -> Any:
    """Gathers the batch, so that each device computes the whole gradient."""
    every = lax.all_gather(x, "data", tiled=True)
    return updated(model, jax.tree.map(own_part, jax.grad(loss)(gathered(model), every)))


def evaluation(model: Any, x: Any) -> Any:
    return lax.pmean(loss(gathered(model), x), "data")


def sum_of_padded(w: Any, axis: str) -> Any:
    """All parts of an array, as a sum of arrays that are zero elsewhere."""
    n = w.shape[1]
    whole = jnp.zeros((w.shape[0], n * lax.axis_size(axis)), w.dtype)
    return lax.psum(lax.dynamic_update_slice(whole, 2 * w, (0, lax.axis_index(axis) * n)), axis)


def moved_weight(model: Any, x: Any) -> Any:
    up = sum_of_padded(model["up"], "model")
    n = model["down"].shape[0]
    part = lax.dynamic_slice_in_dim(jnp.tanh(x @ up), lax.axis_index("model") * n, n, 1)
    return lax.psum(part @ model["down"], "model")


def columns_twice(model: Any, x: Any) -> Any:
    h = lax.all_gather(jnp.tanh(x @ model["up"]), "model", axis=1, tiled=True)
    return lax.all_gather(h @ model["down"], "model", axis=1, tiled=True)


def sequence_parallel(model: Any, x: Any) -> Any:
    """Rows are split between products: gathered before, reduce-scattered after."""
    n = len(x) // lax.axis_size("model")
    x = lax.dynamic_slice_in_dim(x, lax.axis_index("model") * n, n)
    for _ in range(2):
        whole = lax.all_gather(jnp.tanh(x), "model", tiled=True)
        part = jnp.tanh(whole @ model["up"]) @ model["down"]
        x = x + lax.psum_scatter(part, "model", tiled=True)
    return lax.all_gather(x, "model", tiled=True)


def gathered_in_parts(model: Any, x: Any) -> Any:
    pairs = [[i, i + 1] for i in range(0, 8, 2)]
    four = [[0, 2, 4, 6], [1, 3, 5, 7]]
    part = lax.all_gather(x, "data", axis_index_groups=pairs, tiled=True)
    return lax.all_gather(part, "data", axis_index_groups=four, tiled=True)


def gathered_over_both(model: Any, x: Any) -> Any:
    return lax.all_gather(x, ("data", "model"))


def megatron(model: Any, x: Any) -> Any:
    return lax.psum(jnp.tanh(x @ model["up"]) @ model["down"], "model")


def adapter(model: Any, x: Any) -> Any:
    """Trains `down` alone."""

    def own(down: Any) -> Any:
        return loss({**model, "down": down}, x)

    return {**model, "down": model["down"] - 0.1 * psum(jax.grad(own)(model["down"]))}


def returned_whole(model: Any, x: Any) -> Any:
    return gathered(sharded(up=scattered, down=scattered)(model, x))

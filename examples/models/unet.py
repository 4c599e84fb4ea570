"""A diffusion step of a U-Net: convolutions, GroupNorm, and BatchNorm with its state.

    python examples/models/unet.py
    python examples/models/unet.py --machine "h100 x 16" --strategy "FSDP"

The statistics of BatchNorm are those of the whole batch, over all devices: its `axis_name` is that
of `jax.vmap`, and the compiler sums over devices where the batch is split.
"""

import running  # first: it simulates devices

# isort: split
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray
from running import OPTIMISER, Strategy

import mylib
from mylib.contracts import never
from mylib.rules import batch as rows, fsdp, replicated


@dataclass(frozen=True)
class Size:
    width: int
    image: int
    rows: int  # of a batch


SMALL = Size(width=8, image=8, rows=16)
LARGE = Size(width=128, image=64, rows=256)

Image = Float[Array, "channels height width"]


class Block(eqx.Module):
    """Two convolutions around what the time of the noise adds to each channel."""

    first: eqx.nn.Conv2d
    time: eqx.nn.Linear
    norm: eqx.nn.GroupNorm
    second: eqx.nn.Conv2d

    def __init__(self, channels: int, more: int, time: int, key: PRNGKeyArray):
        keys = jax.random.split(key, 3)
        self.first = eqx.nn.Conv2d(channels, more, 3, padding=1, key=keys[0])
        self.time = eqx.nn.Linear(time, more, key=keys[1])
        self.norm = eqx.nn.GroupNorm(4, more)
        self.second = eqx.nn.Conv2d(more, more, 3, padding=1, key=keys[2])

    def __call__(self, x: Image, time: Float[Array, "size"]) -> Image:  # noqa: F821
        x = self.first(x) + self.time(time)[:, None, None]
        return jax.nn.silu(self.second(jax.nn.silu(self.norm(x))))


class UNet(eqx.Module):
    into: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    down: Block
    smaller: eqx.nn.Conv2d
    middle: Block
    larger: eqx.nn.ConvTranspose2d
    up: Block
    out: eqx.nn.Conv2d

    def __init__(self, size: Size, key: PRNGKeyArray):
        keys, width = jax.random.split(key, 7), size.width
        self.into = eqx.nn.Conv2d(3, width, 3, padding=1, key=keys[0])
        self.norm = eqx.nn.BatchNorm(width, axis_name="batch", mode="batch")
        self.down = Block(width, width, width, keys[1])
        self.smaller = eqx.nn.Conv2d(width, 2 * width, 2, 2, key=keys[2])
        self.middle = Block(2 * width, 2 * width, width, keys[3])
        self.larger = eqx.nn.ConvTranspose2d(2 * width, width, 2, 2, key=keys[4])
        self.up = Block(2 * width, width, width, keys[5])
        self.out = eqx.nn.Conv2d(width, 3, 3, padding=1, key=keys[6])

    def __call__(self, x: Image, time: Float[Array, ""], state: eqx.nn.State) -> tuple:
        half = self.out.in_channels // 2
        angles = time * 2.0 ** jnp.linspace(0, 6, half)
        when = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)])
        x, state = self.norm(self.into(x), state)
        first = self.down(jax.nn.silu(x), when)
        x = self.larger(self.middle(self.smaller(first), when))
        return self.out(self.up(jnp.concatenate([first, x]), when)), state


Batch = dict[str, Float[Array, "rows ..."]]


def loss(model: UNet, state: eqx.nn.State, batch: Batch) -> tuple[Array, eqx.nn.State]:
    """How well the model finds the noise in images, at a time between none and only noise."""
    angle = batch["time"][:, None, None, None] * jnp.pi / 2
    noisy = jnp.cos(angle) * batch["image"] + jnp.sin(angle) * batch["noise"]
    run = jax.vmap(model, (0, 0, None), (0, None), axis_name="batch")
    found, state = run(noisy, batch["time"], state)
    return jnp.mean((found - batch["noise"]) ** 2), state


def batch_of(size: Size, number: int) -> dict[str, np.ndarray]:
    rng, shape = np.random.default_rng(number), (size.rows, 3, size.image, size.image)
    waves = np.sin(np.arange(size.image) * rng.uniform(0.2, 2, (size.rows, 1)))
    image = np.broadcast_to(waves[:, None, None], shape)
    found = {"image": image, "noise": rng.normal(size=shape), "time": rng.uniform(size=size.rows)}
    return {name: x.astype(np.float32) for name, x in found.items()}


def training(
    size: Size, strategy: Strategy, mesh: Mesh, shard: Callable = mylib.fully_shard
) -> tuple[Callable, Callable]:
    """As in running.py, but BatchNorm has a state."""
    kept = strategy.kept

    def make(key: PRNGKeyArray) -> Any:
        model, state = eqx.nn.make_with_state(UNet)(size, key)
        return model, state, OPTIMISER.init(eqx.filter(model, eqx.is_inexact_array))

    def step(batch: Batch, model: UNet, state: eqx.nn.State, moments: Any) -> Any:
        def loss_of(model: UNet) -> Any:
            model = shard(model, Block, kept, strategy.used, mesh=mesh)
            return loss(model, state, batch)

        (found, after), grads = eqx.filter_value_and_grad(loss_of, has_aux=True)(model)
        weights = eqx.filter(model, eqx.is_inexact_array)
        updates, moments = OPTIMISER.update(grads, moments, weights)
        return eqx.apply_updates(model, updates), after, moments, found

    compiled = mylib.filter_jit(
        step,
        in_shardings={"batch": rows(strategy.rows)},
        out_shardings=(kept, P(), kept, P()),
        donate=("model", "state", "moments"),
        mesh=mesh,
    )
    return mylib.filter_jit(make, out_shardings=(kept, P(), kept), mesh=mesh), compiled


def train(size: Size, strategy: Strategy, mesh: Mesh, steps: int) -> list[float]:
    make, step = training(size, strategy, mesh)
    losses = []
    with jax.set_mesh(mesh):
        model, state, moments = make(jax.random.key(0))
        for number in range(steps):
            model, state, moments, found = step(batch_of(size, number), model, state, moments)
            losses.append(float(found))
    return losses


def report(
    size: Size, strategy: Strategy, mesh: Mesh, shard: Callable = mylib.fully_shard
) -> mylib.results.Report:
    make, step = training(size, strategy, mesh, shard)
    with jax.set_mesh(mesh):
        given = eqx.filter_eval_shape(make, jax.eval_shape(lambda: jax.random.key(0)))
        given = mylib.filter_shard(given, (strategy.kept, P(), strategy.kept), mesh)
        batch = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, batch_of(size, 0)))
        return mylib.audit(step, mylib.filter_shard(batch, rows(strategy.rows), mesh), *given)


STRATEGIES = {
    "FSDP": Strategy(
        {"data": -1},
        fsdp("data", min_size=256),
        replicated(),
        "data",
        (never("collective-permute", "data"), never("all-to-all", "data", above="1 KiB")),
    ),
    "data parallel": Strategy(
        {"data": -1}, replicated(), replicated(), "data", (never("all-gather", "data"),)
    ),
}


def run(strategy: Strategy, mesh: Mesh) -> str:
    losses = train(SMALL, strategy, mesh, 40)
    return f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps"


if __name__ == "__main__":
    running.main(STRATEGIES, run, partial(report, LARGE))

"""Two models and two optimisers in one step, and a moving average of the weights of one of them.

    python examples/models/gan.py
    python examples/models/gan.py --machine "h100 x 16" --strategy "FSDP"

The generator makes points on a circle out of noise; the critic tells them from real ones. The
average of the generator's weights is what one would use in the end. It is kept where the generator
is.
"""

import running  # first: it simulates devices

# isort: split
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray
from running import Strategy

import mylib
from mylib.contracts import never
from mylib.rules import batch as rows, fsdp, replicated


@dataclass(frozen=True)
class Size:
    noise: int
    width: int
    depth: int
    rows: int  # of a batch


SMALL = Size(noise=8, width=32, depth=2, rows=64)
LARGE = Size(noise=1024, width=8192, depth=6, rows=4096)

GENERATES = optax.adam(1e-3, b1=0.5)
JUDGES = optax.adam(2e-3, b1=0.5)


class Players(NamedTuple):
    generator: eqx.nn.MLP
    critic: eqx.nn.MLP
    average: eqx.nn.MLP  # of the generator
    generates: Any  # the states of the optimisers
    judges: Any


class Batch(NamedTuple):
    real: Float[Array, "rows 2"]
    noise: Float[Array, "rows noise"]


def make(size: Size, key: PRNGKeyArray) -> Players:
    keys = jax.random.split(key)
    generator = eqx.nn.MLP(size.noise, 2, size.width, size.depth, key=keys[0])
    critic = eqx.nn.MLP(2, "scalar", size.width, size.depth, key=keys[1])
    # Another array than the generator's: what is donated must not be there twice.
    average = jax.tree.map(lambda x: x + 0 if eqx.is_array(x) else x, generator)
    states = (
        optimiser.init(eqx.filter(model, eqx.is_array))
        for optimiser, model in [(GENERATES, generator), (JUDGES, critic)]
    )
    return Players(generator, critic, average, *states)


def step(batch: Batch, players: Players, shard: Callable) -> tuple[Players, tuple[Array, Array]]:
    generator, critic, average, generates, judges = players

    def of_critic(critic: eqx.nn.MLP, made: Array) -> Array:
        # Both in one call, for which the critic's weights are gathered once.
        judge = jax.vmap(jax.vmap(shard(critic)))
        real, false = judge(jnp.stack([batch.real, made], 1)).T
        return jnp.mean(jax.nn.softplus(-real) + jax.nn.softplus(false))

    def of_made(made: Array) -> Array:
        return jnp.mean(jax.nn.softplus(-jax.vmap(shard(critic))(made)))

    # Points are made once, for both losses.
    made, backward = eqx.filter_vjp(lambda model: jax.vmap(shard(model))(batch.noise), generator)
    worth, judged = eqx.filter_value_and_grad(of_critic)(critic, made)
    loss, wanted = jax.value_and_grad(of_made)(made)
    (grads,) = backward(wanted)
    updates, generates = GENERATES.update(grads, generates)
    generator = eqx.apply_updates(generator, updates)
    updates, judges = JUDGES.update(judged, judges)
    critic = eqx.apply_updates(critic, updates)
    weights, rest = eqx.partition(generator, eqx.is_array)
    before = eqx.filter(average, eqx.is_array)
    moved = jax.tree.map(lambda old, new: 0.99 * old + 0.01 * new, before, weights)
    return Players(generator, critic, eqx.combine(moved, rest), generates, judges), (loss, worth)


def training(
    size: Size, strategy: Strategy, mesh: Mesh, shard: Callable = mylib.fully_shard
) -> tuple[Callable, Callable]:
    kept = strategy.kept

    def sharded(model: eqx.nn.MLP) -> eqx.nn.MLP:
        return shard(model, eqx.nn.Linear, kept, strategy.used, mesh=mesh)

    @mylib.filter_jit(
        in_shardings={"batch": rows(strategy.rows)},
        out_shardings=(kept, P()),
        donate=("players",),
        mesh=mesh,
    )
    def compiled(batch: Batch, players: Players) -> tuple[Players, tuple[Array, Array]]:
        return step(batch, players, sharded)

    return mylib.filter_jit(partial(make, size), out_shardings=kept, mesh=mesh), compiled


def batch_of(size: Size, number: int) -> Batch:
    rng = np.random.default_rng(number)
    angles = rng.uniform(0, 2 * np.pi, size.rows)
    real = np.stack([np.cos(angles), np.sin(angles)], -1)
    return Batch(real.astype(np.float32), rng.normal(size=(size.rows, size.noise)).astype("f4"))


def train(size: Size, strategy: Strategy, mesh: Mesh, steps: int) -> list[tuple[float, float]]:
    made, compiled = training(size, strategy, mesh)
    found = []
    with jax.set_mesh(mesh):
        players = made(jax.random.key(0))
        for number in range(steps):
            players, (loss, worth) = compiled(batch_of(size, number), players)
            found.append((float(loss), float(worth)))
    return found


def report(
    size: Size, strategy: Strategy, mesh: Mesh, shard: Callable = mylib.fully_shard
) -> mylib.results.Report:
    made, compiled = training(size, strategy, mesh, shard)
    with jax.set_mesh(mesh):
        players = eqx.filter_eval_shape(made, jax.eval_shape(lambda: jax.random.key(0)))
        players = mylib.filter_shard(players, strategy.kept, mesh)
        batch = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, batch_of(size, 0)))
        return mylib.audit(compiled, mylib.filter_shard(batch, rows(strategy.rows), mesh), players)


STRATEGIES = {
    "FSDP": Strategy(
        {"data": -1},
        fsdp("data", min_size=256),
        replicated(),
        "data",
        (never("all-to-all", "data"), never("collective-permute", "data")),
    ),
    "data parallel": Strategy(
        {"data": -1}, replicated(), replicated(), "data", (never("all-gather", "data"),)
    ),
}


def run(strategy: Strategy, mesh: Mesh) -> str:
    found = train(SMALL, strategy, mesh, 60)
    return f"losses of the critic {found[0][1]:.4f} -> {found[-1][1]:.4f} in {len(found)} steps"


if __name__ == "__main__":
    running.main(STRATEGIES, run, partial(report, LARGE))

"""What the programs of this folder share: devices, a training step, options, and a report.

Import it before anything else: it simulates eight devices if the machine has no accelerator.
"""

import os
import sys

# Read when JAX starts, so they come before it is imported. The first two concern the CPU alone.
# NPROC is the number of threads that the simulated devices share: JAX 0.10 needs as many as there
# are devices, however few the cores. You needn't have a machine that is compiled for.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS") or "--xla_force_host_platform_device_count=8"
os.environ["NPROC"] = os.environ.get("NPROC", "32")
os.environ["JAX_PLATFORMS"] = (
    "cpu" if "--machine" in sys.argv else os.environ.get("JAX_PLATFORMS", "")
)

import argparse
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import equinox as eqx
import jax
import optax
from jax.sharding import Mesh, PartitionSpec as P

import mylib
from mylib.contracts import Contract
from mylib.machines import Machine
from mylib.rules import Rule, batch as rows, replicated

OPTIMISER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3, eps=1e-5))


class Strategy(NamedTuple):
    """The axes of the mesh, how the weights are kept and used, which axes the rows of a batch are
    split over, what a step may communicate, and what else the model is made with.
    """

    axes: dict[str, int]
    kept: Rule
    used: Rule
    rows: str | tuple[str, ...]
    contracts: tuple[Contract, ...]
    options: Mapping[str, Any] = MappingProxyType({})


ONE_DEVICE = Strategy({"data": 1}, replicated(), replicated(), "data", ())


class Task(NamedTuple):
    """What is trained: `loss` of a model and a batch, over the parts of the model that `trained`
    says are weights. `layers` are the classes that gather their weights when they are called.
    """

    make: Callable[[jax.Array], Any]
    loss: Callable[[Any, Any], jax.Array]
    batch: Callable[[int], Any]
    layers: type | tuple[type, ...]
    trained: Callable[[Any], Any] = lambda model: jax.tree.map(eqx.is_inexact_array, model)


def training(
    task: Task, strategy: Strategy, mesh: Mesh, shard: Callable = mylib.fully_shard
) -> tuple[Callable, Callable]:
    """Two compiled functions: one makes the model and the optimiser's state, one is a step. `shard`
    has its layers gather their weights.
    """
    kept, used = strategy.kept, strategy.used

    def make(key: jax.Array) -> Any:
        model = task.make(key)
        return model, OPTIMISER.init(eqx.filter(model, task.trained(model)))

    def step(batch: Any, model: Any, state: Any) -> Any:
        weights, rest = eqx.partition(model, task.trained(model))

        def loss_of(weights: Any) -> jax.Array:
            model = eqx.combine(weights, rest)
            model = shard(model, task.layers, kept, used, mesh=mesh)
            return task.loss(model, batch)

        loss, grads = eqx.filter_value_and_grad(loss_of)(weights)
        updates, state = OPTIMISER.update(grads, state, weights)
        return eqx.combine(eqx.apply_updates(weights, updates), rest), state, loss

    compiled = mylib.filter_jit(
        step,
        in_shardings={"batch": rows(strategy.rows)},
        out_shardings=(kept, kept, P()),
        donate=("model", "state"),
        mesh=mesh,
    )
    return mylib.filter_jit(make, out_shardings=kept, mesh=mesh), compiled


def train(task: Task, strategy: Strategy, mesh: Mesh, steps: int) -> list[float]:
    """The losses of some steps."""
    return fit(task, strategy, mesh, steps)[1]


def fit(task: Task, strategy: Strategy, mesh: Mesh, steps: int) -> tuple[Any, list[float]]:
    """The model after some steps, and their losses."""
    make, step = training(task, strategy, mesh)
    losses = []
    with jax.set_mesh(mesh):
        model, state = make(jax.random.key(0))
        for number in range(steps):
            model, state, loss = step(task.batch(number), model, state)
            losses.append(float(loss))
    return model, losses


def report(
    task: Task, strategy: Strategy, mesh: Mesh, shard: Callable = mylib.fully_shard
) -> mylib.results.Report:
    """What a step communicates and needs, compiled from shapes: nothing is moved or run."""
    make, step = training(task, strategy, mesh, shard)
    key, numbers = jax.eval_shape(lambda: jax.random.key(0)), task.batch(0)
    with jax.set_mesh(mesh):
        model, state = eqx.filter_eval_shape(make, key)
        model, state = mylib.filter_shard((model, state), strategy.kept, mesh)
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), numbers)
        batch = mylib.filter_shard(batch, rows(strategy.rows), mesh)
        return mylib.audit(step, batch, model, state)


def main(
    strategies: Mapping[str, Strategy],
    run: Callable[[Strategy, Mesh], str],
    compile_large: Callable[[Strategy, Mesh], mylib.results.Report],
) -> None:
    """Runs on the available devices; or compiles for a machine, and reports."""
    parser = argparse.ArgumentParser(description=(sys.modules["__main__"].__doc__ or "").strip())
    parser.add_argument("--machine", help='compile for this machine instead, such as "h100 x 16"')
    parser.add_argument("--strategy", choices=strategies, help="one of them; by default all")
    options = parser.parse_args()
    for name, strategy in strategies.items():
        fixed = math.prod(size for size in strategy.axes.values() if size > 0)
        if options.strategy not in (None, name):
            continue
        if options.machine:
            machine = Machine.of(options.machine)
            found = compile_large(strategy, machine.mesh(**strategy.axes))
            print(f"\n{name} on {machine}: {found.memory.fits(machine)}\n{found}")
            print(found.estimate(machine))
        elif jax.device_count() % fixed:
            print(f"{name:<24} left out: it needs {fixed} devices, or a multiple of them")
        else:
            print(f"{name:<24} {run(strategy, mylib.make_mesh(**strategy.axes))}")


def trained(task: Task, steps: int = 20) -> Callable[[Strategy, Mesh], str]:
    """For `main`: trains, and says how the loss went."""

    def run(strategy: Strategy, mesh: Mesh) -> str:
        losses = train(task, strategy, mesh, steps)
        return f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {steps} steps"

    return run

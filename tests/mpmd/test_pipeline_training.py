"""Training a pipeline in several processes, with an optimiser for each stage."""

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from agreeing import all_equal
from jax.sharding import PartitionSpec as P
from mpmd.test_pipeline import (
    FSDP,
    LENGTH,
    MICROBATCHES,
    ROWS,
    WIDTH,
    Blocks,
    Dense,
    check,
    square,
    whole,
)

import mylib
from mylib import mpmd


def _run(kind, schedule: mpmd.Schedule, steps: int = 2) -> None:
    """The same lines in every process, and in one."""
    count = schedule.meshes
    meshes = mpmd.split(mylib.make_mesh(stage=count, data=-1), "stage")
    given = [kind(key) for key in jax.random.split(jax.random.key(0), schedule.stages)]
    stages = [
        mylib.filter_device_put(stage, FSDP, mesh=meshes[s % count])
        for s, stage in enumerate(given)
    ]
    assert sum(mpmd.is_remote(jax.tree.leaves(s)[0]) for s in stages) == sum(
        jax.process_index() not in {d.process_index for d in meshes[i % count].devices.flat}
        for i in range(schedule.stages)
    )
    shape = (2, ROWS, LENGTH, WIDTH)
    x, y = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    here = mylib.filter_device_put(x, P("data"), mesh=meshes[0])
    there = mylib.filter_device_put(y, P("data"), mesh=meshes[(schedule.stages - 1) % count])
    pipe = mpmd.pipeline(stages, square, schedule=schedule)
    optimiser = optax.adam(1e-3)

    def update(stage, grads, state):
        updates, state = optimiser.update(grads, state)
        return eqx.apply_updates(stage, updates), state

    def init(stage):
        return optimiser.init(eqx.filter(stage, eqx.is_inexact_array))

    updates = [mpmd.jit(update, mesh=mesh, out_shardings=FSDP) for mesh in meshes]
    inits = [mpmd.jit(init, mesh=mesh, out_shardings=FSDP) for mesh in meshes]
    states = [inits[s % count](stage) for s, stage in enumerate(stages)]
    losses = []
    for reference in _unsplit(given, x, y, steps, optimiser):
        value, grads = pipe(stages, here, there)
        # Adam divides by small gradients, so later steps differ more.
        check((value, grads), reference, stages, rtol=2e-6)
        losses.append(float(mpmd.fetch(value)))
        pairs = [
            updates[s % count](stage, own, state)
            for s, (stage, own, state) in enumerate(zip(stages, grads, states, strict=True))
        ]
        stages, states = [list(part) for part in zip(*pairs, strict=True)]
    assert len(losses) == steps
    all_equal(losses)


def _unsplit(stages, x, y, steps, optimiser):
    """The losses and gradients of the same training on one device."""
    state = optimiser.init(eqx.filter(stages, eqx.is_inexact_array))
    for _ in range(steps):
        loss, grads = whole(stages, square, x, y)
        yield loss, grads
        updates, state = optimiser.update(grads, state)
        stages = eqx.apply_updates(stages, updates)


@pytest.mark.multihost(processes=2, devices_per_process=4)
def test_two_processes():
    _run(Dense, mpmd.one_f_one_b(2, MICROBATCHES))


@pytest.mark.thorough
@pytest.mark.multihost(processes=4, devices_per_process=2)
def test_four_processes():
    _run(Blocks, mpmd.zero_bubble(4, MICROBATCHES))


@pytest.mark.parametrize(
    "kind",
    [pytest.param(Dense, marks=pytest.mark.slow), pytest.param(Blocks, marks=pytest.mark.thorough)],
)
def test_one_process(kind):
    _run(kind, mpmd.one_f_one_b(4, MICROBATCHES), steps=3)

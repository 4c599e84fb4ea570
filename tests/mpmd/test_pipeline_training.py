"""Training a pipeline in several processes, with an optimiser for each stage."""

import functools
import gc
import os
import threading
import time
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from agreeing import all_equal
from jax.sharding import PartitionSpec as P
from models import Block

import mylib
from mylib import mpmd

WIDTH, ROWS, LENGTH, MICROBATCHES = 16, 16, 4, 4
FSDP = mylib.rules.fsdp("data", min_size=1)


class Blocks(eqx.Module):
    """A stage of a transformer."""

    blocks: list[Block]

    def __init__(self, key):
        self.blocks = [Block(WIDTH, 2 * WIDTH, 2, key=key)]

    def __call__(self, x):
        for block in self.blocks:
            x = jax.vmap(block)(x)
        return x


class Dense(eqx.Module):
    weight: jax.Array

    def __init__(self, key):
        self.weight = jax.random.normal(key, (WIDTH, WIDTH)) / 4

    def __call__(self, x):
        return x + jnp.tanh(x @ self.weight)


def _square(prediction, y):
    return jnp.mean((prediction - y) ** 2)


def _run(kind, schedule: mpmd.Schedule, steps: int = 1, **options: Any) -> None:
    """The same lines in every process, and in one."""
    count = schedule.meshes
    meshes = mpmd.split(mylib.make_mesh(stage=count, data=-1), "stage")
    whole = [kind(key) for key in jax.random.split(jax.random.key(0), schedule.stages)]
    stages = [
        mylib.filter_device_put(stage, FSDP, mesh=meshes[s % count])
        for s, stage in enumerate(whole)
    ]
    assert sum(mpmd.is_remote(jax.tree.leaves(s)[0]) for s in stages) == sum(
        jax.process_index() not in {d.process_index for d in meshes[i % count].devices.flat}
        for i in range(schedule.stages)
    )
    shape = (2, ROWS, LENGTH, WIDTH)
    x, y = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    here = mylib.filter_device_put(x, P("data"), mesh=meshes[0])
    there = mylib.filter_device_put(y, P("data"), mesh=meshes[(schedule.stages - 1) % count])
    pipe = mpmd.pipeline(stages, _square, schedule=schedule, **options)
    optimiser = optax.adam(1e-3)

    def update(stage, grads, state):
        updates, state = optimiser.update(grads, state)
        return eqx.apply_updates(stage, updates), state

    def init(stage):
        return optimiser.init(eqx.filter(stage, eqx.is_inexact_array))

    updates = [mpmd.jit(update, mesh=mesh, out_shardings=FSDP) for mesh in meshes]
    inits = [mpmd.jit(init, mesh=mesh, out_shardings=FSDP) for mesh in meshes]
    states = [inits[s % count](stage) for s, stage in enumerate(stages)]
    expected = _unsplit(whole, x, y, steps, optimiser)
    for loss, reference in expected:
        value, grads = pipe(stages, here, there)
        assert float(mpmd.fetch(value)) == pytest.approx(float(loss), rel=1e-6)
        for stage, own, wanted in zip(stages, grads, reference, strict=True):
            params = jax.tree.leaves(eqx.filter(stage, eqx.is_inexact_array))
            for param, a in zip(params, jax.tree.leaves(own), strict=True):
                assert a.sharding == param.sharding
            _close(mpmd.fetch(own), wanted)
        pairs = [
            updates[s % count](stage, own, state)
            for s, (stage, own, state) in enumerate(zip(stages, grads, states, strict=True))
        ]
        stages, states = [list(part) for part in zip(*pairs, strict=True)]
    all_equal([float(loss) for loss, _ in expected])


def _unsplit(stages, x, y, steps, optimiser):
    """The losses and gradients of the same training on one device."""

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def run(stages):
        return _square(functools.reduce(lambda x, stage: stage(x), stages, x), y)

    state = optimiser.init(eqx.filter(stages, eqx.is_inexact_array))
    for _ in range(steps):
        loss, grads = run(stages)
        yield loss, grads
        updates, state = optimiser.update(grads, state)
        stages = eqx.apply_updates(stages, updates)


def _held() -> list[int]:
    """Arrays, threads and open files, when what still ran has ended.

    The loss is known before the last gradients are, and a thread holds what was sent
    until it has arrived: on a busy machine both take a while.
    """
    counts = []
    for _ in range(100):
        gc.collect()
        counts.append(
            (len(jax.live_arrays()), threading.active_count(), len(os.listdir("/proc/self/fd")))
        )
        if len(counts) > 5 and len(set(counts[-5:])) == 1:
            break
        time.sleep(0.2)
    return list(counts[-1])


def _close(found, wanted) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        # Adam divides by small gradients, so later steps differ more.
        assert np.linalg.norm(a - b) <= 2e-6 * np.linalg.norm(b) + 1e-8


@pytest.mark.multihost(processes=2, devices_per_process=4)
class TestTwo:
    def test_training(self):
        _run(Dense, mpmd.one_f_one_b(2, MICROBATCHES), steps=2)

    @pytest.mark.thorough
    @pytest.mark.timeout(600)
    @pytest.mark.multihost(processes=2, devices_per_process=4, timeout=600)
    def test_nothing_grows(self):
        """Over many steps: arrays, threads, open files."""
        meshes = mpmd.split(mylib.make_mesh(stage=2, data=4), "stage")
        stages = [
            mylib.filter_device_put(Dense(jax.random.key(i)), FSDP, mesh=mesh)
            for i, mesh in enumerate(meshes)
        ]
        pipe = mpmd.pipeline(stages, _square, schedule=mpmd.one_f_one_b(2, 2))
        x = np.ones((8, WIDTH), np.float32)
        here, there = (mylib.filter_device_put(x, P("data"), mesh=mesh) for mesh in meshes)

        def steps(count):
            for _ in range(count):
                value, _ = pipe(stages, here, there)
            return float(mpmd.fetch(value)), _held()

        loss, before = steps(200)
        after_loss, after = steps(1800)
        assert after_loss == loss
        assert all(now <= then + 2 for then, now in zip(before, after, strict=True)), (
            before,
            after,
        )


@pytest.mark.thorough
@pytest.mark.multihost(processes=4, devices_per_process=2)
def test_four():
    _run(Blocks, mpmd.zero_bubble(4, MICROBATCHES), steps=2)


@pytest.mark.thorough
def test_one_process():
    _run(Blocks, mpmd.one_f_one_b(4, MICROBATCHES), steps=2)

"""The activations that each mesh holds at once, measured, against `Schedule.live`.

It prints measured / formula: python -m pytest -s -m "slow or not slow" and this file.
"""

import gc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import mylib
from mylib import mpmd
from mylib._training.mpmd import loop as _loop

WIDTH, ROWS, DEPTH, MICROBATCHES = 8, 64, 12, 8


class Deep(eqx.Module):
    """Keeps an activation of each layer, beside which its input and weights are small."""

    weights: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(DEPTH):
            x = jnp.tanh(x @ self.weights[i])
        return x


def _square(prediction: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((prediction - y) ** 2)


def _peaks(schedule: mpmd.Schedule, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The most bytes that a step holds on each mesh, beyond what is there before it."""
    count = schedule.meshes
    meshes = [Mesh(x, ("data",)) for x in np.array(jax.devices()).reshape(4, 2)[:count]]
    keys = jax.random.split(jax.random.key(0), schedule.stages)
    stages = [
        mylib.filter_device_put(
            Deep(jax.random.normal(key, (DEPTH, WIDTH, WIDTH)) / 3), P(), mesh=meshes[s % count]
        )
        for s, key in enumerate(keys)
    ]
    x = np.ones((ROWS * schedule.microbatches, WIDTH), np.float32)
    here, there = (
        mylib.filter_device_put(x, P("data"), mesh=meshes[i])
        for i in (0, (schedule.stages - 1) % count)
    )
    pipe = mpmd.pipeline(stages, _square, schedule=schedule)
    jax.block_until_ready(pipe(stages, here, there))

    def held() -> list[int]:
        sizes: dict[Any, int] = {}
        for a in jax.live_arrays():
            if isinstance(a.sharding, NamedSharding):
                sizes[a.sharding.mesh] = sizes.get(a.sharding.mesh, 0) + a.nbytes
        return [sizes.get(mesh, 0) for mesh in meshes]

    gc.collect()
    before, peaks = held(), [0] * count
    usual = _loop._State.run

    def run(self: Any, kind: mpmd.Pass, m: int) -> Any:
        made = usual(self, kind, m)
        peaks[:] = map(max, peaks, (a - b for a, b in zip(held(), before, strict=True)))
        return made

    with monkeypatch.context() as patch:
        patch.setattr(_loop._State, "run", run)
        jax.block_until_ready(pipe(stages, here, there))
    return peaks


# A weight pass takes the cotangents of its layers, too, which the backward pass before it makes.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "most"),
    [("gpipe", 1.1), ("one_f_one_b", 1.2), ("interleaved", 1.2), ("zero_bubble", 1.9)],
)
def test_the_peak_is_that_of_the_formula(kind, most, monkeypatch):
    chunks = (2,) if kind == "interleaved" else ()
    schedule = getattr(mpmd, kind)(2, MICROBATCHES, *chunks)
    sums = DEPTH * WIDTH * WIDTH * 4
    one = [peak - sums for peak in _peaks(mpmd.gpipe(2, 1), monkeypatch)]
    ratios = [
        (peak - sums * schedule.stages // 2) / (live * unit)
        for peak, live, unit in zip(
            _peaks(schedule, monkeypatch), schedule.live(), one, strict=True
        )
    ]
    print(f"{schedule.name}: {', '.join(f'{ratio:.2f}' for ratio in ratios)} of the formula")
    assert all(0.8 < ratio < most for ratio in ratios), ratios

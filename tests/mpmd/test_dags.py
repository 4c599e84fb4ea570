"""Random programs of placing, computing, donating, sending and fetching: in one order everywhere,
and in another one in one process.

MYLIB_DAGS=200 python -m pytest tests/mpmd/test_dags.py -m "slow or not slow"
"""

import os
import time
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import mylib
from mylib import mpmd
from mylib._moving.processes import comparison
from mylib.testing import barrier, gather

pytestmark = [pytest.mark.slow, pytest.mark.multihost(processes=2, devices_per_process=2)]

ROUNDS = int(os.environ.get("MYLIB_DAGS", "10"))
# Numbers of devices. No two are of the same devices: a program would mix up numbers, or wait.
MESHES = [(0, 1), (2, 3), (0,), (3,), (1, 2), (0, 1, 2, 3)]
X: Any = np.arange(8, dtype=np.float32)


class Step(NamedTuple):
    verb: str
    # The number of the array that it takes, and that of its mesh.
    array: int
    mesh: int
    spec: P


def dag(rng: np.random.Generator) -> list[Step]:
    """Each step but a fetch makes an array, whose number is that of the step."""
    steps: list[Step] = []
    alive: list[int] = []
    for n in range(12):
        verbs = ["put"] if len(alive) < 2 else ["put", "double", "donate", "send", "send", "fetch"]
        verb, spec = rng.choice(verbs), P(*rng.choice(["data", None], 1))
        array = int(rng.choice(alive)) if verb != "put" else -1
        mesh = int(rng.integers(len(MESHES)))
        if verb in ("double", "donate"):
            mesh = steps[array].mesh
        if verb == "send" and mesh == steps[array].mesh:
            mesh = (mesh + 1) % len(MESHES)
        steps.append(Step(verb, array, mesh, spec))
        alive = [i for i in alive if not (verb == "donate" and i == array)]
        alive += [n] if verb != "fetch" else []
    return [*steps, *(Step("fetch", i, 0, P()) for i in alive[-3:])]


def another_order(steps: list[Step], rng: np.random.Generator) -> list[int]:
    """In which each step comes after what it needs, and what needs an array before its donation."""
    left, order = list(range(len(steps))), []
    while left:
        free = [
            n
            for n in left
            if steps[n].array not in left
            and not (
                steps[n].verb == "donate"
                and any(m != n and m < n and steps[m].array == steps[n].array for m in left)
            )
        ]
        order.append(int(rng.choice(free)))
        left.remove(order[-1])
    return order


class Run:
    def __init__(self) -> None:
        self.meshes = [
            Mesh(np.array(jax.devices())[list(some)], ("data",), axis_types=(AxisType.Auto,))
            for some in MESHES
        ]
        self.arrays: dict[int, jax.Array] = {}
        self.values: dict[int, Any] = {}

    def step(self, n: int, step: Step) -> None:
        verb, array, number, spec = step
        mesh = self.meshes[number]
        x, value = self.arrays.get(array), self.values.get(array)
        if verb == "put":
            value = X + 100 * n
            # Each process places values of its own.
            y = mylib.filter_device_put(value, NamedSharding(mesh, spec), check=False)
        elif verb == "send":
            y = mpmd.transfer(x, spec, mesh=mesh)
        elif verb == "fetch":
            np.testing.assert_array_equal(mpmd.fetch(x), value)
            return
        else:
            donate = "all" if verb == "donate" else "none"
            y = mpmd.jit(lambda x: 2 * x, mesh=mesh, out_shardings=x.sharding, donate=donate)(x)
            value = 2 * value
        self.arrays[n], self.values[n] = y, value


def test_one_order():
    for seed in range(ROUNDS):
        run = Run()
        for n, step in enumerate(dag(np.random.default_rng(seed))):
            run.step(n, step)
    assert not comparison().failures


@pytest.mark.multihost(processes=2, devices_per_process=2, fresh=True)
@pytest.mark.parametrize("seed", range(max(2, ROUNDS // 5)))
def test_another_order_is_an_error_and_no_wrong_number(seed, monkeypatch):
    """Unless no transfer is another one."""
    rng = np.random.default_rng(seed)
    steps = dag(rng)
    order = another_order(steps, rng)
    run, me = Run(), jax.process_index()
    for mesh in run.meshes:  # so that the processes have begun
        mpmd.fetch(mylib.filter_device_put(X, P(), mesh=mesh, check=False))
    barrier()
    monkeypatch.setenv("MYLIB_EXCHANGE_TIMEOUT", "5")
    start, told = time.monotonic(), None
    try:
        for n in order if me == 1 else range(len(steps)):
            run.step(n, steps[n])
    except mpmd.TransferError as error:
        told = str(error)
    seconds = time.monotonic() - start
    until = time.monotonic() + 8
    while told is None and not comparison().failures and time.monotonic() < until:
        time.sleep(0.1)
    failed = gather([bool(comparison().failures), told is not None, seconds])
    assert failed[0][0] == failed[1][0], failed
    assert max(failed[0][2], failed[1][2]) < 10, failed

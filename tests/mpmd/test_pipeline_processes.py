"""The pipelines of `test_pipeline.py`, whose meshes belong to several processes."""

import gc
import resource
import time
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from mpmd.test_pipeline import (
    MICROBATCHES,
    check,
    cross_entropy,
    dense,
    meshes_of,
    numbers,
    on,
    placed,
    small,
    square,
    tokens,
    transformer,
    whole,
)

import mylib
from mylib import mpmd

TWO = pytest.mark.multihost(processes=2, devices_per_process=4)
FOUR = pytest.mark.multihost(processes=4, devices_per_process=2)


@TWO
@pytest.mark.parametrize(
    "schedule",
    [
        mpmd.gpipe(2, MICROBATCHES),
        mpmd.one_f_one_b(2, MICROBATCHES),
        mpmd.interleaved(2, MICROBATCHES, 2),
        mpmd.zero_bubble(2, MICROBATCHES),
    ],
    ids=["GPipe", "1F1B", "interleaved", "ZB-H1"],
)
@pytest.mark.everyday("1F1B")
def test_of_two_processes(schedule):
    pipe, given, reference = small(schedule.stages, schedule)
    for _ in range(3):
        check(pipe(*given), reference, given[0])


@pytest.mark.multihost(processes=2, devices_per_process=4, env={"MYLIB_TRANSPORT": "program"})
def test_by_programs():
    """Their processes make all transfers in the same order."""
    assert mpmd.transport() == "program"
    pipe, given, reference = small(2, mpmd.zero_bubble(2, MICROBATCHES))
    check(pipe(*given), reference, given[0])


@pytest.mark.thorough
@TWO
def test_of_a_transformer():
    schedule, (x, y) = mpmd.zero_bubble(2, MICROBATCHES), tokens()
    meshes, given = meshes_of(2, model=2), transformer(2)
    here = placed(given, meshes)
    pipe = mpmd.pipeline(here, cross_entropy, schedule=schedule, checkpoint=True)
    result = pipe(here, on(meshes[0], x), on(meshes[1], y))
    check(result, whole(given, cross_entropy, x, y), here)


@FOUR
@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_of_four_processes(tied):
    pairs = [(lambda stages: stages[0].bias, lambda stages: stages[-1].bias)] if tied else ()
    schedule = mpmd.one_f_one_b(4, MICROBATCHES)
    pipe, given, (value, grads) = small(4, schedule, tied=pairs)
    if tied:
        bias = grads[0].bias + grads[-1].bias
        for i in (0, -1):
            grads[i] = eqx.tree_at(lambda stage: stage.bias, grads[i], bias)
    check(pipe(*given), (value, grads), given[0])


@pytest.mark.slow
@FOUR
def test_meshes_over_two_processes_each():
    schedule = mpmd.interleaved(2, MICROBATCHES, 2)
    pipe, given, reference = small(4, schedule)
    check(pipe(*given), reference, given[0])


@TWO
def test_ties_between_stages_of_one_mesh():
    """The process that has them holds one array in two places, and the other one a handle."""
    pairs = [(lambda stages: stages[0].bias, lambda stages: stages[2].bias)]
    schedule = mpmd.interleaved(2, MICROBATCHES, 2)
    pipe, given, (_, grads) = small(4, schedule, tied=pairs)
    bias = grads[0].bias + grads[2].bias
    for _ in range(2):
        _, found = pipe(*given)
        found = mpmd.fetch(found)
        for i in (0, 2):
            np.testing.assert_allclose(found[i].bias, bias, rtol=1e-5, atol=1e-8)
        again = mpmd.transfer(given[0][2].bias, P(), mesh=meshes_of(2)[1])
        np.testing.assert_array_equal(mpmd.fetch(again), mpmd.fetch(given[0][2].bias))


def _held() -> tuple[float, int, int, int]:
    """MB of memory, threads, open files and arrays of this process."""
    arrays: list[int] = []
    for _ in range(100):
        gc.collect()
        arrays.append(len(jax.live_arrays()))
        # What was sent has arrived, too: a thread holds it until then.
        if len(arrays) > 5 and len(set(arrays[-5:])) == 1:
            break
        time.sleep(0.2)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    threads, files = (len(list(Path("/proc/self", name).iterdir())) for name in ("task", "fd"))
    return pages * resource.getpagesize() / 1e6, threads, files, arrays[-1]


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads what Linux tells")
@pytest.mark.multihost(processes=2, devices_per_process=4, fresh=True)
def test_many_steps_hold_no_more_than_some():
    pipe, given, (expected, _) = small(2, mpmd.one_f_one_b(2, MICROBATCHES))
    held = []
    for step in range(500):
        value, _ = pipe(*given)
        if step % 100 == 99:
            np.testing.assert_allclose(mpmd.fetch(value), expected, rtol=1e-6)
            held.append(_held())
    memory, threads, files, arrays = np.subtract(held[-1], held[1])
    assert memory < 15 and threads <= 1 and files <= 0 and arrays <= 2, held


@TWO
def test_errors_are_the_same_everywhere():
    pipe, (stages, x, y), _ = small(2, mpmd.gpipe(2, MICROBATCHES))
    with pytest.raises(mylib.PlacementError, match="it is on P"):
        pipe(stages, y, x)
    other = mylib.filter_device_put(stages, P(), mesh=meshes_of(2)[0])
    with pytest.raises(mylib.PlacementError, match=r"stages\[1\]"):
        pipe(other, x, y)


@pytest.mark.slow
@TWO
def test_two_pipelines_of_different_processes():
    """Both stages of one are in one process: the other takes no part in its transfers."""
    own = np.array(jax.devices())[4:].reshape(2, 2, 1)
    meshes = [jax.sharding.Mesh(x, ("data", "model")) for x in own]
    given, (x, y), schedule = dense(2), numbers(), mpmd.gpipe(2, MICROBATCHES)
    here = placed(given, meshes)
    one = mpmd.pipeline(here, square, schedule=schedule)
    pipe, both, reference = small(2, schedule)
    for _ in range(2):
        check(one(here, on(meshes[0], x), on(meshes[1], y)), reference, here)
        check(pipe(*both), reference, both[0])

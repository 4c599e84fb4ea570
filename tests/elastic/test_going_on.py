"""Teams in which processes are lost: those that are left compute the same numbers."""

import functools
import os
from typing import Any

import numpy as np
import pytest
from teams import (
    HEARTBEAT,
    HOW,
    LAYOUTS,
    WHEN,
    Told,
    at_random,
    run,
    seconds_until_on_again,
    strike,
)

pytestmark = pytest.mark.filterwarnings("default")

DAILY, SLOW = range(5), range(5, 25)
# Seconds after the heartbeat's time-out in which training is on again, on a machine that has
# nothing else to do: as many times more as `slowed` measures during the run.
PROMISED = 4.0


@functools.cache
def alone() -> dict[str, Any]:
    """The end of a run that nothing happens to."""
    statuses, told, words, _ = run(1, {}, dict(os.environ))
    assert statuses == [0], words
    return told[0][-1]


def check_end(told, words) -> None:
    expected = alone()
    for what in ("losses", "w"):
        ours, theirs = np.array(told[what]), np.array(expected[what])
        difference = np.max(np.abs(ours - theirs))
        assert difference <= 1e-12 * np.max(np.abs(theirs)), (what, difference, words)
    for what in ("key", "epoch"):
        assert told[what] == expected[what], words


def check_goes_on(processes, plan, env) -> Told:
    statuses, told, words, slower = run(processes, plan, env)
    hit = {s["process"]: s["how"] for s in plan["strikes"]}
    # One that raises, or is missing, leaves nobody who trains beside the others.
    left = [i for i in range(processes) if i not in hit]
    assert [statuses[i] for i in left] == [0] * len(left), words
    for i in left:
        check_end(told[i][-1], words)
        read = [event["without"] for event in told[i] if "reads" in event]
        assert {*read[-1]} == {*hit}, words
    for i, how in hit.items():
        assert statuses[i] not in (0, None), (i, words)
        if how == "stop":
            assert not any("losses" in event for event in told[i]), words
    took = seconds_until_on_again(told, plan["strikes"])
    print(f"on again after {took:.1f} s, on a machine {slower:.1f} times slower than alone")
    assert took <= HEARTBEAT + PROMISED * slower, words
    return told


def check_at_random(seed, env) -> None:
    processes, plan = at_random(seed)
    print(f"seed {seed}: {processes} processes, {plan}")
    check_goes_on(processes, plan, env)


@pytest.mark.parametrize("seed", DAILY)
def test_goes_on(seed, checkout_env):
    check_at_random(seed, checkout_env)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SLOW)
def test_goes_on_more_often(seed, checkout_env):
    check_at_random(seed, checkout_env)


def test_the_seeds_choose_everything():
    plans = [at_random(seed) for seed in (*DAILY, *SLOW)]
    strikes = [s for _, plan in plans for s in plan["strikes"]]
    assert {s["when"] for s in strikes} == {*WHEN}
    assert {s["how"] for s in strikes} == {*HOW}
    assert all((n, axes) in [(n, plan["axes"]) for n, plan in plans] for n, axes in LAYOUTS)
    several = [
        (n - len(plan["strikes"]), len({s["step"] for s in plan["strikes"]}))
        for n, plan in plans
        if len(plan["strikes"]) > 1
    ]
    # At once and in a row, and those of which one is left.
    assert {1, 2} <= {steps for _, steps in several}
    assert 1 in {left for left, _ in several}


@pytest.mark.slow
def test_one_that_was_stopped_ends_with_a_word(checkout_env):
    # The first one reads slowly, so that the others are still training when it goes on.
    strikes = [
        strike(1, "in the step", 3, "stop"),
        strike(0, "before reading", 5, "late", seconds=30),
    ]
    statuses, told, words, _ = run(3, {"strikes": strikes}, checkout_env)
    for i in (0, 2):
        assert statuses[i] == 0, words
        check_end(told[i][-1], words)
    # JAX aborts it if its heartbeat comes first.
    assert statuses[1] in (1, -6), words
    assert "process was taken for lost" in words or "Task 1 heartbeat timeout" in words


@pytest.mark.slow
def test_pieces(checkout_env):
    plan = {"pieces": True, "strikes": [strike(1, "in the step", 3, "kill")]}
    told = check_goes_on(2, plan, checkout_env)
    assert [event["pieces"] for event in told[0] if "pieces" in event] == [1, 2]


# Processes 0 and 1 have a replica, and 2 and 3 the other one.
WIDE = {"axes": {"data": 2, "model": 2}}


@pytest.mark.slow
@pytest.mark.parametrize("when", ["after reading", "in the step", "in the commit"])
def test_a_replica_of_two_processes(when, checkout_env):
    plan = {**WIDE, "strikes": [strike(2, when, 3, "kill")]}
    statuses, told, words, _ = run(4, plan, checkout_env)
    assert statuses == [0, 0, -9, 1], words
    for events in told[:2]:
        check_end(events[-1], words)
    # In the commit it has already told that its step is done.
    step = 4 if when == "in the commit" else 3
    what = f"process 2 was lost in step {step}, which had a part of this process's replica"
    assert what in told[3][-1]["error"]
    assert not told[3][-1]["restart"]


@pytest.mark.slow
def test_the_replica_of_the_first_process_is_lost(checkout_env):
    plan = {**WIDE, "strikes": [strike(1, "in the step", 3, "kill")]}
    statuses, told, words, _ = run(4, plan, checkout_env)
    assert statuses == [75, -9, 75, 75], words
    for i in (0, 2, 3):
        assert "lost in step 3, and with it the replica of process 0" in told[i][-1]["error"]


@pytest.mark.slow
def test_a_process_that_is_late_in_a_collective(checkout_env):
    plan = {"strikes": [strike(1, "in the step", 3, "late", seconds=HEARTBEAT + 4)]}
    statuses, told, words, _ = run(2, plan, checkout_env)
    assert statuses == [75, 75], words
    for events in told:
        assert "a collective failed in step 3, and no process is lost" in events[-1]["error"]
        assert events[-1]["restart"]


@pytest.mark.slow
def test_a_process_may_be_late_in_reading(checkout_env):
    plan = {"strikes": [strike(1, "before reading", 3, "late", seconds=HEARTBEAT + 4)]}
    statuses, told, words, _ = run(2, plan, checkout_env)
    assert statuses == [0, 0], words
    for events in told:
        check_end(events[-1], words)
        assert not any(event.get("without") for event in events)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise in reading", "raise in the step"])
def test_an_error_of_its_own_is_no_loss(how, checkout_env):
    when = "before reading" if "reading" in how else "in the step"
    plan = {"strikes": [strike(1, when, 2, "raise")]}
    statuses, told, words, _ = run(2, plan, checkout_env)
    assert statuses[0] == 1, words
    assert "process 1 raised in" in told[0][-1]["error"], words
    assert "an error of its own" in told[0][-1]["error"], words
    assert not told[0][-1]["restart"]
    if "reading" in how:
        assert told[1][-1]["own"] == "an error of its own", words


@pytest.mark.slow
def test_a_process_that_leaves(checkout_env):
    plan = {"another team": True, "strikes": [strike(1, "after the step", 3, "leave")]}
    statuses, told, words, _ = run(2, plan, checkout_env)
    assert statuses == [75, 5], words
    assert "process 1 has ended" in told[0][-1]["error"], words
    assert [event["step"] for event in told[0] if "step" in event] == [0, 1, 2, 3]


@pytest.mark.slow
def test_too_few_are_left(checkout_env):
    plan = {"at_least": 2, "strikes": [strike(1, "in the step", 3, "kill")]}
    statuses, told, words, _ = run(2, plan, checkout_env)
    assert statuses == [75, -9], words
    assert "process 1 was lost in step 3" in told[0][-1]["error"], words
    assert "fewer than at_least=2" in told[0][-1]["error"]
    assert told[0][-1]["restart"]


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
def test_the_first_process_is_lost(how, checkout_env):
    plan = {"strikes": [strike(0, "in the step", 3, how)]}
    statuses, told, words, _ = run(2, plan, checkout_env)
    # JAX ends the other one: its service is gone.
    assert statuses[1] not in (0, None), words
    assert not any("losses" in event for event in told[1]), words
    # If the first one goes on, it is the only one that does.
    assert statuses[0] is not None
    assert how == "stop" or statuses[0] != 0, words


@pytest.mark.slow
def test_one_that_is_cut_off(checkout_env):
    plan = {"strikes": [strike(1, "after reading", 3, "close")]}
    statuses, told, words, _ = run(2, plan, checkout_env)
    assert None not in statuses, words
    # It is lost, or both know that a collective has failed; never do both train on.
    assert sum(any("losses" in event for event in events) for events in told) <= 1, words
    if statuses[0] == 0:
        check_end(told[0][-1], words)
    else:
        assert statuses[0] == 75, words

"""Processes that wait for each other: random programs of calls, and processes, on paper."""

from collections import Counter

import numpy as np
import pytest

from mylib._moving.processes.circle import Waiting, circle_before
from mylib._moving.processes.order import lane_name

Calls = list[tuple[int, ...]]


def program(rng: np.random.Generator, processes: int) -> Calls:
    """The processes of each call, in an order."""
    sizes = rng.integers(2, processes, 30, endpoint=True)
    return [tuple(sorted(map(int, rng.choice(processes, size, False)))) for size in sizes]


def waiting(made: Calls) -> Waiting:
    """That of a process that waits in the last call that it has made."""
    done = Counter(lane_name("calls", call) for call in made)
    lane = lane_name("calls", made[-1])
    return Waiting(lane, done[lane], "a call, with process", done)


def stuck(orders: list[Calls]) -> dict[int, Waiting]:
    """Where processes stop whose calls these are, if the calls of a lane meet by their numbers."""
    at = [1] * len(orders)
    while True:
        told = {p: waiting(calls[: at[p]]) for p, calls in enumerate(orders) if at[p] <= len(calls)}
        nodes = {p: (orders[p][at[p] - 1], x.number) for p, x in told.items()}
        free = [p for p, (call, n) in nodes.items() if all(nodes.get(q) == (call, n) for q in call)]
        if not free:
            return told
        for p in free:
            at[p] += 1


@pytest.mark.parametrize("processes", [2, 3, 5])
def test_in_one_order_nobody_waits_in_a_circle(processes):
    """Whenever each process has told what it waits for: the others may have gone on since."""
    rng = np.random.default_rng(processes)
    for _ in range(30):
        calls = program(rng, processes)
        told: dict[int, Waiting] = {}
        for p in range(processes):
            own = [call for call in calls if p in call]
            if own:
                told[p] = waiting(own[: int(rng.integers(1, len(own), endpoint=True))])
        assert not any(circle_before(p, told) for p in told)


@pytest.mark.parametrize("processes", [3, 5])
def test_whoever_is_stuck_waits_for_a_circle(processes):
    rng, found = np.random.default_rng(processes), 0
    for _ in range(60):
        calls = program(rng, processes)
        orders = [[call for call in calls if p in call] for p in range(processes)]
        odd = orders[int(rng.integers(processes))]
        i, j = (int(rng.integers(len(odd))) for _ in range(2))
        odd[i], odd[j] = odd[j], odd[i]
        told = stuck(orders)
        for p in told:
            wrong = circle_before(p, told)
            assert wrong is not None
            concerned, text = wrong
            assert text.startswith("processes wait for each other: process ")
            assert set(concerned) <= set(range(processes)) and len(concerned) > 1
            found += 1
    assert found > 20


def test_the_text():
    a, b = lane_name("calls", (0, 1, 2)), lane_name("arrays on cpu", (1, 2))
    told = {
        0: Waiting(a, 1, "int32[2], call 1, from process", {a: 1}),
        1: Waiting(b, 3, "float32[8], call 3, from process", {b: 3}),
        2: Waiting(a, 1, "int32[2], call 1, from process", {a: 1, b: 2}),
    }
    expected = (
        (0, 1, 2),
        "processes wait for each other: process 1 for float32[8], call 3, from process 2; process "
        "2 for int32[2], call 1, from process 1. Each gives what the one before it waits for only "
        "after that. All processes must make the same calls in the same order",
    )
    assert [circle_before(p, told) for p in told] == [expected] * 3
    del told[1]
    assert not any(circle_before(p, told) for p in told)

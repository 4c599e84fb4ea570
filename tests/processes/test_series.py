"""Meetings at JAX's coordination service. Threads take the place of processes, where many have to
come, or one has to die at a certain moment.
"""

import time
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from mylib._core.compat import coordination_client
from mylib._moving.processes import JUDGED, Conclusion, Series, digest, exchange

pytestmark = pytest.mark.multihost(processes=2, devices_per_process=4)

EVERYBODY = tuple(range(5))


@pytest.fixture
def everyone(request) -> list[Series]:
    """The series of meetings of five, all of them in this process."""
    place = f"mylib/{request.node.name}/{jax.process_index()}"
    return [Series(place, EVERYBODY, index) for index in EVERYBODY]


def told(said: dict[int, str]) -> str:
    return ", ".join(f"{index}: {said[index]}" for index in sorted(said))


def dies(said: dict[int, str]) -> str:
    raise KeyboardInterrupt


def wait(series: Series, judge=told) -> Conclusion:
    deadline = time.monotonic() + 100
    while (conclusion := series.hear(judge, 0.1)) is None:
        assert time.monotonic() < deadline
    return conclusion


def meet(series: Series, mine: str, judge=told) -> Conclusion:
    series.say(mine, judge)
    conclusion = wait(series, judge)
    series.go_on(judged=conclusion.kind == JUDGED)
    return conclusion


def turns_kept(everyone: list[Series]) -> set[str]:
    """The meetings of which the service still holds something."""
    place = everyone[0].place
    return {
        key.removeprefix(f"{place}/").split("/")[0]
        for key, _ in coordination_client().key_value_dir_get(f"{place}/")
    }


def test_all_hear_the_same(everyone):
    judged = []

    def judge(said):
        judged.append(said)
        return told(said)

    with ThreadPoolExecutor(5) as pool:
        for turn in range(4):
            mine = [f"{index} at {turn}" for index in EVERYBODY]
            heard = list(pool.map(meet, everyone, mine, [judge] * 5))
            assert heard == [(JUDGED, told(dict(enumerate(mine))))] * 5
    assert len(judged) == 4


def test_what_all_have_read_is_deleted(everyone):
    with ThreadPoolExecutor(5) as pool:
        list(pool.map(meet, everyone, "abcde"))
        for series in everyone:
            series.conclude("given-up", "")
            assert meet(series, "too late").kind == "given-up"
        assert turns_kept(everyone) == {"0", "1"}
        list(pool.map(meet, everyone, "abcde"))
    assert turns_kept(everyone) == {"2"}
    everyone[0].forget()
    assert not turns_kept(everyone)


def test_who_judges_dies(everyone):
    """All have come, and so all hear the judgement."""
    *others, last = everyone
    for series in others:
        series.say("here", told)
        assert series.hear(told, 0.05) is None
    with pytest.raises(KeyboardInterrupt):
        last.say("dying", dies)
    with ThreadPoolExecutor(5) as pool:
        heard = set(pool.map(wait, others))
    assert heard == {(JUDGED, "0: here, 1: here, 2: here, 3: here, 4: dying")}


def test_the_first_conclusion_holds(everyone):
    first, *others = everyone
    first.say("here", told)
    assert others[0].conclude("given-up", "no one came, it seems")
    assert not first.conclude("given-up", "otherwise")
    for series in others:
        assert meet(series, "late") == ("given-up", "no one came, it seems")
    assert wait(first) == ("given-up", "no one came, it seems")


def test_one_dies_before_it_is_counted():
    """Its message is there, and so the others get a decision, at the latest at their deadline."""
    if jax.process_index() == 0:
        place = f"mylib/half/{digest((0, 1))}"
        coordination_client().key_value_set(f"{place}/0/said/1", "0there")
        assert exchange("half", "here", (0, 1), told, timeout=1) == "0: here, 1: there"


def test_nobody_waits_longer_than_asked(everyone):
    start = time.monotonic()
    assert everyone[0].read(0.2) is None
    assert 0.1 < time.monotonic() - start < 60

"""How many processes find out what differs, and how much they send for it. What each process sends
is made here, and no process is started.
"""

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from hypothesis import given, strategies as st

from mylib import PlacementError
from mylib._core.text import apart, in_short
from mylib._moving.processes import copies, differences
from mylib.errors import Fault

PROCESSES = 200
EVERYBODY = tuple(range(PROCESSES))


class Outcome(NamedTuple):
    faults: list[Fault]
    # The characters that all processes send to the second meeting, and that each reads.
    sent: int
    read: int


def outcome(
    facts: Callable[[int], differences.Facts],
    faults: Callable[[int], list[Fault]] = lambda me: [],
    processes: tuple[int, ...] = EVERYBODY,
) -> Outcome:
    brief = {me: differences.in_brief(faults(me), facts(me)) for me in processes}
    difference = differences.difference_of(brief)
    assert difference is not None
    said = {me: differences.message(me, difference, faults(me), facts(me)) for me in processes}
    judgement = differences.judge(difference, "make it equal", differences.disagreements, said)
    sent = sum(map(len, said.values()))
    return Outcome(differences.read(judgement), sent, len(judgement))


@functools.lru_cache
def leaves(seed: int, count: int) -> dict[str, str]:
    numbers = np.random.default_rng(seed).bytes(8 * count).hex()
    target = "NamedSharding(mesh=Mesh('data': 200, 'model': 4), spec=P()) on devices 0..799"
    return {
        f".layers[{i}].weight": f"float32[8, 4] as {target} (checksum {numbers[16 * i :][:16]})"
        for i in range(count)
    }


def fault(reason: str) -> Fault:
    return Fault(".w", (8, 4), "P('data')", reason, "place it otherwise")


def test_one_leaf_of_one_process():
    usual, odd = leaves(0, 300), {**leaves(0, 300), ".layers[7].weight": "int32[8, 4]"}
    (only,), sent, read = outcome(lambda me: {EVERYBODY: odd if me == 50 else usual})
    assert only.path == ".layers[7].weight"
    assert "processes 0..49, 51..199: float32[8, 4] as " in only.reason
    assert only.reason.endswith("; process 50: int32[8, 4]")
    # Two of them speak.
    assert sent < 20_000 and read < 1000


def test_all_leaves_of_all_processes():
    """As if each process made its parameters from a seed of its own."""
    (first, *others), sent, read = outcome(lambda me: {EVERYBODY: leaves(me % 20, 200)})
    assert "processes 0, 20, 40, 60, 80, 100, 120, 140 and 2 more: float32" in first.reason
    assert first.reason.endswith("; 120 more processes differ from all of these")
    assert len(others) == 199
    assert "only the first 100 such faults are described" in others[-1].reason
    text = str(PlacementError([first, *others]))
    assert text.startswith("can't place 200 leaves; the first: ") and len(text) < 50_000
    assert sent < 50_000 and read < 50_000


def test_a_leaf_that_some_do_not_have():
    def facts(me):
        return {EVERYBODY: {"a": "1"} if me else {"a": "1", "b": "2"}}

    (only,), _, _ = outcome(facts)
    assert only.path == "b"
    assert "process 0: 2; processes 1..199: nothing of that name" in only.reason


def test_groups_that_differ_within():
    def facts(me):
        pair = (me - me % 2, me - me % 2 + 1)
        return {EVERYBODY: {"same": "in all"}, pair: {"w": f"checksum {me}"}}

    (*some, rest), sent, _ = outcome(facts)
    assert [fault.path for fault in some] == ["w"] * 8
    assert "process 0: checksum 0; process 1: checksum 1" in some[0].reason
    assert rest.reason == "values differ within 92 more groups of processes"
    assert sent < 10_000


def test_faults_that_all_have_found_are_not_sent():
    found = [fault("reason")]
    brief = {me: differences.in_brief(found, {}) for me in EVERYBODY}
    difference = differences.difference_of(brief)

    def meet(mine, judge):
        raise AssertionError("there is nothing to ask")

    assert differences.faults_in_full(meet, difference, found, {}) == found


def test_faults_that_some_have_found():
    def found(me):
        return [fault("all"), *([fault("some")] if me < 2 else [])]

    (first, second), sent, _ = outcome(lambda me: {}, found)
    assert first == fault("all")
    assert second.request == "P('data') (in processes 0, 1)"
    assert sent < 1000


def test_faults_that_differ_in_all():
    """Such as an error that names a file of its process's own."""
    (*some, rest), sent, _ = outcome(lambda me: {}, lambda me: [fault(f"file {me}")])
    assert [fault.reason for fault in some] == [f"file {me}" for me in range(8)]
    assert rest.reason == "192 more processes have found others, which are not listed"
    assert sent < 3000


def test_faults_that_differ_in_addresses():
    """Such as those of a rule that is a lambda function."""
    brief = {
        me: differences.in_brief([fault(f"<function f at 0x7fee2e8{me:05x}>")], {})
        for me in EVERYBODY
    }
    difference = differences.difference_of(brief)
    assert difference is not None and difference.versions == {"faults": ["0:200:1"]}


def test_copies_of_which_not_all_are_examined():
    """The processes that are left out are named with the shard that they hold."""

    def facts(number, value):
        held = {number: {value: [8]}}
        return {".w": ["float32[2] as P()", [2], "P()", "0:4:1", held]}

    versions = {
        (0, 1, 2): {(0,): facts("0", "a"), (1,): facts("0", "b")},
        (3, 4): {(3,): facts("1", "c"), (4,): facts("1", "d")},
    }
    (found,) = copies.faults_in("place it again", versions)
    assert found.reason == (
        "there are 2 values of it: process 0 on device 8; process 1 on device 8; 1 more process "
        "differs from all of these (and 1 more of its shards differs)"
    )


def test_equal_facts():
    brief = {me: differences.in_brief([], {EVERYBODY: {"a": "1"}}) for me in EVERYBODY}
    assert differences.difference_of(brief) is None


def test_long_texts_that_differ_in_a_digit():
    texts = [f"{'an array of some kind ' * 12}in train.py:{n} on process 0" for n in (21, 22)]
    (only,), *_ = outcome(lambda me: {EVERYBODY: {"w": texts[me == 50]}})
    assert only.reason.endswith("; the first has train.py:21, the second train.py:22")
    shapes = [f"{'an array of some kind ' * 12}float32[8, {n}] here" for n in (2, 3)]
    assert apart(*shapes) == "; the first has float32[8,2], the second float32[8,3]"
    # What is short is read as it is.
    assert apart("train.py:21", "train.py:22") == ""


@given(*[st.text("ab ", max_size=6)] * 3)
def test_where_texts_differ(first, second, after):
    around = "x " * 60
    told = apart(f"{around}{first}{after}", f"{around}{second}{after} {around}")
    assert told == "" or told.startswith("; the first has ")


def test_very_long_texts():
    """Of the user's own: nobody reads 2 MB, and they are different at the end."""
    long = "x" * 2_000_000
    found = outcome(lambda me: {(0, 1): {f"{long}.w": f"{long}{me}"}}, processes=(0, 1))
    (only,) = found.faults
    assert found.sent < 2_000 and found.read < 2_000
    assert len(only.reason) < 20_000 and only.reason.count("(2000001 characters) (check") == 2
    (only,) = outcome(lambda me: {}, lambda me: [fault(long)] * me, (0, 1)).faults
    assert len(only.reason) < 10_000


@given(st.lists(st.integers(0, 30), max_size=40))
def test_numbers_in_short(numbers):
    text, left = in_short(numbers), 0
    if match := re.search(r" and (\d+) more$", text):
        text, left = text[: match.start()], int(match[1])
    parts = [list(map(int, part.split(".."))) for part in text.split(", ") if part]
    listed = [number for part in parts for number in range(part[0], part[-1] + 1)]
    assert listed == numbers[: len(listed)] and len(listed) + left == len(numbers)
    assert len(parts) <= 8

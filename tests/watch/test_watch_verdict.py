"""Who is stuck, judged from what processes have told."""

import pytest

from mylib._moving.watch.report import report
from mylib._moving.watch.verdict import Account, findings, is_stuck


def account(index, age=0.0, programs=0, group="0:4:1", **more):
    counts = {f"programs {group}": programs} if programs else {}
    return Account(index, age, news={"counts": counts, "at": f"train.py:{index}"}, **more)


@pytest.mark.parametrize(
    ("accounts", "stuck"),
    [
        # All wait for one that is behind, and stands still; or that still works.
        ([account(0, 9, 5), account(1, 9, 4)], True),
        ([account(0, 9, 5), account(1, 1, 4)], False),
        # One stands still behind another that goes on, or ahead of it, or beside it.
        ([account(0, 1, 5), account(1, 9, 4)], True),
        ([account(0, 1, 4), account(1, 9, 5)], False),
        ([account(0, 1, 5), account(1, 9, 5)], False),
        # Some have not made any call, or have left.
        ([account(0, 9, 1), account(1, 9)], True),
        ([account(0, 1), account(1, 9)], False),
        ([account(0, 9, 1), account(1, 0, 0, state="left")], True),
        ([account(0, 1, 1), account(1, 9, 0, state="left")], False),
        # Groups that have no process in common.
        ([account(0, 9, 5, "0:1:1"), account(1, 1, 7, "1:2:1")], False),
        ([account(0, 9, 5, "0:1:1"), account(1, 9, 7, "1:2:1")], True),
    ],
)
def test_is_stuck(accounts, stuck):
    assert is_stuck(accounts, 5) is stuck


def test_many_processes_are_judged_at_once():
    some = [account(i, 9, 5 + (i != 700), "0:1000:1") for i in range(1000)]
    assert is_stuck(some, 5)
    text = report(some, "no progress")
    assert "process 700 is 1 call behind processes 0..699, 701..999" in text
    assert "\nProcess 700 is at train.py:700" in text and len(text.splitlines()) < 40


def test_processes_at_the_same_place():
    some = [account(i, 9, 5) for i in range(4)]
    for x in some:
        x.news["at"] = "train.py:7 in f"
    assert "\nProcesses 0, 1, 2, 3 are at train.py:7 in f" in report(some, "no progress")


def test_calls_that_differ():
    kind = "programs 0:2:1"
    mine = {"calls": [(kind, 3, "step in a.py:1", True), (kind, 4, "step in a.py:1", False)]}
    other = {"calls": [(kind, 3, "step in a.py:1", True), (kind, 4, "test in a.py:9", False)]}
    accounts = [
        account(0, 9, 4, "0:2:1", record=mine),
        account(1, 9, 4, "0:2:1", record=other),
    ]
    assert findings(accounts) == [
        "call 4 of processes 0, 1 is step in a.py:1 in process 0, but test in a.py:9 in process 1"
    ]


def test_what_is_odd_about_processes():
    accounts = [
        account(0, 9, 5),
        account(1, 9, 4, silent=8.0),
        account(2, 9, state="absent"),
        account(3, 0, 2, state="left"),
    ]
    accounts[3].news["why"] = "ValueError: no"
    found = findings(accounts)
    assert found[0] == "process 2 has not come to this mylib.watch"
    assert found[1].startswith("process 1 has not been heard of for 8 s")
    assert found[2] == "process 3 has left this mylib.watch by ValueError: no"
    assert found[3] == "process 3 is 3 calls behind process 0: it is at train.py:3"

"""What becomes of a test whose processes end differently: this process plays two of them."""

import json

import pytest
from _pytest.runner import runtestprotocol

from mylib._testing.pool import Outcome, Result
from mylib._testing.report import Merger

PLAYED = """
import os, sys
import pytest

def me():
    return int(os.environ["PLAYED"])

def test_one_fails_and_the_other_passes():
    assert me() == 0, "only process 1"

def test_one_is_skipped():
    if me() == 1:
        pytest.skip("only here")

def test_one_asks_to_exit():
    if me() == 1:
        sys.exit(5)

@pytest.mark.xfail(reason="known")
def test_one_fails_as_expected():
    assert me() == 0

@pytest.fixture
def broken_beginning():
    if me() == 1:
        raise RuntimeError("the beginning fails in one")

def test_one_fails_at_the_beginning(broken_beginning):
    pass

def test_one_dies():
    pass

def test_one_waits():
    pass
"""


class Played:
    """Runs each test twice, and merges the reports."""

    def __init__(self, monkeypatch):
        self.merged = {}
        self._monkeypatch = monkeypatch

    def pytest_runtestloop(self, session):
        for item in session.items:
            outcomes = [self._outcome(item, index) for index in range(2)]
            result = Result(outcomes, timed_out="waits" in item.name)
            merger = Merger(item, result, timeout=2.0, grace=1.0, start=0.0)
            self.merged[item.name] = merger.reports()
        return True

    def _outcome(self, item, index):
        if "dies" in item.name and index == 1:
            return Outcome(index, failed_at=1.0, status=3, output="last words\n")
        if "waits" in item.name and index == 0:
            return Outcome(
                index, stack="Thread 1:\n\nThread 2 (most recent call first):\n  in meet"
            )
        self._monkeypatch.setenv("PLAYED", str(index))
        reports = runtestprotocol(item, log=False)
        failed_at = 0.0 if any(report.failed for report in reports) else None
        hook = item.config.hook.pytest_report_to_serializable
        said = [hook(config=item.config, report=report) for report in reports]
        return Outcome(index, json.loads(json.dumps(said)), finished=True, failed_at=failed_at)


@pytest.fixture
def merged(pytester, monkeypatch):
    pytester.makepyfile(test_played=PLAYED)
    played = Played(monkeypatch)
    pytester.inline_run("-p", "no:cacheprovider", plugins=[played])
    return played.merged


CALLS = {
    "test_one_fails_and_the_other_passes": "failed",
    "test_one_is_skipped": "failed",
    "test_one_asks_to_exit": "failed",
    "test_one_fails_as_expected": "skipped",
    "test_one_dies": "failed",
    "test_one_waits": "failed",
}
FIRST_LINES = {
    "test_one_fails_and_the_other_passes": "process 1 of 2: AssertionError: only process 1",
    "test_one_is_skipped": "the processes disagree: process 1: Skipped: only here; but process 0",
    "test_one_asks_to_exit": "process 1 of 2: SystemExit: 5",
    "test_one_dies": "process 1 of 2 died: exit status 3",
    "test_one_waits": "process 0 of 2 had not finished after 2 s",
}


def test_processes_that_end_differently(merged):
    for name, outcome in CALLS.items():
        beginning, call, end = merged[name]
        assert (beginning.when, call.when, end.when) == ("setup", "call", "teardown")
        assert (beginning.outcome, call.outcome, end.outcome) == ("passed", outcome, "passed")
        assert hasattr(call, "wasxfail") == ("expected" in name)
        assert call.longreprtext.startswith(FIRST_LINES.get(name, "")), call.longreprtext
    assert merged.keys() - CALLS.keys() == {"test_one_fails_at_the_beginning"}


def test_one_fails_at_the_beginning(merged):
    beginning, *others = merged["test_one_fails_at_the_beginning"]
    assert (beginning.when, beginning.outcome) == ("setup", "failed")
    head = "process 1 of 2: RuntimeError: the beginning fails in one"
    assert beginning.longreprtext.startswith(head), beginning.longreprtext
    # Where one has begun, the other's call is no failure of its own.
    assert [(report.when, report.outcome) for report in others] == [
        ("call", "passed"),
        ("teardown", "passed"),
    ]


def test_what_is_shown_of_each(merged):
    _, call, _ = merged["test_one_fails_and_the_other_passes"]
    assert "--- process 0 did not fail ---" in call.longreprtext
    _, call, _ = merged["test_one_dies"]
    assert "last words" in call.longreprtext
    _, call, _ = merged["test_one_waits"]
    assert "it was here" in call.longreprtext and "in meet" in call.longreprtext
    assert "Thread 1" not in call.longreprtext and "process 1 did not fail" in call.longreprtext

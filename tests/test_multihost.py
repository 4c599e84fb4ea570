"""The pytest plugin: what a session reports of tests that run in several processes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Sessions of a few processes each, on machines that are busy.
pytestmark = pytest.mark.timeout(400)

# Writes down every report, with all that would be shown of it.
RECORDER = """
import json, sys
sys.path.insert(0, {tests!r})

def pytest_configure(config):
    global controls
    controls = config.pluginmanager.hasplugin("terminalreporter")

def pytest_runtest_logreport(report):
    if not controls:
        return
    with open("reports.jsonl", "a") as file:
        shown = dict(
            test=report.nodeid.split("::")[1], when=report.when, outcome=report.outcome,
            text=report.longreprtext, sections=[list(s) for s in report.sections],
            wasxfail=getattr(report, "wasxfail", None), seconds=report.duration,
            subtest=hasattr(report, "context"),
        )
        file.write(json.dumps(shown) + "\\n")

def pytest_sessionfinish():
    # The session itself must not take the devices.
    from jax._src import xla_bridge
    assert not controls or not xla_bridge.backends_are_initialized()
"""


@pytest.fixture(scope="module")
def env(checkout_env) -> dict[str, str]:
    """Without what is meant for the tests of this session."""
    ours = ("XLA_FLAGS", "NPROC", "PYTEST_CURRENT_TEST", "PYTEST_ADDOPTS")
    return {name: value for name, value in checkout_env.items() if name not in ours}


class Session:
    """A finished session of pytest."""

    def __init__(self, folder: Path, done: subprocess.CompletedProcess) -> None:
        self.text = done.stdout
        self.status = done.returncode
        path = folder / "reports.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        self.reports = [json.loads(line) for line in lines]
        self.children = folder / "children"

    def outcome(self, test: str) -> str:
        """What pytest would show of a test, in one word."""
        reports = [r for r in self.reports if r["test"] == test and not r["subtest"]]
        for report in reports:
            if report["when"] != "call" and report["outcome"] == "failed":
                return f"error at {report['when']}"
        (last,) = [r for r in reports if r["when"] == "call"] or reports[:1]
        if last["wasxfail"] is not None:
            return {"skipped": "xfailed", "passed": "xpassed"}.get(last["outcome"], "failed")
        return last["outcome"]

    def said(self, test: str) -> str:
        return "\n".join(r["text"] for r in self.reports if r["test"] == test)

    def seconds(self, test: str) -> float:
        return sum(r["seconds"] for r in self.reports if r["test"] == test)

    def sections(self, test: str) -> dict[str, str]:
        return {
            name: text for r in self.reports if r["test"] == test for name, text in r["sections"]
        }


def run(folder: Path, env: dict[str, str], *arguments: str, timeout: float = 300) -> Session:
    (folder / "conftest.py").write_text(RECORDER.format(tests=str(HERE)))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env={**env, "CHILDREN": str(folder / "children")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    return Session(folder, done)


@pytest.fixture(scope="module")
def faults(tmp_path_factory, env) -> Session:
    folder = tmp_path_factory.mktemp("faults")
    (folder / "test_faults.py").write_text((HERE / "_faults.py").read_text())
    return run(folder, env, "-o", "multihost_grace=1", "-W", "default")


OUTCOMES = {
    "test_passes": "passed",
    "test_with_parameters[3]": "passed",
    "test_with_parameters[4]": "passed",
    "test_draws_the_same_everywhere": "passed",
    "test_says_what_it_prints": "failed",
    "test_warns": "passed",
    "test_skipped_by_all": "skipped",
    "test_fails_in_all_as_expected": "xfailed",
    "test_passes_against_expectation": "xpassed",
    "test_passes_against_strict_expectation": "failed",
    "test_fails_at_the_end": "error at teardown",
    "test_subtests": "failed",
    "test_is_asserted_with_values": "failed",
    "test_one_fails_and_the_other_passes": "failed",
    "test_one_raises_and_the_other_waits_for_it": "failed",
    "test_one_is_skipped": "failed",
    "test_one_fails_as_expected": "xfailed",
    "test_one_fails_at_the_beginning": "error at setup",
    "test_processes_disagree": "passed",
    "test_one_leaves_something_running": "error at teardown",
    "test_passes_after_that": "passed",
    "test_one_changes_a_setting": "error at teardown",
    "test_all_change_a_setting": "passed",
    "test_one_exits": "failed",
    "test_one_asks_to_exit": "failed",
    "test_one_is_killed": "failed",
    "test_one_segfaults": "failed",
    "test_the_coordinator_is_killed": "failed",
    "test_one_sleeps": "failed",
    "test_one_spins": "failed",
    "test_one_waits_in_a_collective": "failed",
    "test_one_stops_answering": "failed",
    "test_one_crashes_as_expected": "xfailed",
    "test_hangs_as_expected": "xfailed",
    "test_the_mark_wins_over_pytest_timeout": "passed",
    "test_pytest_timeout_is_heeded": "failed",
    "test_mesh[mesh0]": "passed",
    "test_mesh[mesh1]": "passed",
    "test_mesh[mesh2]": "skipped",
    "test_mesh_by_default": "passed",
    "test_second_backend": "passed",
    "test_clean_distributed": "passed",
    "test_clean_distributed_of_shared_processes": "failed",
    "test_environment": "passed",
    "test_passes_last": "passed",
}


class TestOutcomes:
    @pytest.mark.parametrize("test", OUTCOMES)
    def test_of(self, faults, test):
        assert faults.outcome(test) == OUTCOMES[test], faults.said(test) or faults.text

    def test_none_is_forgotten(self, faults):
        assert {r["test"] for r in faults.reports} == set(OUTCOMES)
        assert faults.status == 1, faults.text

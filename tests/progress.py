"""How far a run of all tests is, and how long it takes: a line at the start, and one a minute."""

import time
from collections.abc import Sequence

import pytest

EVERY = 60
"""Seconds between two lines."""


class Progress:
    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session
        self._start = self._told = time.monotonic()
        self._tests = self._ended = 0
        self._tell(
            "The tests take five to ten minutes on two idle cores, less from the second run on."
        )
        self._tell("They are collected first. Then a line a minute says how far they are.")

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self._collected(len(ids))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected(len(session.items))

    def _collected(self, tests: int) -> None:
        # Each worker of pytest-xdist collects all of them.
        if tests and not self._tests:
            self._tests, self._told = tests, time.monotonic()
            minutes = (self._told - self._start) / 60
            self._tell(f"{tests} tests, collected in {minutes:.1f} min; the longest come first.")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._ended += report.when == "teardown"
        now = time.monotonic()
        if now - self._told >= EVERY:
            self._told = now
            self._tell(line(self._ended, self._tests, now - self._start))

    def _tell(self, text: str) -> None:
        terminal = self._session.config.pluginmanager.get_plugin("terminalreporter")
        terminal.ensure_newline()
        terminal.write_line(text)


def line(ended: int, tests: int, seconds: float) -> str:
    """`300 of 3000 tests (10%) after 2 min; at this rate 18 min are left`"""
    text = f"{ended} of {tests} tests ({ended / tests:.0%}) after {seconds / 60:.0f} min"
    if not ended:
        return text
    return f"{text}; at this rate {seconds / 60 * (tests / ended - 1):.0f} min are left"

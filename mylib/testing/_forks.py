"""Handles tests that call `os.fork()` without `os._exit()`: their child returns into pytest."""

import os
from typing import Any

import pytest

_LENGTH = 4096


class Forks:
    """Ends such a child, and makes the parent's test fail."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Any:
        self.end_a_child(item.nodeid)
        report = yield
        text = self._message()
        if text and not report.failed:
            report.outcome, report.longrepr = "failed", text
        elif text:
            report.sections.append(("A forked process", text))
        return report

    def end_a_child(self, test: str) -> None:
        """Ends the child process: pytest must not continue in it, because it would send messages in
        its parent's name.
        """
        if os.getpid() == self._process:
            return
        text = (
            f"{test} has called os.fork(), and its child process has returned from the test into "
            "pytest. End the child in the test: os._exit(0)"
        )
        os.write(self._write, text.encode()[:_LENGTH])
        os._exit(1)

    def _message(self) -> str:
        try:
            return os.read(self._read, _LENGTH).decode(errors="replace")
        except BlockingIOError:
            return ""

"""A standard output that is a terminal of any width."""

import contextlib
import sys
from collections.abc import Iterator

import pytest
from _pages import Terminal


@contextlib.contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> Iterator[None]:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", Terminal())
    yield

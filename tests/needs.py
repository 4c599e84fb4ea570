"""Tests that need what may not be installed."""

from typing import NoReturn

import pytest


def skip_unless_required(config: pytest.Config, option: str, reason: str) -> NoReturn:
    """Skips a test, for this reason; fails it if an option such as `--require-browser` is given."""
    if config.getoption(option):
        pytest.fail(f"{option}: {reason}")
    pytest.skip(reason)

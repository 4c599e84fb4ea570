"""pytest-rerunfailures for tests in several processes: reruns a test in all of them."""

import time
from collections.abc import Sequence
from typing import Any

import pytest


class Reruns:
    """Decides whether a failed test runs again. With the plugin alone, each process would decide
    for itself.
    """

    def __init__(self, item: pytest.Item) -> None:
        self._item: Any = item
        self._plugin: Any = item.config.pluginmanager.getplugin("rerunfailures")
        excluded = item.config.getoption("rerun_exclude_path", None) or []
        if any(item.path.is_relative_to(item.config.rootpath / path) for path in excluded):
            self._plugin = None
        self._most = self._plugin.get_reruns_count(item) if self._plugin else None
        self._done = 0

    def again(self, reports: Sequence[pytest.TestReport], final: bool) -> pytest.TestReport | None:
        """The report of an attempt that is followed by another, instead of `reports`; None if it
        was the last one. `final`: its failure must not be retried.
        """
        if self._most is None:
            return None
        for report in reports:
            report.rerun = self._done  # pyright: ignore[reportAttributeAccessIssue]
        self._done += 1
        # The plugin's `--fail-on-flaky` reads it.
        self._item.execution_count = self._done
        # A failed subtest is also a failure of its test.
        failed = [r for r in reports if r.failed and not hasattr(r, "context")]
        if final or not failed or self._done > self._most:
            return None
        if not self._plugin.get_reruns_condition(self._item) or not self._session_allows_it():
            return None
        # Not in older versions.
        factor_of = getattr(self._plugin, "get_reruns_delay_backoff_factor", lambda item: 1.0)
        factor = factor_of(self._item) ** (self._done - 1)
        time.sleep(self._plugin.get_reruns_delay(self._item) * factor)
        failed[0].outcome = "rerun"  # pyright: ignore[reportAttributeAccessIssue]
        return failed[0]

    def _session_allows_it(self) -> bool:
        most = self._item.config.getoption("max_suite_reruns", None)
        return most is None or self._item.config.failures_db.try_increment_suite_reruns(most)


def is_final(item: pytest.Item) -> bool:
    """Whether `--only-rerun` or `--rerun-except` exclude a test's failure in this process from
    reruns. The plugin records it in each process.
    """
    return any(getattr(item, "_terminal_errors", {}).values())

"""pytest-cov for tests in several processes: `--cov` measures the processes, too.

pytest-cov handles only this session and the workers of xdist. Here each process measures itself,
with the session's options, into a temporary folder; the session adds those files to its own data
before pytest-cov reports. No files of processes appear in the user's folder.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._group import Guard

if TYPE_CHECKING:  # `launch` works without pytest
    import pytest

# With these variables coverage.py's `patch = subprocess` measures subprocesses.
VARIABLES = ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG")


class Coverage:
    """The session's side."""

    def __init__(self, config: "pytest.Config", guard: Guard) -> None:
        plugin: Any = config.pluginmanager.getplugin("_cov")
        # None without `--cov`, or with `--no-cov`.
        self._session: Any = getattr(getattr(plugin, "cov_controller", None), "cov", None)
        self.settings: dict[str, Any] | None = None
        if self._session is None:
            return
        self._folder = Path(tempfile.mkdtemp(prefix="mylib-coverage-"))
        # Which removes it at the end of the session.
        guard.tell(f"{self._folder}")
        self.settings = {
            "data_file": str(self._folder / "data"),
            "config_file": plugin.options.cov_config,
            "source": self._session.get_option("run:source"),
            "branch": self._session.get_option("run:branch"),
        }

    def collect(self) -> None:
        """Adds the processes' measurements to the session's data, with a warning for each file that
        a process was killed while writing.
        """
        if self._session is not None:
            # Without any files it would look for those of the user.
            if files := [str(path) for path in self._folder.glob("data.*")]:
                self._session.combine(files)


def measure(settings: dict[str, Any] | None) -> Callable[[], None]:
    """A process's side. Returns what ends it."""
    if settings is None:
        return lambda: None
    import coverage

    measured = coverage.Coverage(data_suffix=True, **settings)
    # No process runs everything, so only the session reports missing lines.
    measured.set_option(
        "run:disable_warnings", ["no-data-collected", "module-not-imported", "already-imported"]
    )
    measured.start()

    def end() -> None:
        measured.stop()
        measured.save()

    return end

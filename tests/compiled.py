"""What tests have compiled is kept in pytest's own cache, so that the next run need not compile it.

JAX finds a program by its text, the versions and the flags, so a stale one is never used.
`pytest --cache-clear` deletes all of them.
"""

import contextlib
import os
import platform
import shutil
import tempfile
import time
from pathlib import Path

import jax
import pytest

_LONG = 14 * 24 * 60 * 60  # seconds
_SETTINGS = {
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    # Else the name of the folder would be a part of what a program is found by.
    "jax_persistent_cache_enable_xla_caches": "none",
}


class Compiled:
    """A process reads and writes a folder of its own, as JAX doesn't write a file in one step. What
    earlier runs have kept is in it, as links.
    """

    def __init__(self, cache: pytest.Cache) -> None:
        # Machine code is for the processor that compiled it.
        folder = cache.mkdir("compiled") / platform.node()
        self._kept = folder / "kept"
        self._kept.mkdir(parents=True, exist_ok=True)
        _delete_old(folder)
        self._own = Path(tempfile.mkdtemp(prefix="run-", dir=folder))
        _link_all(self._kept, self._own)
        for name, value in _SETTINGS.items():
            jax.config.update(name, value)
        jax.config.update("jax_compilation_cache_dir", str(self._own))

    def env(self) -> dict[str, str]:
        """The same for a script. Not for one that starts processes, as several at a time must not
        share a folder.
        """
        env = {name.upper(): str(value) for name, value in _SETTINGS.items()}
        return env | {"JAX_COMPILATION_CACHE_DIR": str(self._own)}

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        # After a failure a file may be half written: a script that takes too long is killed.
        if exitstatus == pytest.ExitCode.OK:
            _link_all(self._own, self._kept)

    def pytest_unconfigure(self) -> None:
        shutil.rmtree(self._own, ignore_errors=True)


def _link_all(source: Path, target: Path) -> None:
    for path in source.iterdir():
        # Another process may have kept or deleted the same program.
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            os.link(path, target / path.name)


def _delete_old(folder: Path) -> None:
    """Programs that were compiled long ago, and what a run that was killed has left."""
    for path in [*folder.glob("kept/*"), *folder.glob("run-*")]:
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _LONG:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

"""Changes to a session of pytest that is one of several that run the same tests."""

import os
import socket

import jax
import pytest
from _pytest import runner


class OneOfSeveral:
    """Runs each test once, and without its own time limit; and ends children that tests have forked
    and that return into pytest.
    """

    def __init__(self) -> None:
        self._process = os.getpid()

    def pytest_configure(self, config: pytest.Config) -> None:
        if config.pluginmanager.hasplugin("hypothesispytest"):
            from hypothesis import settings

            # A database, or a deadline, would give processes different examples.
            settings.register_profile(
                "mylib.testing", settings.default, derandomize=True, database=None, deadline=None
            )
            settings.load_profile("mylib.testing")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        # Before plugins that rerun a test or fork a process for it: they would do so in one of the
        # processes, without the others.
        return runner.pytest_runtest_protocol(item, nextitem)

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_set_timer(self) -> bool:
        # pytest-timeout would end one process. The limit is enforced where all can be inspected.
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self) -> None:
        self.end_a_child()

    def end_a_child(self) -> None:
        """Ends the child process: pytest must not continue in it, because it would send messages in
        its parent's name.
        """
        if os.getpid() != self._process:
            os._exit(1)


def make_devices() -> None:
    """Makes JAX's devices, with which all processes meet."""
    try:
        jax.devices()
    except RuntimeError as error:
        name = socket.gethostname()
        error.add_note(
            f"If gloo has failed, this machine may not be able to resolve its own name, {name!r}: "
            f'echo "127.0.0.1 {name}" >> /etc/hosts'
        )
        raise

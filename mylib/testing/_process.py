"""Changes to a session of pytest that is one of several that run the same tests."""

import os
import socket
from typing import Any

import jax
import pytest
from _pytest import runner

from .._compat import names

# PIPE_BUF on Linux: a pipe takes this many bytes at once, so that messages are not mixed.
_LENGTH = 4096


class OneOfSeveral:
    """Runs each test once, and without its own time limit; and ends children that tests have forked
    and that return into pytest, and makes their tests fail.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

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


def make_devices() -> str | None:
    """Makes JAX's devices, with which all processes meet. Returns the cause and the remedy if this
    machine's name can't be resolved, which the CPU's collectives need.
    """
    try:
        jax.devices()
    except RuntimeError as error:
        name = socket.gethostname()
        if names.TEXT_GLOO not in str(error):
            raise
        try:
            socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as cause:
            return (
                f"this machine can't resolve its own name, {name!r} ({cause}). JAX's collectives "
                "on the CPU (gloo) listen at the address of that name. Add it to /etc/hosts: "
                f'echo "127.0.0.1 {name}" >> /etc/hosts. If processes on other machines take part, '
                "use this machine's address in their network instead of 127.0.0.1"
            )
        raise
    return None

"""A pytest session that a cluster has started, with the same command, in each of several processes.

All sessions run the marked tests together, and exchange the results after each phase of a test:
their reports are equal, so they also stop at the same test. Processes can't be restarted here. When
one does not answer, the whole session ends.
"""

import faulthandler
import json
import os
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import jax
import pytest

from .._core.compat import value_at
from .._moving.processes import AbsentError, connected, everybody, gather_messages, named
from .controller import is_marked, request_for, seconds
from .pool import Outcome, Result
from .process import OneOfSeveral, make_devices
from .report import Merger, Text, report_of, stack_of

_ABORT, _SUMMARY = "mylib/member/abort", "mylib/member/summary"
# Not one of pytest's own.
_ABORTED = 70
# Seconds that the others have to report a phase, beyond the limit of the test.
_SLACK = 30.0
# And process 0 has to write what has happened, before all end.
_WRITES = 10.0


class _ApartError(Exception):
    """The processes do not run the same test."""


class Member:
    def __init__(self) -> None:
        if not jax.distributed.is_initialized():
            try:
                jax.distributed.initialize()
            except ValueError as error:
                raise pytest.UsageError(
                    f"--multihost=member: JAX finds no other processes ({error}). Start pytest on "
                    "each host of a job (srun, mpirun, a TPU pod), or with "
                    "python -m mylib.testing launch"
                ) from error
        self._number = 0
        self._running: tuple[pytest.Item, float] | None = None
        self._ended = threading.Event()
        # Held by the thread that ends this process.
        self._dying = threading.Lock()

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        self._config = config
        config.pluginmanager.register(OneOfSeveral())
        # All processes exchange their devices here, at the same time.
        make_devices()
        self._me, self._count = jax.process_index(), jax.process_count()
        self._timeout = seconds(config, "multihost_timeout")
        self._grace = seconds(config, "multihost_grace")
        self._header = self._gather("header", _where(), self._timeout)
        if self._me:
            # Process 0 prints the same.
            config.pluginmanager.unregister(name="terminalreporter")
        self._watch = threading.Thread(target=self._look_out, daemon=True)
        self._watch.start()

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    def pytest_report_header(self) -> list[str]:
        return [f"multihost: {line}" for line in self._header]

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        others = [item for item in items if not is_marked(item)]
        if others and self._count > 1:
            # All processes would run them at the same time, with the same files.
            self._config.hook.pytest_deselected(items=others)
            items[:] = [item for item in items if is_marked(item)]
        for item in items:
            reason = is_marked(item) and self._why_not(item)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))

    def _why_not(self, item: pytest.Item) -> str | None:
        """The reason why these processes can't run a test."""
        request = request_for(item)
        for what, needed, available in (
            ("processes", request.processes, self._count),
            ("devices a process", request.devices_per_process, jax.local_device_count()),
        ):
            if needed not in (None, available):
                return f"needs {needed} {what}, this job has {available}"
        on = "cuda" if jax.default_backend() == "gpu" else jax.default_backend()
        if request.platform not in (None, on):
            return f"is for {request.platform}, this job is on {on}"
        if request.fresh or request.env:
            return "needs processes of its own, but these were started by the cluster"
        return None

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        names = [item.nodeid for item in session.items]
        collected = self._gather("collected", names, self._timeout)
        for index, theirs in enumerate(collected):
            if theirs != names:
                differing = sorted(set(theirs) ^ set(names)) or ["the same ones, in another order"]
                raise pytest.UsageError(
                    f"process {index} has collected other tests than process {self._me}: "
                    + ", ".join(differing[:5])
                )

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._number += 1
        self._reports = 0
        limit = request_for(item).timeout if is_marked(item) else None
        self._running = item, time.monotonic() + (limit or self._timeout)
        try:
            return (yield)
        finally:
            self._running = None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Any:
        report = yield
        if self._count == 1 or self._running is None:
            return report
        hook = self._config.hook
        mine = hook.pytest_report_to_serializable(config=self._config, report=report)
        left = self._running[1] - time.monotonic() + _SLACK
        patience = self._grace if report.failed else left
        try:
            # A phase with subtests has several reports.
            self._reports += 1
            everybodys = self._gather(f"{self._number}/{self._reports}", mine, patience)
        except _ApartError as error:
            if not report.failed:
                self._abort(f"{item.nodeid}: {error}")
            self._abort(f"{item.nodeid} failed here, and {error}\n{report.longreprtext}")
        outcomes = [
            Outcome(i, [r], finished=True, failed_at=0.0 if r["outcome"] == "failed" else None)
            for i, r in enumerate(everybodys)
        ]
        result = Result(outcomes, timed_out=False)
        merger = Merger(item, result, timeout=None, grace=self._grace, start=call.start)
        (group,) = merger.by_phase()
        return merger.merge(group)

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Ends the others, too, after Ctrl-C or `pytest.exit` here: they would wait."""
        if self._count > 1:
            self._abort(f"pytest was asked to stop: {excinfo.exconly()}")

    def _gather(self, where: str, mine: Any, timeout: float) -> list[Any]:
        """The values of all processes at this point of the session."""
        mine = [where, json.dumps(mine, default=str)]
        try:
            messages = gather_messages("session", mine, everybody(), timeout=timeout)
        except AbsentError as error:
            raise _ApartError(
                f"{named(error.missing)} had not reached this point after {timeout:g} s"
            ) from error
        elsewhere = {index: theirs for index, (theirs, _) in enumerate(messages) if theirs != where}
        if elsewhere:
            raise _ApartError(f"the processes are not at the same point: {elsewhere}, not {where}")
        return [json.loads(text) for _, text in messages]

    # --- the end --------------------------------------------------------------------------------

    def _look_out(self) -> None:
        """Runs in a thread: ends this process if another one has ended the session, or if a test
        takes too long.
        """
        client = connected()
        while not self._ended.wait(0.2):
            try:
                reason = value_at(client, _ABORT)
            except jax.errors.JaxRuntimeError:
                return  # The coordinator is gone, and JAX ends this process itself.
            if reason is not None:
                self._die(reason)
            running = self._running
            if running is not None and time.monotonic() > running[1] + self._grace:
                self._abort(f"{running[0].nodeid} has not finished within its limit")

    def _abort(self, reason: str) -> NoReturn:
        connected().key_value_set(_ABORT, f"process {self._me}: {reason}", True)
        self._die(f"process {self._me}: {reason}")

    def _die(self, reason: str) -> NoReturn:
        self._dying.acquire()
        capture: Any = self._config.pluginmanager.getplugin("capturemanager")
        if capture is not None:
            capture.suspend_global_capture(in_=True)
        heading, stack = f"process {self._me} of {self._count} is here", _my_stack()
        lines = f"\nmultihost: the session ends. {reason}", f"--- {heading} ---", stack
        with suppress(OSError, ValueError):  # a test may have closed it
            print(*lines, sep="\n", file=sys.__stderr__, flush=True)
        with suppress(jax.errors.JaxRuntimeError):  # the service may be gone
            if self._me == 0:
                # This thread may be the one that tests run in.
                finish = threading.Thread(target=self._finish, args=(reason, stack))
                finish.daemon = True
                finish.start()
                finish.join(_WRITES)
                connected().key_value_set(_SUMMARY, "written", True)
                # When the coordinator ends, the others end, too, and they have output to print.
                time.sleep(1.0)
            else:
                # Clusters end process 0 as well, as soon as this one has ended.
                connected().blocking_key_value_get(_SUMMARY, int(1000 * _WRITES))
        os._exit(_ABORTED)

    def _finish(self, reason: str, stack: str) -> None:
        """Reports the test that has not ended, and lets plugins write what they know of all tests:
        the summary, the JUnit file, and which have failed.
        """
        hook, manager = self._config.hook, self._config.pluginmanager
        if self._running is not None:
            text = Text(reason.splitlines()[0], [("process 0 was here", stack)])
            report = report_of(self._running[0], "call", "failed", text, start=time.time())
            hook.pytest_runtest_logreport(report=report)
        # Without pytest's own tear-down: the fixtures are in use.
        others = manager.subset_hook_caller("pytest_sessionfinish", [manager.getplugin("runner")])
        others(session=self._session, exitstatus=pytest.ExitCode.TESTS_FAILED)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        self._ended.set()
        if hasattr(self, "_watch"):
            self._watch.join(5)
        jax.distributed.shutdown()

    def shared_folder(self, mine: Path) -> Path:
        """Process 0's folder, if it exists on all hosts."""
        first = Path(self._gather(f"{self._number}/folder", str(mine), self._timeout)[0])
        if not all(self._gather(f"{self._number}/seen", first.is_dir(), self._timeout)):
            pytest.fail(
                f"{first} does not exist on all hosts: set TMPDIR to a folder that they share"
            )
        return first


def _my_stack() -> str:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file=file)
        file.seek(0)
        return stack_of(file.read())


def _where() -> str:
    return (
        f"process {jax.process_index()} of {jax.process_count()} on {socket.gethostname()}, with "
        f"{jax.local_device_count()} of {jax.device_count()} devices ({jax.default_backend()})"
    )

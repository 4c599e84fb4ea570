"""Runs in each of the processes that run a test together.

Each is an ordinary pytest session, so that fixtures, parameters, rewritten assertions and plugins
work; but it receives the tests to run from the pool, and sends it the reports.
"""

import atexit
import contextlib
import faulthandler
import gc
import json
import os
import pdb
import signal
import socket
import sys
import time
import traceback
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import get_abstract_mesh

from .._moving.processes import everybody, gather_messages
from .process import OneOfSeveral, make_devices

# The pool gives up earlier.
_JOIN = 600
# After failed tests JAX's default would cost five minutes.
_LEAVE = 30
# The most output of one phase of a test that is passed on.
_PRINTED = 100_000


class Worker:
    """Executes the commands of the pool (`_pool.py`)."""

    def __init__(self, channel: int) -> None:
        os.set_inheritable(channel, False)
        self._channel = Connection(channel)
        beginning = self._next_message()
        self._as_all = OneOfSeveral()
        self._index: int = beginning["index"]
        self._folder = Path(beginning["folder"])
        self._number = 0
        self._beginning = beginning
        self._following: str | None = None
        self._ready = self._left = False
        self._printed = (0, 0)
        self._files = [
            os.open(self._folder / f"{self._index}.{end}", os.O_RDWR) for end in ("out", "err")
        ]
        # Stacks go to stderr after a fatal signal, and to a file on request.
        faulthandler.enable(file=sys.__stderr__ or 2, all_threads=True)
        stack = (self._folder / f"{self._index}.stack").open("w")
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        self.another_coordinator: str = beginning["another coordinator"]
        _join(beginning["coordinator"], beginning["processes"], self._index)

    def _next_message(self) -> dict[str, Any]:
        try:
            return json.loads(self._channel.recv_bytes())
        except (EOFError, OSError):
            # The parent process is gone.
            os._exit(1)

    def say(self, what: str, **more: object) -> None:
        self._as_all.end_a_child()
        try:
            self._channel.send_bytes(json.dumps({"say": what, **more}, default=str).encode())
        except OSError:
            os._exit(1)

    # --- pytest's hooks -------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        self._config = config
        vars(config.option).update(self._beginning["options"])
        config.pluginmanager.register(self._as_all)

    def pytest_sessionstart(self) -> None:
        # After the conftest.py files, which may configure backends, and before the tests are
        # imported, which may use them. All processes must do it.
        make_devices()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.say("ready", trouble=f"collection failed\n{report.longreprtext}")

    def pytest_collection_finish(self) -> None:
        # Imported modules and collected tests never become garbage.
        gc.freeze()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        self._ready = True
        # From here on a setting must not change in only one process.
        self._settings = _settings()
        self.say("ready")
        while (order := self._next_message())["do"] != "end":
            if order["do"] == "step":
                self.say("step", trouble=self._out_of_step(order["timeout"]))
            else:
                self._run_ordered(session, items, order)
        return True

    def _run_ordered(
        self, session: pytest.Session, items: dict[str, pytest.Item], order: dict[str, Any]
    ) -> None:
        self._number = order["number"]
        item, following = items.get(order["test"]), items.get(order["following"] or "")
        trouble = stop = None
        self._printed = self._end_of_files()
        self.say("started", printed=self._printed)
        if item is None:
            trouble = f"this test was not collected there: {order['test']}"
        else:
            if self._following not in (None, item.nodeid):
                # Not the announced test (a plugin has chosen another one): tear down the fixtures
                # kept for the announced one. There is no public API for it.
                session._setupstate.teardown_exact(None)  # pyright: ignore[reportPrivateUsage]
            self._following = None if following is None else following.nodeid
            try:
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            except pytest.exit.Exception as error:
                stop = f"called pytest.exit: {error}", error.returncode
            except KeyboardInterrupt:
                stop = f"was interrupted\n{traceback.format_exc()}", None
            except Exception:
                trouble = traceback.format_exc()
        # Everything has been reported, and these processes may run a thousand tests.
        for file in self._files:
            os.truncate(file, 0)
        self.say("done", trouble=trouble, stop=stop)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        end = self._end_of_files()
        # A subtest's output belongs to its test.
        if not hasattr(report, "context"):
            for file, name, start, stop in zip(
                self._files, ("stdout", "stderr"), self._printed, end, strict=True
            ):
                if stop > start:
                    size = min(stop - start, _PRINTED)
                    text = os.pread(file, size, stop - size).decode(errors="replace")
                    if stop - start > size:
                        text = f"({stop - start - size} bytes are left out here)\n{text}"
                    report.sections.append((f"Captured {name} {report.when}", text))
            self._printed = end
        hook = self._config.hook
        data = hook.pytest_report_to_serializable(config=self._config, report=report)
        self.say("report", report=data, printed=end)

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: object
    ) -> None:
        if when == "runtest":
            category = warning_message.category
            self.say(
                "warning",
                warning={
                    "text": str(warning_message.message),
                    "module": category.__module__,
                    "category": category.__qualname__,
                    "file": warning_message.filename,
                    "line": warning_message.lineno,
                    "test": nodeid,
                },
            )

    def pytest_exception_interact(
        self, node: object, call: pytest.CallInfo[Any], report: pytest.TestReport
    ) -> None:
        debugs = self._beginning["debug"] and isinstance(node, pytest.Item)
        if debugs and call.excinfo is not None:
            self.say("debugger?")
            if self._next_message()["debug"]:
                self._interact(call.excinfo, report)

    def _interact(self, excinfo: pytest.ExceptionInfo[Any], report: pytest.TestReport) -> None:
        reads, writes = self._beginning["terminal"]
        screen = open(writes, "w", closefd=False, buffering=1)
        screen.write(f"\n{report.longreprtext}\n\n")
        # Without a buffer: other processes read from the terminal, too.
        file = os.fdopen(reads, "rb", buffering=0, closefd=False)
        keys: Any = SimpleNamespace(readline=lambda: file.readline().decode(errors="replace"))
        debugger = pdb.Pdb(stdin=keys, stdout=screen, nosigint=True)
        debugger.use_rawinput = False
        debugger.prompt = f"(Pdb, process {self._index}) "
        debugger.reset()
        debugger.interaction(None, excinfo.tb)

    def shared_folder(self) -> Path:
        """A folder for the current test, the same in all processes."""
        shared = self._folder / f"shared{self._number}"
        shared.mkdir(exist_ok=True)
        return shared

    # --- between tests --------------------------------------------------------------------------

    def _out_of_step(self, timeout: float) -> str | None:
        if not jax.distributed.is_initialized():
            if self._left:
                # This was the last test of this process.
                return None
            return "the test has called jax.distributed.shutdown(). Mark it fresh=True"
        try:
            everybodys = gather_messages("settings", self._changed(), everybody(), timeout=timeout)
            if any(theirs != everybodys[0] for theirs in everybodys):
                changes = "; ".join(
                    f"process {i}: {', '.join(x)}" for i, x in enumerate(everybodys) if x
                )
                return f"the test has changed settings in some processes only: {changes}"
            return self._pending()
        except (jax.errors.JaxRuntimeError, TimeoutError) as error:
            return f"the check failed: {error}"

    def _changed(self) -> dict[str, str]:
        """The settings that have changed since before the first test."""
        changed = {k: v for k, v in _settings().items() if self._settings.get(k, v) != v}
        # Devices differ between processes.
        return {k: "a device" if isinstance(v, jax.Device) else str(v) for k, v in changed.items()}

    def _pending(self) -> str | None:
        """Checks for a collective left behind by the test: it would be mistaken for this one, in
        which each process sends a new value.
        """
        mine = np.array([self._number, self._index], np.int32)
        # All processes may have changed this setting.
        with jax.disable_jit(False):
            got = np.asarray(multihost_utils.process_allgather(mine)).tolist()
        expected = [[self._number, index] for index in range(jax.process_count())]
        return None if got == expected else f"a collective returned {got} instead of {expected}"

    def leave(self) -> None:
        """Disconnects from the other processes, if connected."""
        self._left = True
        if jax.distributed.is_initialized():
            # All wait for all, so that the coordinator doesn't vanish early.
            jax.distributed.shutdown()

    def _end_of_files(self) -> tuple[int, int]:
        _flush()
        out, err = (os.fstat(file).st_size for file in self._files)
        return out, err

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        if not self._ready:
            # pytest prints a message about it, after everything has been torn down.
            atexit.register(_end, 1)
            return
        trouble = None
        try:
            self.leave()
        except jax.errors.JaxRuntimeError as error:
            trouble = f"leaving the others failed: {error}"
        self.say("end", trouble=trouble)
        _end(0)


def _end(status: int) -> None:
    # JAX's exit handlers would wait for the others once more.
    _flush()
    os._exit(status)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # Tests may have closed them, or put None in their place.
        if stream is not None and not stream.closed:
            with contextlib.suppress(OSError):
                stream.flush()


def _join(coordinator: str, processes: int, index: int) -> None:
    if index:
        _wait_for(coordinator)
    jax.distributed.initialize(
        coordinator,
        processes,
        index,
        # If the tests run in a cluster's job, its variables don't describe these processes.
        cluster_detection_method="deactivate",
        # The default would listen on all networks of the machine.
        coordinator_bind_address=coordinator,
        initialization_timeout=_JOIN,
        shutdown_timeout_seconds=_LEAVE,
    )


def _wait_for(address: str) -> None:
    """Waits until a process listens at the address. Connecting to JAX's coordinator too early costs
    a second.
    """
    host, port = address.rsplit(":", 1)
    deadline = time.monotonic() + _JOIN
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((host, int(port)), timeout=1):
                return
        except OSError:
            time.sleep(0.01)


def _settings() -> dict[str, Any]:
    """The settings that must be equal in all processes for them to run the same programs."""
    mesh = get_abstract_mesh()
    return {**jax.config.values, "the mesh in force": None if mesh.empty else str(mesh)}

"""The user's pytest session: sends marked tests to processes, and reports their results."""

import dataclasses
import importlib
import json
import os
import sys
import time
import warnings
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import pytest

from .group import Guard
from .pool import NotStarted, Pool, Result, Session
from .report import Merger, report_of
from .topology import Topology, TopologyRequest, Unavailable

# The number of pools kept warm. An accelerator has memory for one.
_POOLS = {"cpu": 2}
# After this many failed starts of a topology, its other tests are not tried.
_ATTEMPTS = 2

# Options for selecting and showing tests, which don't change how a test runs.
_OWN_OPTIONS = {
    "basetemp", "cacheclear", "cacheshow", "capture", "collectonly", "deselect", "dist",
    "failedfirst", "file_or_dir", "inifilename", "keyword", "lf", "log_file", "looponfail",
    "markexpr", "maxfail", "maxprocesses", "newfirst", "numprocesses", "override_ini", "plugins",
    "rootdir", "setuponly", "setupplan", "setupshow", "stepwise", "stepwise_skip", "trace",
    "usepdb", "xmlpath",
}  # fmt: skip

_requested = pytest.StashKey[TopologyRequest]()
_limit = pytest.StashKey[float]()


class Controller:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        # Whether the process that fails first opens a debugger.
        self._debugs: bool = config.option.usepdb
        self._guard: Guard | None = None
        # In order of last use.
        self._pools: dict[Topology, Pool] = {}
        self._refused: dict[Topology, list[str]] = {}
        self._items: list[pytest.Item] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._items = [item for item in session.items if is_marked(item)]
        for name in "multihost_timeout", "multihost_grace":
            seconds(self._config, name)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> bool | None:
        if not is_marked(item):
            return None
        hook = item.ihook
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        try:
            reports = self._run_test(item, nextitem)
        except BaseException:
            # Ctrl-C, or any other end of pytest.
            self._kill_all()
            raise
        for report in [*reports, *_torn_down(item, nextitem)]:
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool | None:
        """Enforces pytest-timeout's limit here, where all processes can be inspected."""
        if not is_marked(item):
            return None
        item.stash[_limit] = settings.timeout
        return True

    def _run_test(self, item: pytest.Item, nextitem: pytest.Item | None) -> list[pytest.TestReport]:
        start = time.time()
        request = request_for(item)
        try:
            topology = request.topology(self._config.option.multihost_platform)
            pool = self._pool(topology, item if request.fresh else None)
        except Unavailable as reason:
            path, line, _ = item.location
            skip = (path, line or 0, f"Skipped: {reason}")
            return _set_up_only(item, "skipped", skip, start)
        except NotStarted as reason:
            text = f"the processes can't be had: {reason}"
            return _set_up_only(item, "failed", text, start)
        timeout = None if self._debugs else self._timeout(item, request)
        grace = float("inf") if self._debugs else seconds(self._config, "multihost_grace")
        following = None if request.fresh else self._following(item, topology, nextitem)
        result = pool.run(_name_of(item), following, timeout=timeout, grace=grace)
        if request.fresh or not result.is_pool_kept:
            del self._pools[topology]
            if result.is_pool_kept:
                pool.close()
        self._pass_on(result)
        reports = Merger(item, result, timeout=timeout, grace=grace, start=start).reports()
        if self._config.option.capture == "no":
            _print(reports)
        return reports

    def _timeout(self, item: pytest.Item, request: TopologyRequest) -> float:
        limit = request.timeout or item.stash.get(_limit, None)
        return limit or seconds(self._config, "multihost_timeout")

    def _following(
        self, item: pytest.Item, topology: Topology, nextitem: pytest.Item | None
    ) -> str | None:
        """The next test for the same processes. They keep the fixtures that it needs."""
        if hasattr(self._config, "workerinput"):
            # Under xdist only the next test is known.
            later = [nextitem] if nextitem is not None and is_marked(nextitem) else []
        else:
            later = self._items[self._items.index(item) + 1 :]
        shared = (x for x in later if self._asks_for(x, topology) and not request_for(x).fresh)
        return next(map(_name_of, shared), None)

    def _asks_for(self, item: pytest.Item, topology: Topology) -> bool:
        try:
            default = self._config.option.multihost_platform
            return request_for(item).topology(default) == topology
        except Unavailable:
            return False

    # --- pools ----------------------------------------------------------------------------------

    def _pool(self, topology: Topology, only: pytest.Item | None) -> Pool:
        """Processes for all tests of a topology; new ones for `only` one of them."""
        pool = self._pools.pop(topology, None)
        if pool is not None and only:
            pool.close()
            pool = None
        if pool is None:
            while len(self._pools) >= _POOLS.get(topology.platform, 1):
                oldest = next(iter(self._pools))
                self._pools.pop(oldest).close()
            pool = self._start(topology, only)
        self._pools[topology] = pool
        return pool

    def _start(self, topology: Topology, only: pytest.Item | None) -> Pool:
        refused = self._refused.setdefault(topology, [])
        if len(refused) >= _ATTEMPTS:
            raise NotStarted(
                f"not tried again, since {_ATTEMPTS} starts have failed. {refused[-1]}"
            )
        self._guard = self._guard or Guard()
        try:
            tests = [only] if only else [x for x in self._items if self._asks_for(x, topology)]
            return Pool(topology, self._session(tests), self._guard)
        except NotStarted as reason:
            refused.append(str(reason))
            raise

    def _session(self, tests: list[pytest.Item]) -> Session:
        config, option = self._config, self._config.option
        files = [item.path for item in tests]
        # No terminal output. Output goes straight to files, or the last output of a crash would be
        # lost. The options of addopts are applied here, or are passed on below.
        arguments = [*map(str, dict.fromkeys(files)), "-p", "no:terminal", "--capture=no"]
        arguments += ["-o", "addopts=", f"--import-mode={option.importmode}"]
        arguments += ["--rootdir", str(config.rootpath), "-o", "log_file="]
        # Without an ini file here the processes don't look for one either.
        arguments += ["-c", str(config.inipath or os.devnull)]
        if option.confcutdir:
            arguments.append(f"--confcutdir={option.confcutdir}")
        flags = {"-p": option.plugins, "-W": option.pythonwarnings, "-o": option.override_ini}
        for flag, values in flags.items():
            for value in values or ():
                arguments += [flag, value]
        sent = {
            "options": {k: v for k, v in vars(option).items() if _is_passed_on(k, v)},
            "debug": self._debugs,
            "terminal": self._terminal,
        }
        cached = config.pluginmanager.hasplugin("cacheprovider")
        return Session(arguments, str(config.invocation_params.dir), cached, sent)

    @cached_property
    def _terminal(self) -> Sequence[int]:
        """The terminal of this session, for a debugger in one of the processes."""
        if not self._debugs:
            return ()
        capture: Any = self._config.pluginmanager.getplugin("capturemanager")
        if capture is None:
            return os.dup(0), os.dup(1)
        capture.suspend_global_capture(in_=True)
        files = os.dup(0), os.dup(1)
        capture.resume_global_capture()
        return files

    def _pass_on(self, result: Result) -> None:
        """Passes on warnings, each once for all processes, and requests to stop."""
        texts = [json.dumps(warning) for o in result.outcomes for warning in o.warnings]
        for warning in map(json.loads, dict.fromkeys(texts)):
            self._config.hook.pytest_warning_recorded.call_historic(
                kwargs={
                    "warning_message": _as_warning(warning),
                    "when": "runtest",
                    "nodeid": warning["test"],
                    "location": None,
                }
            )
        for outcome in result.outcomes:
            if outcome.stop is not None:
                reason, status = outcome.stop
                pytest.exit(f"process {outcome.index} {reason}", status)

    # --- the end --------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtestloop(self) -> Any:
        # trylast: runs before other wrappers continue, which may read the files of the processes:
        # those of coverage.py, for example.
        try:
            return (yield)
        finally:
            self._close_all()

    def _close_all(self) -> None:
        while self._pools:
            topology, pool = self._pools.popitem()
            if trouble := pool.close():
                sys.stderr.write(f"mylib.testing: {topology} ended in disorder: {trouble}\n")

    def pytest_unconfigure(self) -> None:
        self._kill_all()
        if self._guard is not None:
            self._guard.close()

    def _kill_all(self) -> None:
        while self._pools:
            self._pools.popitem()[1].kill()


def _torn_down(item: pytest.Item, nextitem: pytest.Item | None) -> list[pytest.TestReport]:
    """Tears down fixtures of this session that earlier tests left up for `item`, and that
    `nextitem` doesn't need. `item` is torn down in other processes, not here.
    """
    call = pytest.CallInfo.from_call(
        lambda: item.session._setupstate.teardown_exact(nextitem),  # pyright: ignore[reportPrivateUsage]
        when="teardown",
    )
    return [pytest.TestReport.from_item_and_call(item, call)] if call.excinfo else []


def mark(items: Sequence[pytest.Item]) -> None:
    """Reads the marks of all tests."""
    faults: list[str] = []
    for item in items:
        if not item.get_closest_marker("multihost") or item.get_closest_marker("skip"):
            continue
        try:
            item.stash[_requested] = _request_of(item)
        except (TypeError, ValueError) as error:
            text = str(error).removeprefix("TopologyRequest.__init__() ")
            faults.append(f"{item.nodeid}: @pytest.mark.multihost: {text}")
    if faults:
        raise pytest.UsageError(*faults)


def _request_of(item: pytest.Item) -> TopologyRequest:
    """For each argument the mark nearest to the test wins."""
    names = [field.name for field in dataclasses.fields(TopologyRequest)]
    arguments: dict[str, Any] = {}
    for node in item.listchain():
        # The marks of the function, then those of its parameters.
        for mark in node.own_markers:
            if mark.name == "multihost":
                arguments.update(zip(names, mark.args, strict=False))
                arguments.update(mark.kwargs)
    return TopologyRequest(**arguments)


def seconds(config: pytest.Config, name: str) -> float:
    """A setting of the user's pytest."""
    text = config.getini(name)
    try:
        return float(text)
    except ValueError:
        raise pytest.UsageError(f"{name} = {text}: write a number of seconds") from None


def is_marked(item: pytest.Item) -> bool:
    return _requested in item.stash


def request_for(item: pytest.Item) -> TopologyRequest:
    return item.stash[_requested]


def _name_of(item: pytest.Item) -> str:
    """The name of a test in its processes. pytest-xdist adds groups to `nodeid` here."""
    assert item.parent is not None
    return f"{item.parent.nodeid}::{item.name}"


def _is_passed_on(name: str, value: object) -> bool:
    if name in _OWN_OPTIONS or name.startswith("multihost"):
        return False
    parts = value if isinstance(value, list) else [value]
    return all(x is None or isinstance(x, str | int | float | bool) for x in parts)


def _set_up_only(
    item: pytest.Item, outcome: str, text: object, start: float
) -> list[pytest.TestReport]:
    duration = time.time() - start
    return [
        report_of(item, "setup", outcome, text, start=start, duration=duration),
        report_of(item, "teardown", "passed", start=start),
    ]


def _as_warning(fields: dict[str, Any]) -> warnings.WarningMessage:
    try:
        category = getattr(importlib.import_module(fields["module"]), fields["category"])
        message = category(fields["text"])
    except (ImportError, AttributeError, TypeError):
        # Its class is not found here, or needs other arguments than a text.
        category, message = UserWarning, UserWarning(fields["text"])
    return warnings.WarningMessage(message, category, fields["file"], fields["line"])


def _print(reports: Sequence[pytest.TestReport]) -> None:
    for report in reports:
        for name, text in report.sections:
            print(f"\n{name}:\n{text}", flush=True)

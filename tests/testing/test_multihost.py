"""The pytest plugin: what a session reports of tests that run in several processes."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P
from scripts import printed_by, run_python

import mylib
from mylib._testing import launch as launch
from mylib._testing.pool import is_whole
from mylib._testing.topology import Topology, TopologyRequest, Unavailable, environment

HERE = Path(__file__).parent
# Sessions of a few processes each, on machines that are busy.
pytestmark = pytest.mark.timeout(1500)

# Writes down every report, with all that would be shown of it.
RECORDER = """
import json, sys
sys.path.insert(0, {tests!r})

def pytest_configure(config):
    global controls
    controls = config.pluginmanager.hasplugin("terminal")

def pytest_runtest_logreport(report):
    if not controls:
        return
    with open("reports.jsonl", "a") as file:
        shown = dict(
            test=report.nodeid.split("::")[1], when=report.when, outcome=report.outcome,
            text=report.longreprtext, sections=[list(s) for s in report.sections],
            wasxfail=getattr(report, "wasxfail", None), seconds=report.duration,
            subtest=hasattr(report, "context"),
        )
        file.write(json.dumps(shown) + "\\n")

def pytest_sessionfinish():
    # The session itself must not take the devices.
    from jax._src import xla_bridge
    assert not controls or not xla_bridge.backends_are_initialized()
"""


# Prints the stacks of its threads, as many frames down as it is told.
DEEP = """
import faulthandler, sys, threading
def f(n):
    return f(n - 1) if n else faulthandler.dump_traceback(sys.stdout)
threading.Thread(target=threading.Event().wait, daemon=True).start()
f(int(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def env(checkout_env) -> dict[str, str]:
    """Without what is meant for the tests of this session."""
    ours = ("XLA_FLAGS", "NPROC", "PYTEST_CURRENT_TEST", "PYTEST_ADDOPTS")
    return {name: value for name, value in checkout_env.items() if name not in ours}


class Session:
    """A finished session of pytest."""

    def __init__(self, folder: Path, done: subprocess.CompletedProcess) -> None:
        self.text = done.stdout
        self.status = done.returncode
        path = folder / "reports.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        self.reports = [json.loads(line) for line in lines]
        self.children = folder / "children"

    def outcome(self, test: str) -> str:
        """What pytest would show of a test, in one word."""
        reports = [r for r in self.reports if r["test"] == test and not r["subtest"]]
        for report in reports:
            if report["when"] != "call" and report["outcome"] == "failed":
                return f"error at {report['when']}"
        (last,) = [r for r in reports if r["when"] == "call"] or reports[:1]
        if last["wasxfail"] is not None:
            return {"skipped": "xfailed", "passed": "xpassed"}.get(last["outcome"], "failed")
        return last["outcome"]

    def said(self, test: str) -> str:
        return "\n".join(r["text"] for r in self.reports if r["test"] == test).strip()

    def seconds(self, test: str) -> float:
        return sum(r["seconds"] for r in self.reports if r["test"] == test)

    def sections(self, test: str) -> dict[str, str]:
        return {
            name: text for r in self.reports if r["test"] == test for name, text in r["sections"]
        }


def run(folder: Path, env: dict[str, str], *arguments: str, timeout: float = 1200) -> Session:
    (folder / "conftest.py").write_text(RECORDER.format(tests=str(HERE.parent)))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env={**env, "CHILDREN": str(folder / "children")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    return Session(folder, done)


@pytest.fixture(scope="module")
def faults(request, tmp_path_factory, env) -> Session:
    folder = tmp_path_factory.mktemp("faults")
    (folder / "test_faults.py").write_text((HERE / "_faults.py").read_text())
    # Only what this session's tests ask about.
    asking = [x for x in request.session.items if "faults" in getattr(x, "fixturenames", ())]
    thorough = [x.get_closest_marker("thorough") is not None for x in asking]
    chosen = []
    if all(thorough):
        chosen = [f"test_faults.py::{test}" for test in THOROUGH]
    elif not any(thorough):
        chosen = [f"--deselect=test_faults.py::{test}" for test in THOROUGH]
    return run(folder, env, "-o", "multihost_grace=1", "-W", "default", *chosen)


# Each costs new processes, and another test ends in much the same way.
THOROUGH = (
    "test_one_changes_a_setting",
    "test_one_segfaults",
    "test_all_leave_each_other",
    "test_one_spins_and_the_other_stops_answering",
)


def _about(test: str, *values: str):
    """The parameters of a test that asks for what became of another."""
    marks = [pytest.mark.thorough] if test in THOROUGH else []
    return pytest.param(test, *values, marks=marks)


OUTCOMES = {
    "test_passes": "passed",
    "test_with_parameters[3]": "passed",
    "test_with_parameters[4]": "passed",
    "test_draws_the_same_everywhere": "passed",
    "test_says_what_it_prints": "failed",
    "test_warns": "passed",
    "test_skipped_by_all": "skipped",
    "test_fails_in_all_as_expected": "xfailed",
    "test_passes_against_expectation": "xpassed",
    "test_passes_against_strict_expectation": "failed",
    "test_fails_at_the_end": "error at teardown",
    "test_subtests": "failed",
    "test_is_asserted_with_values": "failed",
    "test_one_raises_and_the_other_waits_for_it": "failed",
    "test_processes_disagree": "passed",
    "test_one_leaves_something_running": "error at teardown",
    "test_passes_after_that": "passed",
    "test_one_changes_a_setting": "error at teardown",
    "test_all_change_settings": "passed",
    "test_prints_a_lot": "failed",
    "test_what_was_printed_before_is_not_kept": "failed",
    "test_one_exits": "failed",
    "test_a_child_returns": "passed",
    "test_a_child_fails_and_returns": "failed",
    "test_all_leave_each_other": "error at teardown",
    "test_one_segfaults": "failed",
    "test_the_coordinator_is_killed": "failed",
    "test_one_sleeps": "failed",
    "test_one_spins_and_the_other_stops_answering": "failed",
    "test_the_mark_wins_over_pytest_timeout": "passed",
    "test_mesh[mylib_mesh0]": "passed",
    "test_mesh[mylib_mesh1]": "passed",
    "test_mesh[mylib_mesh2]": "skipped",
    "test_mesh_by_default": "passed",
    "test_second_backend": "passed",
    "test_clean_distributed": "passed",
    "test_clean_distributed_of_shared_processes": "error at setup",
    "test_passes_last": "passed",
}


@pytest.mark.slow
class TestOutcomes:
    @pytest.mark.parametrize("test", [*map(_about, OUTCOMES)])
    def test_of(self, faults, test):
        assert faults.outcome(test) == OUTCOMES[test], faults.said(test) or faults.text

    def test_none_is_forgotten(self, faults):
        ran = {r["test"] for r in faults.reports}
        assert set(OUTCOMES) - set(THOROUGH) <= ran <= set(OUTCOMES)
        assert faults.status == 1, faults.text


FIRST_LINES = {
    "test_one_exits": "process 1 of 2 died: exit status 3",
    "test_one_segfaults": "process 1 of 2 died: SIGSEGV",
    "test_the_coordinator_is_killed": "process 0 of 2 died: SIGKILL",
    "test_fails_at_the_end": "all processes: RuntimeError: the end fails everywhere",
    "test_passes_against_strict_expectation": "all processes: [XPASS(strict)] known",
    "test_clean_distributed_of_shared_processes": "all processes: Failed: clean_distri",
}


@pytest.mark.slow
class TestWords:
    """What is shown of a failure."""

    def test_the_process_that_failed_comes_first(self, faults):
        text = faults.said("test_one_raises_and_the_other_waits_for_it")
        first = text.splitlines()[0]
        assert first == "process 1 of 2: ValueError: process 1 raises"
        assert text.index("--- process 1 of 2 failed ---") < text.index("process 0 of 2 had not")
        assert 'raise ValueError("process 1 raises")' in text
        assert "1 s after the first failure; it was here" in text
        # Where the other one was: in the collective.
        assert re.search(r"test_faults.py\", line \d+ in meet", text)

    def test_equal_failures_are_shown_once(self, faults):
        text = faults.said("test_is_asserted_with_values")
        assert text.startswith("all processes: assert [1, 2, 3] == [1, 2, 4]")
        assert "At index 2 diff: 3 != 4" in text
        assert text.count("left, right") == 1

    def test_output_of_each_process(self, faults):
        sections = faults.sections("test_says_what_it_prints")
        for index in (0, 1):
            out = sections[f"Captured stdout call [process {index}]"]
            assert out == f"printed by {index}\nwritten past Python"
            err = sections[f"Captured stderr call [process {index}]"]
            assert err == f"complained by {index}"

    def test_much_output_is_cut_and_says_so(self, faults):
        text = faults.sections("test_prints_a_lot")["Captured stdout call [process 0]"]
        assert text.endswith("end") and "begin" not in text
        assert text.startswith("(100009 bytes are left out here)")

    def test_output_is_not_kept(self, faults):
        """Of processes that serve test after test."""
        test = "test_what_was_printed_before_is_not_kept"
        assert faults.said(test).startswith("all processes: Failed: to be shown"), faults.said(test)
        printed = faults.sections(test)["Captured stdout call [process 1]"]
        assert printed == "printed after that"

    def test_a_child_that_fails_and_returns(self, faults):
        assert faults.said("test_a_child_fails_and_returns").startswith("all processes: assert 256")
        assert "said by nobody" not in faults.said("test_a_child_fails_and_returns")

    def test_a_warning_is_given_once(self, faults):
        assert len(re.findall("FutureWarning: said twice", faults.text)) == 1

    @pytest.mark.parametrize(
        "test, head",
        [_about(*said) for said in FIRST_LINES.items()],
    )
    def test_of_the_first_line(self, faults, test, head):
        assert faults.said(test).startswith(head), faults.said(test)
        assert head[:40] in faults.text

    def test_last_words(self, faults):
        text = faults.said("test_one_exits")
        assert "last words" in text

    @pytest.mark.thorough
    def test_last_words_of_a_segmentation_fault(self, faults):
        assert "Segmentation fault" in faults.said("test_one_segfaults")
        assert "in test_one_segfaults" in faults.said("test_one_segfaults")

    @pytest.mark.parametrize(
        "test, where",
        [
            _about("test_one_sleeps", "in hang"),
            _about("test_one_sleeps", "in meet"),
            _about("test_one_spins_and_the_other_stops_answering", "in test_one_spins_and"),
            _about(
                "test_one_spins_and_the_other_stops_answering",
                "(it does not respond to signals either)",
            ),
            _about("test_one_spins_and_the_other_stops_answering", "had not finished after 2 s"),
        ],
    )
    def test_where_a_stuck_process_was(self, faults, test, where):
        text = faults.said(test)
        assert where in text and "_pytest/" not in text, text

    def test_stacks_that_are_not_yet_printed(self, tmp_path):
        """A busy machine takes its time between two lines."""
        (tmp_path / "deep.py").write_text(DEEP)
        for depth in "1", "150":
            printed = printed_by("-m", "deep", depth, cwd=tmp_path)
            lines = printed.splitlines(keepends=True)
            whole = [is_whole("".join(lines[:n])) for n in range(len(lines) + 1)]
            # Python 3.11 has one more line, which says that there would be more.
            assert True not in whole[:-2] and whole[-1], printed

    def test_out_of_step(self, faults):
        text = faults.said("test_one_leaves_something_running")
        assert "has left its processes out of step" in text and ": no answer from process" in text

    @pytest.mark.thorough
    def test_a_setting_of_one_process(self, faults):
        text = faults.said("test_one_changes_a_setting")
        assert "in some processes only: process 1: jax_enable_x64. All must do" in text

    @pytest.mark.thorough
    def test_processes_that_leave_each_other(self, faults):
        assert "shutdown(). Mark it fresh=True" in faults.said("test_all_leave_each_other")


@pytest.mark.slow
class TestEnds:
    """A test ends within its limit, and nothing is left of it."""

    def test_in_time(self, faults):
        # A limit or a second's grace, and new processes for some; not the limit of two minutes.
        for test, outcome in OUTCOMES.items():
            if outcome in ("failed", "xfailed"):
                assert faults.seconds(test) < 100, test

    def test_children_of_killed_processes_are_gone(self, faults):
        pids = [int(line) for line in faults.children.read_text().split()]
        assert len(pids) == 2
        assert not any(map(_lives, pids))

    def test_no_folder_is_left(self, faults):
        assert not re.search("mylib-processes", faults.text)


def _lives(pid: int) -> bool:
    try:
        # A process that nobody has waited for yet is dead all the same.
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False


def _gone(pids: list[int], seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(_lives, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


WAITING = """
import os, pathlib, subprocess, time
import jax, pytest

@pytest.mark.multihost(processes=2, devices_per_process=1)
def test_waits():
    child = subprocess.Popen(["sleep", "1000"])
    address = jax._src.distributed.global_state.coordinator_address
    pathlib.Path(f"pids{jax.process_index()}").write_text(f"{os.getpid()} {child.pid} {address}")
    while True:
        # Holding Python's lock, so that only the kernel can end it.
        pass
"""


_OTHERS = [pytest.param(x, marks=pytest.mark.thorough) for x in (signal.SIGTERM, signal.SIGKILL)]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, *_OTHERS])
def test_the_end_of_pytest_is_the_end_of_all(tmp_path, env, number):
    (tmp_path / "test_waiting.py").write_text(WAITING)
    (tmp_path / "conftest.py").write_text("")
    # Whoever runs these tests may not care for Ctrl-C, and that is inherited.
    program = (
        "import signal, sys, pytest; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "sys.exit(pytest.main(['-p', 'no:cacheprovider']))"
    )
    session = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**env, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        paths = [tmp_path / "pids0", tmp_path / "pids1"]
        deadline = time.monotonic() + 240
        while not all(path.exists() and path.read_text() for path in paths):
            assert time.monotonic() < deadline and session.poll() is None
            time.sleep(0.05)
        told = [path.read_text().split() for path in paths]
        session.send_signal(number)
        text = session.communicate(timeout=240)[0]
    finally:
        if session.poll() is None:
            os.killpg(session.pid, signal.SIGKILL)
        assert session.stdout is not None
        session.stdout.close()
    assert _gone([int(pid) for pids in told for pid in pids[:2]]), text
    if number == signal.SIGINT:
        assert session.returncode == pytest.ExitCode.INTERRUPTED and "KeyboardInterrupt" in text
    # The port can be had again, and no folder is left: as soon as the last thread has gone.
    port = int(told[0][2].rsplit(":", 1)[1])
    deadline = time.monotonic() + 60
    while not _is_free(port) or list(tmp_path.glob("mylib-processes-*")):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _is_free(port: int) -> bool:
    with socket.socket() as s:
        # What was said over it may still be on its way.
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
            s.listen()
        except OSError:
            return False
    return True


SMALL = """
import warnings
import jax, pytest

pytestmark = pytest.mark.multihost(processes=2, devices_per_process=1)

def test_one(): assert jax.process_count() == 2

def test_two(): assert jax.process_count() == 3

def test_three(request): assert request.config.getoption("fruit") == "apple"

@pytest.mark.parametrize("n", [1, 2])
def test_four(n): assert n == 1
"""
OPTION = """
def pytest_addoption(parser):
    parser.addoption("--fruit", default="pear")
"""


# It would be imported in each process.
WITHOUT_HYPOTHESIS = "-p no:hypothesispytest"


@pytest.fixture
def small(pytester, env, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", env["PYTHONPATH"])
    for name in ("XLA_FLAGS", "NPROC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTEST_ADDOPTS", WITHOUT_HYPOTHESIS)
    pytester.makepyfile(test_small=SMALL)
    pytester.makeconftest(OPTION)
    return pytester


@pytest.mark.thorough
def test_options_of_pytest(small):
    """-k, --lf, -x, the JUnit file, addopts, and options of a conftest.py."""
    small.makeini("[pytest]\naddopts = --fruit=apple -ra\nmultihost_grace = 0.5\n")
    done = small.runpytest_subprocess("--junitxml=report.xml", "-v", timeout=300)
    done.assert_outcomes(passed=3, failed=2)
    done.stdout.fnmatch_lines(["*all processes: assert 2 == 3*"])
    junit = (small.path / "report.xml").read_text()
    assert 'message="all processes: assert 2 == 3' in junit and 'tests="5"' in junit
    # Of the two that have failed, and one that has passed.
    again = small.runpytest_subprocess("--lf", "--maxfail=1", "-k", "one or four", timeout=300)
    again.assert_outcomes(failed=1, deselected=1)


@pytest.mark.thorough
def test_a_debugger(small):
    """In the process that fails first."""
    done = small.run(
        sys.executable,
        *["-m", "pytest", "-p", "no:cacheprovider", "-k", "two or four", "--pdb"],
        stdin=b"p 'here is', jax.process_index()\nq\n" * 3,
        timeout=300,
    )
    found = re.findall(r"\(Pdb, process (\d)\) \('here is', (\d)\)", done.stdout.str())
    # Two tests fail, each in one debugger's hands.
    assert len(found) == 2 and all(prompt == said for prompt, said in found)
    assert done.ret == 1


@pytest.mark.thorough
def test_groups_of_xdist(small):
    """For --dist=loadgroup, so that one of its workers has all the processes."""
    options = ["-n1", "--dist=loadgroup", "--fruit=apple", "-m", "xdist_group"]
    small.runpytest_subprocess(*options, timeout=300).assert_outcomes(passed=3, failed=2)


@pytest.mark.thorough
def test_among_other_tests(small):
    """Fixtures of the session itself end when they should, whatever runs elsewhere in between."""
    small.makepyfile(
        test_a="""
        import pytest
        @pytest.fixture(scope="module")
        def up(request):
            yield
            assert not request.config.getoption("fruit") == "plum", "the end of the module"
        def test_here(up): pass
        @pytest.mark.multihost(processes=2, devices_per_process=1)
        def test_there(up): pass
        """,
        test_small="""
        def test_elsewhere(): pass
        """,
    )
    done = small.runpytest_subprocess("--fruit=plum", timeout=300)
    done.assert_outcomes(passed=3, errors=2)
    assert "the end of the module" in done.stdout.str()


@pytest.mark.thorough
def test_marks_from_everywhere(small):
    """What is nearest to the test wins, also by position; and a conftest.py may add marks."""
    small.makeconftest(
        OPTION
        + """
import pytest
def pytest_collection_modifyitems(items):
    for item in items:
        if item.name == "test_added":
            item.add_marker(pytest.mark.multihost(processes=2, devices_per_process=1))
"""
    )
    small.makepyfile(
        test_small="""
        import jax, pytest
        def count(processes, devices):
            assert (jax.process_count(), jax.local_device_count()) == (processes, devices)
        def test_added(): count(2, 1)
        @pytest.mark.multihost(1, 3)
        class TestThem:
            @pytest.mark.multihost(2, devices_per_process=1)
            def test_inner(self): count(2, 1)
            def test_outer(self): count(1, 3)
            @pytest.mark.multihost(processes=2)
            @pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.multihost(1, 3))])
            def test_parameter(self, n): count(1, 3)
        """
    )
    small.runpytest_subprocess(timeout=300).assert_outcomes(passed=4)


@pytest.mark.thorough
def test_more_options_of_pytest(small):
    small.makeini("[pytest]\naddopts = --strict-config\n")
    small.makepyfile(
        test_small="""
        import logging, pytest
        @pytest.fixture
        def fixture(): return 1
        def test_here(): logging.warning("said here")
        @pytest.mark.multihost(processes=2, devices_per_process=1)
        def test_there(fixture):
            logging.warning("said there")
            assert fixture == 2
        @pytest.mark.multihost(processes=2, devices_per_process=1)
        def test_stops(): pytest.exit("enough", returncode=5)
        """
    )
    options = ["-p", "no:cacheprovider", "--setup-show", "--log-file=log.txt", "--tb=line"]
    done = small.runpytest_subprocess(*options, timeout=300)
    # One of pytest's own, so that there is a summary.
    assert done.ret == 5
    done.stdout.fnmatch_lines(["*process 0 called pytest.exit: enough*"])
    done.assert_outcomes(passed=1, failed=1)
    done.stdout.fnmatch_lines(["all processes: assert 1 == 2"])
    assert "said here" in (small.path / "log.txt").read_text()


def test_marks_that_can_not_be(small):
    small.makepyfile(
        test_small="""
        import pytest
        @pytest.mark.multihost(procs=2)
        def test_a(): pass
        @pytest.mark.multihost(processes=0)
        def test_b(): pass
        @pytest.mark.multihost(platform="gpu")
        def test_c(): pass
        @pytest.mark.multihost(env={"A": 1})
        def test_d(): pass
        @pytest.mark.multihost(fresh=1, timeout=5)
        def test_e(): pass
        """
    )
    done = small.runpytest_inprocess()
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(
        [
            "*test_small.py::test_a: @pytest.mark.multihost: *unexpected*'procs'*",
            "*test_b: *processes=0: write a positive number*",
            "*test_c: *platform='gpu': write one of cpu, cuda, tpu*",
            "*test_d: *write a dict of strings*",
            "*test_e: *fresh=1: write True or False*",
        ]
    )


@pytest.mark.thorough
def test_processes_that_do_not_start(small):
    small.makepyfile(
        test_small="""
        import jax, pytest
        pytestmark = pytest.mark.multihost(processes=2, devices_per_process=1)
        if jax.distributed.is_initialized():
            raise RuntimeError("not in here")
        @pytest.mark.parametrize("n", range(4))
        def test_a(n): pass
        @pytest.mark.skip(reason="a skipped test starts nothing")
        def test_b(): pass
        """
    )
    done = small.runpytest_subprocess(timeout=300)
    done.assert_outcomes(errors=4, skipped=1)
    text = done.stdout.str()
    assert text.count("RuntimeError: not in here") >= 3
    assert text.count("not tried again, since 2 starts have failed") >= 2


def test_skipped_on_request(small):
    small.runpytest_inprocess("--multihost=skip").assert_outcomes(skipped=5)


def test_a_session_without_such_tests_imports_nothing(small):
    """JAX reads variables when it is imported: a plugin must not be the first to do so."""
    small.makepyfile(
        test_small="""
        import sys
        def test_a(): assert "jax" not in sys.modules and "mylib" not in sys.modules
        """
    )
    small.runpytest_subprocess(timeout=300).assert_outcomes(passed=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("pytest.exit('enough')", "process 1 called pytest.exit: enough"),
        ("signal.raise_signal(signal.SIGINT)", "process 1 was interrupted"),
    ],
)
def test_one_process_that_is_asked_to_stop(small, end, told):
    """The others get a moment, not the limit of the test."""
    small.makepyfile(
        test_small=f"""
        import signal, time
        import jax, pytest
        @pytest.mark.multihost(processes=2, devices_per_process=1)
        def test_stops():
            # A shell that starts this in the background ignores it.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if jax.process_index() == 1: {end}
            time.sleep(1000)
        """
    )
    done = small.runpytest_subprocess("-o", "multihost_timeout=1000", timeout=280)
    assert told in done.stdout.str(), done.stdout.str()


@pytest.mark.slow
def test_standard_output_that_is_none(small):
    small.makepyfile(
        test_small="""
        import sys, pytest
        @pytest.mark.multihost(processes=2, devices_per_process=1)
        def test_none(monkeypatch):
            monkeypatch.setattr(sys, "stdout", None)
            print("nowhere")
        """
    )
    small.runpytest_subprocess(timeout=280).assert_outcomes(passed=1)


# --- processes that somebody else has started ----------------------------------------------------


MEMBER = ["-m", "pytest", *WITHOUT_HYPOTHESIS.split(), "--multihost=member"]


@pytest.fixture
def launched(small, capsys):
    """What a command prints that `launch` runs in two processes, from this one."""

    def run(*command: str) -> pytest.RunResult:
        start = time.monotonic()
        status = launch.main(["-n", "2", "--devices-per-process=2", *command])
        out, err = capsys.readouterr()
        seconds = time.monotonic() - start
        return pytest.RunResult(status, out.splitlines(), err.splitlines(), seconds)

    return run


def test_member_sessions(small, launched):
    small.makepyfile(
        test_small="""
        import jax, pytest
        from mylib.testing import gather
        pytestmark = pytest.mark.multihost
        def test_passes(tmp_path, multihost_tmp_path):
            assert jax.device_count() == 4
            assert len(set(gather(str(multihost_tmp_path)))) == 1
        def test_fails_in_one():
            assert jax.process_index() == 0
        def test_skipped_in_one():
            if jax.process_index() == 1: pytest.skip("only here")
        @pytest.fixture
        def broken():
            assert jax.process_index() == 0
        def test_fails_at_the_beginning_in_one(broken): pass
        def test_subtests(subtests):
            for i in range(2):
                with subtests.test(i=i): assert i == 0
        @pytest.mark.xfail(reason="known")
        def test_expected(): assert False
        @pytest.mark.multihost(processes=3)
        def test_too_many(): pass
        @pytest.mark.multihost(fresh=True)
        def test_fresh(): pass
        """
    )
    small.makepyfile(test_other="def test_unmarked(): pass")
    # Of which neither does anything here.
    others = ["--reruns=1", "--forked"]
    done = launched(*MEMBER, "-rs", "-v", *others)
    text = done.stdout.str()
    assert done.ret == 1, text
    assert "[0] multihost: process 1 of 2 on" in text and "with 2 of 4 devices (cpu)" in text
    # Process 0 speaks for all.
    assert not any(line.startswith("[1]") for line in done.outlines)
    summary = "4 failed, 1 passed, 2 skipped, 1 deselected, 1 xfailed, 1 error"
    assert re.search(summary, text), text
    assert "process 1 of 2: assert 1 == 0" in text
    assert "the processes disagree: process 1: Skipped: only here; but process 0 ran" in text
    assert "needs 3 processes, this job has 2" in text
    assert "needs processes of its own" in text


@pytest.mark.slow
def test_member_sessions_end_together(small, launched):
    small.makepyfile(
        test_small="""
        import jax, numpy as np, pytest
        from jax.experimental import multihost_utils
        pytestmark = pytest.mark.multihost(timeout=60)
        def test_waits():
            if jax.process_index() == 1: raise ValueError("in process 1")
            multihost_utils.process_allgather(np.ones(1))
        def test_never_reached(): pass
        """
    )
    done = launched(*MEMBER, "-o", "multihost_grace=1")
    text = done.stdout.str() + done.stderr.str()
    assert done.ret == 70
    assert "ValueError: in process 1" in text
    for index in (0, 1):
        assert f"[{index}] multihost: the session ends. process 1: " in text
    assert re.search(r"\[0\] .*line \d+ in test_waits", text), text


@pytest.mark.slow
def test_member_sessions_keep_what_they_know(small, launched):
    """A process that hangs ends all of them, and yet what has failed before is told."""
    small.makepyfile(
        test_small="""
        import time
        import jax, pytest
        pytestmark = pytest.mark.multihost(timeout=5)
        def test_fails(): assert jax.process_count() == 1
        def test_passes(): pass
        def test_hangs():
            if jax.process_index() == 1: time.sleep(1000)
        def test_never_reached(): pass
        """
    )
    done = launched(*MEMBER, "--junitxml=written.xml")
    text = done.stdout.str()
    assert done.ret == 70, text
    assert "2 failed, 1 passed" in text and "assert 2 == 1" in text
    assert "--- process 0 was here ---" in text
    assert re.search(r"\[1\] .*line \d+ in test_hangs", done.stderr.str()), done.stderr.str()
    written = Path("written.xml").read_text()
    assert written.count("<failure") == 2 and "test_hangs has not finished within its" in written


@pytest.mark.thorough
def test_member_sessions_that_are_asked_to_stop(small, launched):
    small.makepyfile(
        test_small="""
        import jax, pytest
        pytestmark = pytest.mark.multihost
        def test_stops():
            if jax.process_index() == 1: pytest.exit("enough")
        """
    )
    done = launched(*MEMBER)
    assert done.ret == 70
    assert "pytest was asked to stop" in done.stderr.str() and "enough" in done.stderr.str()


@pytest.mark.slow
def test_member_sessions_without_others(small):
    done = small.runpytest_subprocess("--multihost=member", timeout=300)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["*JAX finds no other processes*mylib.testing launch*"])


SCRIPT = """
import os, subprocess, sys, time
import jax
jax.distributed.initialize()
me = jax.process_index()
print("process", me, "of", jax.process_count(), "with", jax.local_device_count(), sys.argv[1:])
if sys.argv[1] == "fail" and me == 1:
    raise ValueError("in process 1")
if sys.argv[1] == "exit" and me == 1:
    sys.exit(7)
if sys.argv[1] != "end":
    time.sleep(1000)
"""


@pytest.mark.slow
def test_launch(small):
    small.makepyfile(script=SCRIPT)
    options = ["-n", "3", "--devices-per-process=2", "script.py", "end", "--processes", "3"]
    done = small.run(sys.executable, "-m", "mylib.testing", "launch", *options, timeout=300)
    assert done.ret == 0
    for index in range(3):
        line = f"[{index}] process {index} of 3 with 2 ['end', '--processes', '3']"
        assert line in done.outlines


@pytest.mark.slow
@pytest.mark.parametrize(
    "how, status", [("fail", 1), pytest.param("exit", 7, marks=pytest.mark.thorough)]
)
def test_launch_of_a_script_that_fails(small, launched, how, status):
    small.makepyfile(script=SCRIPT)
    done = launched("script.py", how)
    assert done.ret == status
    # JAX would have waited for five minutes.
    assert done.duration < 200
    done.stderr.fnmatch_lines([f"process 1 ended with exit status {status}", "stopping process 0"])
    if how == "fail":
        done.stderr.fnmatch_lines(["[[]1] ValueError: in process 1"])


def test_launch_of_a_script_that_clears_its_environment(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os\nos.environ.clear()")
    subprocess.run([sys.executable, "-c", launch._RUN, str(script)], check=True)


@pytest.mark.slow
def test_launch_of_processes_that_do_not_meet(small, launched):
    small.makepyfile(script="import jax\nprint(jax.process_count())")
    done = launched("script.py")
    assert done.ret == 0
    done.stdout.fnmatch_lines_random(["[[]0] 1", "[[]1] 1"])
    (said,) = [line for line in done.errlines if "alone" in line]
    assert said == (
        "[0] Each of the 2 processes ran the program alone: call jax.distributed.initialize() "
        "before anything else in JAX"
    )


def test_launch_and_ctrl_c(small):
    small.makepyfile(
        script="""
        import os, pathlib, sys, time
        sys.stdout.write("begun")
        sys.stdout.flush()
        try:
            pathlib.Path(f"begun{os.getpid()}").touch()
            time.sleep(1000)
        finally: sys.stdout.write(" and tidied up")
        """
    )
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from mylib._testing.launch import main; sys.exit(main(['-n2', '--', 'script.py']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=small.path
    ) as launch:
        try:
            deadline = time.monotonic() + 240
            while len(list(small.path.glob("begun*"))) < 2:
                assert time.monotonic() < deadline and launch.poll() is None
                time.sleep(0.05)
            launch.send_signal(signal.SIGINT)
            text = launch.communicate(timeout=240)[0]
        finally:
            launch.kill()
    assert launch.returncode == 130
    assert sorted(text.splitlines()) == [f"[{i}] begun and tidied up" for i in range(2)]


BAR = """
import sys, time
for i in range(24):
    sys.stdout.write(f"{i}%\\r" if sys.argv[1] == "after" else f"\\r{i}%")
    sys.stdout.flush()
    time.sleep(0.1)
print("\\nended")
"""


@pytest.mark.parametrize("where", ["before", "after"])
def test_launch_shows_a_progress_bar(small, launched, where):
    """Its state once a second, though its line never ends."""
    small.makepyfile(script=BAR)
    done = launched("script.py", where)
    shown = [line[4:] for line in done.stdout.lines if line.startswith("[1]")]
    assert 3 <= len(shown) <= 7 and shown[-1] == "ended"
    assert all(line.endswith("%") and line.count("%") == 1 for line in shown[:-2])


@pytest.mark.parametrize("how", [">&-", ">&- 2>&- <&-", "| head -1"])
def test_launch_with_a_closed_output(tmp_path, checkout_env, how):
    """No traceback, whoever doesn't listen; and no file grows."""
    (tmp_path / "script.py").write_text("for i in range(20_000): print(i, 'x' * 100)")
    launch = f"{sys.executable} -m mylib.testing launch -n2 script.py {how}"
    done = subprocess.run(
        ["bash", "-c", launch], env=checkout_env, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stderr == ""
    assert len(done.stdout.splitlines()) == (how[0] == "|")


def test_launch_without_room_for_files(tmp_path, checkout_env):
    """What a process prints goes through pipes: why it ended is shown even if the disk is full."""
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
    (tmp_path / "script.py").write_text(f"{limited}print('x' * 100)\nraise ValueError('why')")
    launch = "-m", "mylib.testing", "launch", "-n1"
    done = run_python(*launch, tmp_path / "script.py", env=checkout_env)
    assert done.returncode == 1 and "[0] ValueError: why" in done.stderr
    assert "x" * 100 in done.stdout


def test_launch_of_nothing():
    for arguments in ["-n", "2"], ["script.py"], ["-n", "0", "script.py"]:
        with pytest.raises(SystemExit) as ended:
            launch.main(arguments)
        assert ended.value.code == 2


# --- what processes are started with -------------------------------------------------------------


class TestEnvironment:
    def test_cpu(self, monkeypatch):
        monkeypatch.setenv("https_proxy", "http://proxy:1")
        env = environment(1, Topology(2, 4, env=(("A", "b"),)))
        assert env["JAX_PLATFORMS"] == "cpu" and env["JAX_NUM_CPU_DEVICES"] == "4"
        assert env["A"] == "b" and "127.0.0.1" in env["no_proxy"]

    def test_gpus_are_shared_out(self, monkeypatch):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
        topology = TopologyRequest(devices_per_process=2).topology("cuda")
        assert topology == Topology(2, 2, "cuda")
        seen = [environment(i, topology) for i in range(2)]
        assert [env["CUDA_VISIBLE_DEVICES"] for env in seen] == ["4,5", "6,7"]
        assert all(env["JAX_LOCAL_DEVICE_IDS"] == "0,1" for env in seen)
        assert all(env["JAX_PLATFORMS"] == "cuda" for env in seen)

    @pytest.mark.parametrize(
        "visible, request_, topology",
        [
            ("0", TopologyRequest(), Topology(1, 1, "cuda")),
            ("0,1,2", TopologyRequest(), Topology(3, 1, "cuda")),
            ("0,1,2,3", TopologyRequest(processes=2), Topology(2, 2, "cuda")),
            ("0,1", TopologyRequest(platform="cpu"), Topology(2, 4, "cpu")),
        ],
    )
    def test_what_is_not_named_is_chosen(self, monkeypatch, visible, request_, topology):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert request_.topology("cuda") == topology

    def test_why_not(self, monkeypatch):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        with pytest.raises(Unavailable, match="needs 2 processes with 1 device each; for cuda "):
            TopologyRequest(processes=2).topology("cuda")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        with pytest.raises(Unavailable, match="needs 1 process with 1 device each.* has 0"):
            TopologyRequest().topology("cuda")
        with pytest.raises(Unavailable, match="--multihost=member"):
            TopologyRequest(platform="tpu").topology("cpu")


# --- on real GPUs --------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.multihost(platform="cuda")
def test_on_all_gpus_of_the_machine():
    """One process for each; skipped, with the reason, where there is none."""
    assert jax.default_backend() == "gpu" and jax.local_device_count() == 1
    met = multihost_utils.process_allgather(np.array(jax.process_index()))
    assert np.ravel(met).tolist() == list(range(jax.process_count()))


@pytest.mark.gpu
@pytest.mark.multihost(platform="cuda", processes=2, devices_per_process=1)
def test_on_two_gpus():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    x = mylib.filter_shard(np.arange(8.0, dtype=np.float32), P("d"), mesh=mesh)
    assert float(x.sum()) == 28
    mylib.check_replicas(mylib.filter_shard(x, P(), mesh=mesh))


@pytest.mark.slow
def test_launch_restarts_all(tmp_path, checkout_env):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "tried = pathlib.Path(sys.argv[1], os.environ['SLURM_PROCID'])\n"
        "if tried.exists():\n"
        "    sys.exit(0)\n"
        "tried.touch()\n"
        "if tried.name == '1':\n"
        "    os.kill(os.getpid(), 9)\n"
        "time.sleep(1)\n"
        "sys.exit(75)\n"
    )
    launch = "-m", "mylib.testing", "launch", "-n2", "--restart=2"
    done = run_python(*launch, script, tmp_path, env=checkout_env)
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()
    assert "process 1 ended with SIGKILL" in said
    assert "process 0 ended with exit status 75" in said
    assert "starting all processes again, 1 more times at most" in said

"""Tests in several processes beside other plugins of pytest, and on machines without a name."""

import json
import os
import shutil
import subprocess
import sys

import pytest

# Sessions of a few processes each, on machines that are busy.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def folder(pytester, checkout_env, monkeypatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", checkout_env["PYTHONPATH"])
    for name in os.environ:
        if name in ("XLA_FLAGS", "NPROC") or name.startswith(("COV_", "COVERAGE_")):
            monkeypatch.delenv(name)
    # It would be imported in each process.
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest")
    return pytester


# --- pytest-cov -----------------------------------------------------------------------------------

FRUIT = """
def here():
    return 1

def there(process):
    if process == 1:
        return 2
    return 3

def nowhere():
    return 4
"""
MEASURED = """
import jax, pytest
import fruit

def test_here():
    assert fruit.here() == 1

@pytest.mark.multihost(processes=2, devices_per_process=1)
@pytest.mark.parametrize("n", range(2))
def test_there(n):
    assert fruit.there(jax.process_index()) in (2, 3)
"""
_PATCH = "[run]\npatch = subprocess, _exit\n"


@pytest.mark.parametrize("options", [[], ["-n2"]])
@pytest.mark.thorough
def test_coverage(folder, options):
    """Of the processes, too, as coverage.py measures any subprocess; and nothing but the report and
    pytest-cov's own file is left. Sessions of xdist have processes and ports of their own.
    """
    folder.makepyfile(fruit=FRUIT, test_fruit=MEASURED)
    folder.path.joinpath(".coveragerc").write_text(_PATCH)
    done = folder.runpytest_subprocess(
        *["--cov=fruit", "--cov-branch", "--cov-report=json:told.json", *options], timeout=300
    )
    done.assert_outcomes(passed=3)
    told = json.loads((folder.path / "told.json").read_text())["files"]["fruit.py"]
    assert FRUIT.splitlines()[1:][told["missing_lines"][0] - 1] == "    return 4"
    assert len(told["missing_lines"]) == 1 and told["missing_branches"] == []
    assert [
        path.name for path in folder.path.glob(".coverage*") if path.suffix != ".coveragerc"
    ] == [
        ".coverage",
        ".coveragerc",
    ]


# --- pytest-rerunfailures -------------------------------------------------------------------------

FLAKY = """
import pathlib
import jax, pytest

@pytest.mark.flaky(reruns=2)
@pytest.mark.multihost(processes=2, devices_per_process=1)
def test_once():
    with pathlib.Path(f"attempts{jax.process_index()}").open("a") as file:
        file.write("x")
    raise ValueError("always here")
"""


@pytest.mark.thorough
def test_nothing_is_run_again(folder):
    """A test that has failed in its processes has failed."""
    folder.makepyfile(test_flaky=FLAKY)
    done = folder.runpytest_subprocess("--reruns=1", timeout=300)
    done.assert_outcomes(failed=1)
    assert [folder.path.joinpath(f"attempts{i}").read_text() for i in range(2)] == ["x", "x"]


# --- pytest-forked, and plugins that nobody knows -------------------------------------------------


@pytest.mark.thorough
def test_forked_and_odd_reports(folder):
    """A test that runs in processes of its own needs no other one; and reports may say what pytest
    itself never does.
    """
    folder.makeconftest(
        """
        import pytest
        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_makereport(item, call):
            report = yield
            if report.when == "call" and "phase" in item.name:
                report.when = "???"
            if report.when == "call" and "outcome" in item.name:
                report.outcome = "peculiar"
            return report
        """
    )
    folder.makepyfile(
        test_odd="""
        import os, jax, pytest
        def test_here(): assert os.getppid() != os.getsid(0)
        pytestmark = pytest.mark.multihost(processes=2, devices_per_process=1)
        def test_there(): assert jax.process_count() == 2
        def test_phase(): assert jax.process_count() == 3
        def test_outcome(): pass
        """
    )
    done = folder.runpytest_subprocess("--forked", "-v", timeout=300)
    text = done.stdout.str() + done.stderr.str()
    assert "INTERNALERROR" not in text, text
    assert done.ret == 1 and "2 passed" in text and "1 failed" in text and "1 peculiar" in text
    done.stdout.fnmatch_lines(["*test_outcome PECULIAR*", "all processes: assert 2 == 3"])


# --- a machine that doesn't know its own name -----------------------------------------------------

_RENAMED = """
import os, socket, sys
socket.sethostname("nosuch.invalid")
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.fixture(scope="module")
def renamed() -> list[str]:
    """The beginning of a command that runs Python where the machine's name can't be resolved."""
    for unshare in ["unshare", "--uts"], ["unshare", "--map-root-user", "--uts"]:
        command = [*unshare, sys.executable, "-c", _RENAMED]
        if shutil.which("unshare"):
            done = subprocess.run([*command, "-c", "print('done')"], capture_output=True, text=True)
            if done.stdout == "done\n":
                return command
    pytest.skip("this system lets nobody name a machine anew (unshare --uts)")


@pytest.mark.parametrize(
    "command",
    [
        ["pytest"],
        pytest.param(
            ["mylib.testing", "launch", "-n2", "-m", "pytest", "--multihost=member"],
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_name_that_can_not_be_resolved(folder, renamed, command):
    folder.makepyfile(
        """
        import pytest
        pytestmark = pytest.mark.multihost(processes=2, devices_per_process=1)
        def test_a(): pass
        """
    )
    done = folder.run(*renamed, "-m", *command, timeout=300)
    text = done.stdout.str() + done.stderr.str()
    assert done.ret != 0
    assert "may not be able to resolve its own name, 'nosuch.invalid'" in text, text
    assert 'echo "127.0.0.1 nosuch.invalid" >> /etc/hosts' in text

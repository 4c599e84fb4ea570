"""mylib under a real Open MPI."""

import time
from pathlib import Path

from programs import said

PROGRAMS = Path(__file__).parent / "programs.py"


def test_the_example(mpirun, example, losses):
    done = mpirun(example)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("8 devices in 2 process(es)") == 1, done.stdout
    assert done.stdout.count("losses") == done.stdout.count(losses) == 1, done.stdout


def test_verbs(mpirun):
    done = mpirun(PROGRAMS, "verbs")
    assert said(done.stdout) == [f"<{i}> sum 120 over 8 devices of 2" for i in (0, 1)], done.stdout


def test_processes_that_disagree(mpirun):
    done = mpirun(PROGRAMS, "differ")
    assert said(done.stdout) == ["<0> told: True True", "<1> told: True True"], done.stdout


def test_a_member_session(mpirun, member_session):
    done = mpirun(*member_session)
    assert done.returncode == 1, done.stdout
    assert done.stdout.count("1 failed, 1 passed") == 1, done.stdout


def test_a_process_that_is_killed(mpirun):
    """mpirun stops the others at once."""
    start = time.monotonic()
    done = mpirun(PROGRAMS, "killed", "itself")
    assert done.returncode == 137, done.stdout
    assert said(done.stdout) == ["<0> here", "<1> here"], done.stdout
    assert "exited on signal 9" in done.stdout
    assert time.monotonic() - start < 120

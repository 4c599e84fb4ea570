"""Tasks and nodes of a real SLURM that come late, die or are cancelled."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import Popen

import pytest
from programs import said
from slurm import NODES, PROGRAMS, SRUN, Slurm

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def test_a_task_that_comes_late(slurm: Slurm):
    done = slurm.run(*SRUN, sys.executable, PROGRAMS, "late", "5")
    assert (done.returncode, said(done.stdout)) == (0, ["<0> met", "<1> met"]), done.stdout


def test_a_task_that_does_not_come_in_time(slurm: Slurm):
    patience = {"MYLIB_EXCHANGE_TIMEOUT": "3"}
    done = slurm.run(*SRUN, sys.executable, PROGRAMS, "late", "15", env=patience)
    first, second = said(done.stdout)
    assert "<0> TimeoutError: process 1 did not come within 3 s" in first
    assert "<1> TimeoutError: this process came too late" in second
    assert done.returncode == 3, done.stdout


def test_a_task_that_is_killed(slurm: Slurm):
    done = slurm.run(
        *SRUN, "--kill-on-bad-exit=1", sys.executable, PROGRAMS, "killed", "itself", timeout=90
    )
    assert said(done.stdout) == ["<0> here", "<1> here"], done.stdout
    assert done.returncode == 137, done.stdout
    assert "task 1: Killed" in done.stdout


@contextmanager
def waiting_step(slurm: Slurm, *options: str) -> Iterator[Popen[str]]:
    """A step in which process 0 waits for process 1, which never comes."""
    with slurm.begin(*SRUN, *options, sys.executable, PROGRAMS, "killed", "no") as step:
        try:
            assert step.stdout is not None
            for _ in range(2):
                while not (line := step.stdout.readline()).startswith("<"):
                    assert line, step.wait()
            yield step
        finally:
            step.kill()


def test_a_step_that_is_cancelled(slurm: Slurm):
    with waiting_step(slurm, "--job-name=cancelled") as step:
        slurm.run("scancel", "--signal=KILL", "--name=cancelled")
        out, _ = step.communicate(timeout=90)
    assert step.returncode == 137, out


def test_a_node_that_dies(slurm: Slurm):
    with waiting_step(slurm) as step:
        slurm.kill_node(NODES[1])
        try:
            out, _ = step.communicate(timeout=120)
        finally:
            slurm.start_node(NODES[1])
            slurm.wait_for_nodes()
    assert step.returncode != 0, out
    assert "<0> met" not in out

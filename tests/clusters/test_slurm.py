"""mylib under a real SLURM, with two nodes on this machine."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

import pytest
from programs import said
from slurm import NODES, Slurm

PROGRAMS = str(Path(__file__).parent / "programs.py")
SRUN = ("srun", "-N2", "-n2")


@pytest.fixture(autouse=True)
def nothing_is_left(slurm: Slurm):
    """No job and no process, however a test ends."""
    yield
    slurm.run("scancel", "--user=root", "--full")
    slurm.wait_until(lambda: not slurm.run("squeue", "-h").stdout.strip())
    slurm.wait_until(lambda: not slurm.running(PROGRAMS))


def test_the_example(slurm: Slurm, example, losses):
    done = slurm.run(*SRUN, sys.executable, str(example))
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("8 devices in 2 process(es)") == 1, done.stdout
    assert done.stdout.count("losses") == done.stdout.count(losses) == 1, done.stdout


def test_a_pipeline(slurm: Slurm, example):
    """Each task has a stage; the losses are those of one process with both."""
    pipeline = str(example.parent / "pipeline.py")
    env = {name: value for name, value in slurm.env.items() if not name.startswith("SLURM")}
    alone = subprocess.run(
        [sys.executable, pipeline], env=env, capture_output=True, text=True, timeout=250, check=True
    )
    losses = alone.stdout.splitlines()[-1]
    assert losses.startswith("losses")
    done = slurm.run(*SRUN, sys.executable, pipeline)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("8 devices in 2 process(es)") == 1, done.stdout
    assert done.stdout.count(losses) == 1, done.stdout


def test_what_launch_prints(slurm: Slurm, example, losses):
    """A script that runs on a laptop is started by this command on the cluster."""
    launch = [sys.executable, "-m", "mylib.testing", "launch", "-n2", "--devices-per-process=4"]
    printed = slurm.run(*launch, "--print=slurm", str(example)).stdout.strip()
    assert printed.startswith("srun --ntasks=2 --kill-on-bad-exit=1 env JAX_PLATFORMS=cpu ")
    folder = str(Path(sys.executable).parent)
    env = {"JAX_NUM_CPU_DEVICES": "1", "PATH": f"{folder}:{slurm.env['PATH']}"}
    done = slurm.run("bash", "-c", printed, env=env)
    assert done.returncode == 0, done.stdout
    assert losses in done.stdout


def test_the_script_for_gpus(slurm: Slurm, example, losses, tmp_path):
    """With one task on each node instead of eight, and without the GPUs, which are not here."""
    shutil.copy(example, tmp_path / "train.py")
    script, out = example.parent / "clusters" / "slurm_gpus.sbatch", tmp_path / "out.txt"
    fewer = ["--ntasks-per-node=1", "--gpus-per-node=0", f"--output={out}", f"--chdir={tmp_path}"]
    path = {"PATH": f"{Path(sys.executable).parent}:{slurm.env['PATH']}"}
    slurm.run("sbatch", *fewer, str(script), env=path)
    slurm.wait_until(lambda: out.exists() and losses in out.read_text(), out)


def test_verbs(slurm: Slurm):
    done = slurm.run(*SRUN, sys.executable, PROGRAMS, "verbs")
    assert said(done.stdout) == [f"<{i}> sum 120 over 8 devices of 2" for i in (0, 1)], done.stdout


def test_two_tasks_on_each_node(slurm: Slurm):
    done = slurm.run("srun", "-N2", "-n4", sys.executable, PROGRAMS, "verbs")
    assert said(done.stdout) == [f"<{i}> sum 120 over 16 devices of 4" for i in range(4)], (
        done.stdout
    )


def test_processes_that_disagree(slurm: Slurm):
    done = slurm.run(*SRUN, sys.executable, PROGRAMS, "differ")
    assert said(done.stdout) == ["<0> told: True True", "<1> told: True True"], done.stdout


def test_a_member_session(slurm: Slurm, member_session):
    done = slurm.run(*SRUN, sys.executable, *member_session)
    assert done.returncode == 1, done.stdout
    assert done.stdout.count("1 failed, 1 passed") == 1, done.stdout
    assert "process 1 of 2: assert 1 == 0" in done.stdout


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


def test_training_resumes_when_a_job_is_requeued(slurm: Slurm, tmp_path):
    def losses_of(folder: Path, stop_at: int) -> list[str]:
        folder.mkdir()
        script = folder / "job.sh"
        command = f"{sys.executable} {PROGRAMS} train {folder} 8 {stop_at}"
        script.write_text(f"#!/bin/bash\nsrun {command}\n")
        out = folder / "out.txt"
        options = ["-N2", "-n2", "--requeue", "--open-mode=append", f"--output={out}"]
        job = slurm.run("sbatch", "--parsable", *options, str(script)).stdout.strip()
        if stop_at:
            slurm.wait_until(lambda: all((folder / f"stopped{i}").exists() for i in (0, 1)), out)
            slurm.run("scontrol", "requeue", job)
            # SLURM would wait for two minutes.
            slurm.wait_until(lambda: "PD" in slurm.run("squeue", "-h", "-o", "%t").stdout)
            slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")
            slurm.wait_until(lambda: "goes on at" in out.read_text(), out)
        slurm.wait_until(lambda: out.exists() and out.read_text().count("step 7 ") == 2, out)
        told = said(out.read_text())
        assert not stop_at or f"<1> goes on at {stop_at}" in told
        return [line for line in told if " step " in line]

    whole = losses_of(tmp_path / "whole", 0)
    assert len(whole) == 16
    assert losses_of(tmp_path / "requeued", 3) == whole

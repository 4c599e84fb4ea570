"""mylib under a real SLURM, with two nodes on this machine."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from programs import said
from slurm import PROGRAMS, SRUN, Slurm

pytestmark = pytest.mark.usefixtures("nothing_is_left")


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

"""A checkpoint of Orbax that a job on two nodes has written, read by one process."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from needs import skip_unless_required
from programs import said
from slurm import Slurm

PROGRAMS = str(Path(__file__).parent / "programs.py")
EXAMPLE = Path(__file__).parents[2] / "examples/gpt.py"


@pytest.fixture
def orbax(request: pytest.FixtureRequest) -> None:
    if importlib.util.find_spec("orbax") is None:
        reason = "Orbax is not installed: python -m pip install orbax-checkpoint"
        skip_unless_required(request.config, "--require-clusters", reason)


@pytest.mark.usefixtures("orbax")
def test_saved_on_two_nodes_and_restored_in_one_process(slurm: Slurm, tmp_path):
    done = slurm.run("srun", "-N2", "-n2", sys.executable, PROGRAMS, "save", str(tmp_path))
    assert done.returncode == 0, done.stdout
    assert said(done.stdout) == [f"<{i}> saved from 8 devices of 2" for i in (0, 1)], done.stdout
    done = slurm.run("srun", "-N1", "-n1", sys.executable, PROGRAMS, "restore", str(tmp_path))
    assert done.returncode == 0, done.stdout
    assert said(done.stdout) == ["<0> restored on 4 devices of 1"], done.stdout


@pytest.mark.usefixtures("orbax")
def test_a_gpt_is_saved_and_resumed_on_another_mesh(checkout_env):
    """The example, which everywhere else has no Orbax to save with."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        env=checkout_env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr

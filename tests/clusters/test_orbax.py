"""A checkpoint of Orbax that a job on two nodes has written, read by one process."""

import sys
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest
from programs import model, said
from slurm import Slurm

import mylib

PROGRAMS = str(Path(__file__).parent / "programs.py")


@pytest.fixture
def ocp(request: pytest.FixtureRequest):
    try:
        import orbax.checkpoint
    except ImportError:
        reason = "Orbax is not installed: python -m pip install orbax-checkpoint"
        if request.config.getoption("--require-clusters"):
            pytest.fail(f"--require-clusters: {reason}")
        pytest.skip(reason)
    return orbax.checkpoint


def test_saved_on_two_nodes_and_restored_in_one_process(ocp, slurm: Slurm, tmp_path):
    done = slurm.run("srun", "-N2", "-n2", sys.executable, PROGRAMS, "save", str(tmp_path))
    assert done.returncode == 0, done.stdout
    assert said(done.stdout) == [f"<{i}> saved from 8 devices of 2" for i in (0, 1)], done.stdout
    mesh = mylib.make_mesh(data=2, model=-1)
    rule = mylib.rules.fsdp("data")
    wanted = mylib.filter_shard(eqx.filter_eval_shape(model), rule, mesh=mesh)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "model", wanted)
    for x, y in zip(jax.tree.leaves(restored), jax.tree.leaves(model()), strict=True):
        np.testing.assert_array_equal(x, y)
    mylib.testing.assert_placed(restored, rule, mesh=mesh)

"""A checkpoint of Orbax that a job on two nodes has written, read by one process."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from needs import skip_unless_required
from programs import said
from slurm import Slurm

import mylib
from mylib import mpmd

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


@pytest.mark.usefixtures("orbax")
def test_a_pipeline_of_two_stages_is_restored_as_four(tmp_path):
    """What is saved is the list of layers, which knows nothing of stages."""
    import orbax.checkpoint as ocp

    layers = [eqx.nn.Linear(16, 16, key=key) for key in jax.random.split(jax.random.key(0), 4)]

    def placed(stages: int, tree: list[Any]) -> list[Any]:
        meshes = mpmd.split(mylib.make_mesh(stage=stages, data=-1), "stage")
        rule = mylib.rules.fsdp("data", min_size=1)
        return [
            mylib.filter_device_put(layer, rule, mesh=meshes[i * stages // 4])
            for i, layer in enumerate(tree)
        ]

    saved, wanted = placed(2, layers), placed(4, eqx.filter_eval_shape(lambda: layers))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", saved)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "model", wanted)
    for layer, shapes, before in zip(restored, wanted, layers, strict=True):
        assert layer.weight.sharding == shapes.weight.sharding
        np.testing.assert_array_equal(layer.weight, before.weight)

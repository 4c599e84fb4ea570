"""The script for a team under a real SLURM: without a lost task, and started again."""

import sys
from pathlib import Path

import pytest
from slurm import Slurm

SCRIPT = Path(__file__).parents[2] / "examples" / "clusters" / "slurm_elastic.sbatch"
TRAIN = """
import os, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
import mylib

mylib.elastic.initialize(heartbeat_timeout_seconds=8)
team = mylib.elastic.Team(data=4, at_least=AT_LEAST)
data = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
w = mylib.filter_shard(jnp.zeros(4), P("data"), mesh=team.mesh)
again = os.environ.get("SLURM_RESTART_COUNT", "0")

@mylib.filter_jit(out_shardings=(P("data"), P()))
def step(w, x):
    loss, slope = jax.value_and_grad(lambda w: jnp.mean((x @ w - 1) ** 2))(w)
    return w - 0.1 * slope, loss

def read(n, rows):
    if n == 3 and again == "0" and jax.process_index() == 1:
        os.kill(os.getpid(), 9)
    return data[rows]

try:
    for n, w, loss in team.steps(step, w, read, rows=64, stop=6):
        pass
    print(f"<{jax.process_index()}> again {again}, without {len(team.lost)}\\n", end="", flush=True)
except mylib.errors.TeamError as error:
    sys.exit(mylib.elastic.RESTART if error.restart else 1)
"""


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize("at_least", [1, 2])
def test_the_script_for_a_team(slurm: Slurm, at_least, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN.replace("AT_LEAST", str(at_least)))
    out = tmp_path / "out.txt"
    options = ["--parsable", "--nodes=2", f"--output={out}", f"--chdir={tmp_path}"]
    path = {"PATH": f"{Path(sys.executable).parent}:{slurm.env['PATH']}"}
    job = slurm.run("sbatch", *options, str(SCRIPT), env=path).stdout.strip()

    def state() -> str:
        return slurm.run("squeue", "-h", "--states=all", "-j", job, "-o", "%T").stdout.strip()

    if at_least == 2:
        slurm.wait_until(lambda: state() == "RUNNING", out)
        slurm.wait_until(lambda: state() == "PENDING", out)
        # SLURM would wait for two minutes.
        slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    slurm.wait_until(lambda: state() == "COMPLETED", out)
    text = out.read_text()
    if at_least == 2:
        assert "<0> again 1, without 0" in text and "<1> again 1, without 0" in text, text
    else:
        assert "<0> again 0, without 1" in text and "<1>" not in text, text

"""Real clusters on this machine: SLURM with two nodes, and Open MPI."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import slurm as slurm_here
from needs import skip_unless_required
from scripts import printed_by

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here:
            item.add_marker(pytest.mark.clusters)


def _need(config: pytest.Config, what: str, missing: list[str], packages: str) -> None:
    if missing:
        reason = f"{what} needs {', '.join(missing)}: apt-get install {packages}"
        skip_unless_required(config, "--require-clusters", reason)


@pytest.fixture(scope="session")
def slurm(request: pytest.FixtureRequest) -> Iterator[slurm_here.Slurm]:
    missing = slurm_here.missing() or ["to be started as root"] * (os.geteuid() != 0)
    _need(request.config, "SLURM", missing, "slurmctld slurmd slurm-client munge")
    with slurm_here.start() as cluster:
        yield cluster


@pytest.fixture
def nothing_is_left(slurm: slurm_here.Slurm) -> Iterator[None]:
    """No job and no process, however a test ends."""
    yield
    slurm.run("scancel", "--user=root", "--full")
    slurm.wait_until(lambda: not slurm.run("squeue", "-h").stdout.strip())
    slurm.wait_until(lambda: not slurm.is_running(slurm_here.PROGRAMS))


@pytest.fixture
def mpirun(request: pytest.FixtureRequest) -> Run:
    missing = ["mpirun"] * (shutil.which("mpirun") is None)
    _need(request.config, "Open MPI", missing, "openmpi-bin")

    def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
        # As root, as which a container often runs; and with more processes than there are cores.
        options = ["--allow-run-as-root", "--oversubscribe", "-n", "2"]
        return subprocess.run(
            ["mpirun", *options, sys.executable, *map(str, command)],
            env={**os.environ, **slurm_here.FOUR_DEVICES},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=250,
        )

    return run


@pytest.fixture(scope="session")
def example() -> Path:
    return Path(__file__).parents[2] / "examples" / "many_processes.py"


@pytest.fixture(scope="session")
def losses(example: Path) -> str:
    """What the example prints of its losses, in one process."""
    alone, losses = printed_by(example).splitlines()
    assert alone == "8 devices in 1 process(es)"
    return losses


MEMBERS = """
import jax, pytest
from mylib.testing import gather

pytestmark = pytest.mark.multihost

def test_passes():
    assert jax.process_count() == 2
    assert gather("the same") == ["the same"] * 2

def test_fails_in_one():
    assert jax.process_index() == 0
"""


@pytest.fixture
def member_session(tmp_path: Path) -> list[str]:
    """A pytest session of two tests, one of which fails in process 1."""
    (tmp_path / "test_members.py").write_text(MEMBERS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return ["-m", "pytest", "--multihost=member", "--color=no", str(tmp_path)]

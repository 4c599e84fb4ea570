"""mylib in the processes of Ray: in actors, and in those of Ray Train's trainer for JAX."""

import os
import socket
from pathlib import Path

import pytest
import slurm
from needs import skip_unless_required

pytestmark = [
    # Ray's own calls of what Ray has deprecated.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    # Ray starts its processes by a fork that executes another program at once. JAX warns of any
    # fork once it has a backend, as it has where another test ran first.
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),
]

HERE = str(Path(__file__).parent)


@pytest.fixture(scope="module")
def ray(request: pytest.FixtureRequest):
    try:
        import ray
    except ImportError:
        reason = "Ray is not installed: python -m pip install 'ray[train]'"
        skip_unless_required(request.config, "--require-clusters", reason)
    # Ray starts processes from another folder, and these find mylib, the programs and this module,
    # with what it imports.
    tests, root = map(str, Path(HERE).parents[:2])
    path = os.pathsep.join([HERE, root, tests, *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**slurm.FOUR_DEVICES, "PYTHONPATH": path}
    # It believes what it is told of GPUs. Its trainer joins processes for GPUs and TPUs only.
    ray.init(
        address="local",
        num_cpus=4,
        num_gpus=2,
        include_dashboard=False,
        runtime_env={"env_vars": env},
    )
    yield ray
    ray.shutdown()


def run_verbs() -> str:
    """What `programs.verbs` prints, in a process that has been joined with others."""
    import contextlib
    import io

    import programs

    with contextlib.redirect_stdout(io.StringIO()) as out:
        programs.verbs()
    return out.getvalue().strip()


def test_actors(ray):
    class Worker:
        def run(self, address: str, count: int, index: int) -> str:
            import jax

            jax.distributed.initialize(address, count, index)
            return run_verbs()

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{one.getsockname()[1]}"
    workers = [ray.remote(Worker).remote() for _ in range(2)]
    running = [worker.run.remote(address, 2, i) for i, worker in enumerate(workers)]
    told = ray.get(running, timeout=200)
    assert told == [f"<{i}> sum 120 over 8 devices of 2" for i in (0, 1)]


def test_the_trainer_for_jax(ray, tmp_path):
    from ray.train import RunConfig, ScalingConfig
    from ray.train.v2.jax import JaxTrainer

    def train() -> None:
        Path(tmp_path, f"{__import__('jax').process_index()}").write_text(run_verbs())

    JaxTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=2, use_gpu=True),
        run_config=RunConfig(storage_path=str(tmp_path / "ray")),
    ).fit()
    told = [(tmp_path / str(i)).read_text() for i in (0, 1)]
    assert told == [f"<{i}> sum 120 over 8 devices of 2" for i in (0, 1)]

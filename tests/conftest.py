"""What every test may rely on: 8 simulated devices, and examples that are the same in every run.

The time limit of a test is in pyproject.toml.
"""

import gc
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

# All are read once, when JAX starts. Of a flag given twice the last one counts, so ours go last.
# Machine code that is not optimised is made in half the time, which is most of what the tests
# take. XLA's own passes, which decide what is communicated and kept, are the same.
_FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
# That of JAX 0.10 can write its loops in an older way, in half the time; a JAX that doesn't know a
# flag ends the process.
if importlib.metadata.version("jaxlib").startswith("0.10."):
    _FLAGS += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}".strip()
# The threads that the simulated devices share; by default one for each core. With fewer
# threads than devices, JAX 0.10 aborts when programs with collectives follow each other closely.
os.environ["NPROC"] = "32"
# Garbage is looked for less often than by default: that took a quarter of the tests' time, as what
# JAX keeps of each program that it has compiled is looked through, too.
gc.set_threshold(20_000, 20, 20)

import changed_names  # noqa: E402
import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402
from compiled import Compiled  # noqa: E402
from progress import Progress  # noqa: E402

import mylib.testing  # noqa: E402

mylib.testing.second_backend("other", devices=4)


def pytest_configure(config: pytest.Config) -> None:
    # Not in the processes of a multihost test, which have met by now: one that is killed may leave
    # half a file.
    if config.pluginmanager.has_plugin("cacheprovider") and not jax.distributed.is_initialized():
        config.pluginmanager.register(Compiled(config.cache), "compiled")
    is_worker = hasattr(config, "workerinput")
    if not is_worker and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        config.pluginmanager.register(Progress(), "progress")


# No deadline: the first example of a shape compiles, the next ones don't.
for _name, _examples in {"steady": 20, "thorough": 50}.items():
    hypothesis.settings.register_profile(
        _name, derandomize=True, deadline=None, max_examples=_examples, print_blob=True
    )
hypothesis.settings.register_profile("search", deadline=None, max_examples=1000, print_blob=True)
hypothesis.settings.load_profile("steady")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-browser",
        action="store_true",
        help="tests that need Chromium fail, and are not skipped, where it is missing",
    )
    parser.addoption(
        "--require-clusters",
        action="store_true",
        help="tests that need SLURM or Open MPI fail, and are not skipped, where it is missing",
    )


# With `--dist=loadfile` one worker runs all of a file: others wait for a long one that comes last.
_LONGEST = [
    "test_multihost.py",
    "test_docs.py",
    "test_examples.py",
    "test_plan_by_hand.py",
    "test_models.py",
    "test_training_steps.py",
    "test_pipeline_processes.py",
    "test_jit.py",
    "test_shard_map.py",
    "test_fully_shard.py",
    "test_transfer_program.py",
    "test_pipeline.py",
    "test_data_processes.py",
    "test_prefetch.py",
    "test_data.py",
    "test_multihost_plugins.py",
    "test_strategies.py",
    "test_processes_training.py",
    "test_checkpoint.py",
    "test_transfer_faults.py",
    "test_random_layers.py",
    "test_law.py",
    "test_layers.py",
    "test_slurm.py",
    "test_slurm_faults.py",
]


def _mark_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    named, found = set(), set()
    for item in items:
        if (marker := item.get_closest_marker("everyday")) is None:
            continue
        test, case = item.nodeid.split("[")[0], item.callspec.id
        named.update((test, name) for name in marker.args)
        found.add((test, case))
        if case not in marker.args:
            item.add_marker(marker.kwargs.get("rest", "slow"))
    # Of a test that is asked for by the name of one case the others aren't collected.
    if not any("::" in arg for arg in config.args) and (missing := sorted(named - found)):
        raise pytest.UsageError(f"`everyday` names cases that don't exist: {missing}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    first = {name: place for place, name in enumerate(_LONGEST)}
    assert first.keys() <= {path.name for path in Path(__file__).parent.rglob("test_*.py")}
    items.sort(key=lambda item: (first.get(item.path.name, len(first)), str(item.path)))
    _mark_cases(config, items)


def _begin_elsewhere(config: pytest.Config) -> None:
    """Each worker of pytest-xdist collects other files first: in a fresh checkout all would make
    the byte code of the same files at once, which takes twice as long as the rest of collecting.
    """
    worker = getattr(config, "workerinput", None)
    if worker is None or config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    files = sorted(map(str, Path(__file__).parent.rglob("test_*.py")))
    start = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    config.args = files[start:] + files[:start]


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    _begin_elsewhere(session.config)
    gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    # What has been imported and collected never becomes garbage, so none was looked for.
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        try:
            jax.devices("gpu")
        except RuntimeError:
            pytest.skip("needs a real GPU")


@pytest.fixture(scope="session", autouse=True)
def other_libraries_are_as_before() -> Iterator[None]:
    """After all tests, too, and so after every call of ours."""
    before = changed_names.now()
    yield
    assert changed_names.now() == before


@pytest.fixture(scope="session")
def checkout_env() -> dict[str, str]:
    """The environment of a script that must import the same `mylib` as the tests do."""
    spec = importlib.util.find_spec("mylib")
    assert spec is not None and spec.origin is not None
    here = Path(spec.origin).parent.parent
    paths = [str(here), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


@pytest.fixture(scope="session")
def cache_env(pytestconfig: pytest.Config) -> dict[str, str]:
    """For the environment of a script: it may use what earlier ones have compiled."""
    compiled = pytestconfig.pluginmanager.get_plugin("compiled")
    return compiled.env() if compiled else {}

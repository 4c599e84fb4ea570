"""The pytest plugin of `mylib.testing`, which pytest loads wherever mylib is installed.

It is no part of the package because pytest would then import JAX in every session, before any
`conftest.py` can set the variables that JAX reads when it is imported.
"""

import gc
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# In a session that is one of several: what speaks with the others.
_worker = pytest.StashKey[Any]()
_member = pytest.StashKey[Any]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("multihost", "tests that run in several processes (mylib.testing)")
    group.addoption(
        "--multihost",
        choices=["spawn", "member", "skip"],
        default="spawn",
        help="spawn: start the processes here (default). member: this is one of the processes, all "
        "of which a cluster has started with the same command. skip: skip such tests",
    )
    group.addoption(
        "--multihost-platform",
        choices=["cpu", "cuda"],
        default="cpu",
        help="where tests run that don't name a platform (default: cpu)",
    )
    try:
        parser.getgroup("mylib").addoption(
            "--snapshot-update",
            action="store_true",
            help="write the snapshots of programs that the fixture program_snapshot compares with",
        )
    except ValueError:
        pass  # another plugin has an option of this name, and means the same by it
    group = parser.getgroup("compilers", "tests that compile for machines that you don't have")
    group.addoption(
        "--require-compilers",
        action="store_true",
        help="fail tests marked compiles_for, rather than skip them, where a compiler is missing",
    )
    parser.addini("multihost_timeout", "seconds that one test may take (120)", default="120")
    parser.addini(
        "multihost_grace",
        "seconds that the other processes get when one has failed (3)",
        default="3",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    # Before a conftest.py can look at JAX's devices. Not for what this process starts:
    channel = os.environ.pop("MYLIB_TESTING_CHANNEL", None)
    if channel is not None:
        # Searching what is imported for garbage takes a tenth of the time in which this starts.
        gc.disable()
        from mylib._testing.worker import Worker

        gc.enable()
        worker = early_config.stash[_worker] = Worker(int(channel))
        early_config.pluginmanager.register(worker)
    elif early_config.known_args_namespace.multihost == "member":
        from mylib._testing.member import Member

        member = early_config.stash[_member] = Member()
        early_config.pluginmanager.register(member)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "multihost(processes=2, devices_per_process=4, platform=None, timeout=None, fresh=False, "
        "env={}): run this test in so many processes at once, joined by jax.distributed",
    )

    config.addinivalue_line(
        "markers",
        "compiles_for('h100 x 8', 'v5e 4x4', ...): run this test once for each of these machines, "
        "which you needn't have; the fixture `machine` gives it",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    names = [x for mark in metafunc.definition.iter_markers("compiles_for") for x in mark.args]
    if not names:
        return
    if "machine" not in metafunc.fixturenames:
        raise pytest.UsageError(
            f"{metafunc.definition.nodeid} is marked compiles_for, so it has to take the fixture "
            "`machine`"
        )
    metafunc.parametrize("machine", names, indirect=True)


@pytest.fixture
def machine(request: pytest.FixtureRequest) -> Any:
    """The machine that a test marked `compiles_for` is to compile for: a
    `mylib.machines.Machine`. The test is skipped where its compiler is not installed.
    """
    if not hasattr(request, "param"):
        pytest.fail("the fixture `machine` is for tests with @pytest.mark.compiles_for('h100 x 8')")
    from mylib._programs import machines

    found = machines.Machine.of(request.param)
    try:
        machines.require(found.chip.platform)
    except machines.CompilerError as error:
        if request.config.option.require_compilers:
            pytest.fail(f"--require-compilers: {error}", pytrace=False)
        pytest.skip(str(error))
    return found


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.get_closest_marker("multihost") and item.config.pluginmanager.hasplugin("xdist"):
        # With --dist=loadgroup one of its workers has all the processes.
        item.add_marker(pytest.mark.xdist_group("multihost"))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _worker in config.stash or not any(x.get_closest_marker("multihost") for x in items):
        return
    if config.option.multihost == "skip":
        skip = pytest.mark.skip(reason="--multihost=skip")
        for item in items:
            if item.get_closest_marker("multihost"):
                item.add_marker(skip)
        return
    from mylib._testing.controller import Controller, mark

    mark(items)
    if _member not in config.stash:
        config.pluginmanager.register(Controller(config))


@pytest.fixture
def program_snapshot(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Compares what `mylib.audit` returns with a file that an earlier run has written, in a folder
    `snapshots` beside the test. `--snapshot-update` writes it.
    """
    from mylib.testing import check_snapshot

    update = bool(request.config.getoption("--snapshot-update"))
    folder = request.path.parent / "snapshots" / request.path.stem

    def check(report: Any, name: str | None = None) -> None:
        stem = re.sub(r"[^\w.-]+", "-", name or request.node.name).strip("-")
        check_snapshot(report, folder / f"{stem}.txt", update=update)

    return check


@pytest.fixture
def multihost_tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder that all processes of a test share; `tmp_path` is each one's own."""
    stash = request.config.stash
    if _member in stash:
        return stash[_member].shared_folder(tmp_path)
    return stash[_worker].shared_folder() if _worker in stash else tmp_path


@pytest.fixture
def mylib_mesh(request: pytest.FixtureRequest) -> Any:
    """A mesh of JAX's devices. By default they all lie along one axis, `data`; other meshes are
    given as indirect parameters: dicts from names to sizes, of which one may be -1 (what is left),
    or to pairs of a size and an `AxisType`.
    """
    import jax

    axes: dict[str, Any] = getattr(request, "param", {"data": -1})
    pairs = [axis if isinstance(axis, tuple) else (axis, None) for axis in axes.values()]
    sizes, kinds = zip(*pairs, strict=True)
    there, known = jax.device_count(), math.prod(size for size in sizes if size != -1)
    if known > there or (-1 in sizes and there % known):
        pytest.skip(f"needs a mesh of {axes}, and there are {there} devices")
    sizes = [there // known if size == -1 else size for size in sizes]
    usual = jax.make_mesh((1,), ("a",), devices=jax.devices()[:1]).axis_types[0]
    types = tuple(usual if kind is None else kind for kind in kinds)
    return jax.make_mesh(sizes, tuple(axes), axis_types=types)


@pytest.fixture
def second_backend() -> list[Any]:
    """The devices of a backend that isn't JAX's default one: the CPU beside an accelerator, or else
    more CPU devices, of a backend called `other`.
    """
    import jax

    from mylib.testing import second_backend

    if jax.default_backend() != "cpu":
        return jax.devices("cpu")
    try:
        return jax.devices("other")
    except RuntimeError:
        second_backend("other")
        return jax.devices("other")


@pytest.fixture
def clean_distributed(request: pytest.FixtureRequest) -> Iterator[str]:
    """The process as it was before it joined the others, for tests of `jax.distributed` itself.
    Gives an address at which a coordinator may listen. The test has to be `fresh`.
    """
    worker = request.config.stash.get(_worker, None)
    marks = request.node.iter_markers("multihost")
    if worker is None or not any(mark.kwargs.get("fresh") for mark in marks):
        pytest.fail("clean_distributed is for tests with @pytest.mark.multihost(fresh=True)")
    from jax.extend.backend import clear_backends

    worker.leave()
    clear_backends()
    yield worker.another_coordinator
    worker.leave()

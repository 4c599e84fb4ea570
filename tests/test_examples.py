"""The examples run as a newcomer would run them: scripts, and notebooks from a clean kernel."""

import importlib.util
import os
from pathlib import Path

import nbclient
import nbformat
import pytest
from scripts import printed_by

import mylib

_EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
_SCRIPTS = sorted(_EXAMPLES.glob("*.py"))
# It needs XLA's compilers for GPU and TPU.
_MACHINES = _EXAMPLES / "machines_you_dont_have.ipynb"
_NOTEBOOKS = sorted(path for path in _EXAMPLES.glob("*.ipynb") if path != _MACHINES)
_MANY_PROCESSES = _EXAMPLES / "many_processes.py"
_EVERYDAY = ["newton.py"]
# They take longest, half a minute and more each.
_THOROUGH = [
    "strategies.py",
    "evolution_strategies.py",
    "gpt.py",
    "feed_the_mesh.ipynb",
    "two_meshes.ipynb",
]
# Warnings are errors; ours of work that isn't divided, too, however small the work is.
_STRICTLY = ("-W", "error", Path(__file__).with_name("all_worth_dividing.py"))


def _name(path: Path) -> str:
    return path.name


def _marks(path: Path) -> list[pytest.MarkDecorator]:
    if path.name in _EVERYDAY:
        return []
    return [pytest.mark.thorough if path.name in _THOROUGH else pytest.mark.slow]


@pytest.fixture
def newcomer_env(checkout_env):
    # An example asks for its simulated devices itself. As in conftest.py, XLA's own passes are the
    # same, and machine code is made faster.
    env = {k: v for k, v in checkout_env.items() if k not in ("XLA_FLAGS", "NPROC")}
    return env | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "true"}


def _run(script, env, *launch):
    printed = printed_by(*(launch or _STRICTLY), script, env=env)
    assert printed.strip(), "an example that prints nothing shows nothing"
    return printed.splitlines()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(path, id=path.name, marks=_marks(path))
        for path in _SCRIPTS
        if path != _MANY_PROCESSES
    ],
)
def test_script(script, newcomer_env, cache_env):
    env = newcomer_env | cache_env
    if script.name == "evolution_strategies.py":  # it computes for longer than it compiles
        del env["JAX_DISABLE_MOST_OPTIMIZATIONS"]
    _run(script, env)


def _module(name, monkeypatch):
    for variable in ("XLA_FLAGS", "NPROC", "JAX_PLATFORMS"):  # which the script sets
        monkeypatch.setenv(variable, os.environ.get(variable, ""))
    spec = importlib.util.spec_from_file_location(name, _EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_the_demo_communicates(monkeypatch):
    """FSDP: each layer's weight is gathered when it is used, and again in the backward pass unless
    its gradient needs no weight; gradients are summed; nothing else is moved, least of all the
    batch."""
    train = _module("train", monkeypatch)
    report = train.communication(mylib.make_mesh(data=8))
    report.expect(mylib.contracts.fsdp("data", argument="model", largest="4 MiB"))
    weights = [f"model.layers[{i}].weight" for i in range(4)]
    gathers = report.among("all-gather", "data")
    for phase, gathered in {"forward": weights, "recomputed": weights[1:]}.items():
        assert sorted(a for c in gathers if c.phase == phase for a in c.arrays) == gathered
    assert {a for c in report.collectives for a in c.arrays} == set(weights)


@pytest.mark.slow
def test_what_the_gpt_communicates(monkeypatch):
    """FSDP over "data", tensor parallelism over "model": each layer gathers its weights over the
    one, twice, and sums its activations over the other."""
    gpt = _module("gpt", monkeypatch)
    report = gpt.communication(gpt.SMALL, mylib.make_mesh(data=4, model=2))
    weights = [f"model.blocks.{name}" for name in ("attend", "down", "mix", "up")]
    gathered = {"forward": [], "recomputed": []}
    for c in report.among("all-gather", "data"):
        if c.loops:
            gathered[c.phase] += c.arrays
    assert {phase: sorted(arrays) for phase, arrays in gathered.items()} == {
        "forward": weights,
        "recomputed": weights,
    }
    report.expect(
        mylib.contracts.never("all-gather", "model"),
        mylib.contracts.never("all-to-all"),
        mylib.contracts.sharded("model", axis="data", within=0.25),
    )
    sums = [c for c in report.among("all-reduce", "model") if c.loops]
    assert sum(c.times for c in sums) == 5 * gpt.SMALL.layers


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "path", [pytest.param(path, id=path.name, marks=_marks(path)) for path in _NOTEBOOKS]
)
def test_notebook(path, newcomer_env, cache_env, monkeypatch):
    """Its cells show what is committed with them; numbers and drawings are for the run to say."""
    found = _execute(path, newcomer_env | cache_env, monkeypatch, 120)
    kept = nbformat.read(path, as_version=4)
    assert [_kinds(cell) for cell in found.cells] == [_kinds(cell) for cell in kept.cells]
    assert any(_kinds(cell) for cell in kept.cells), "tools/run_notebooks.py keeps the outputs"


def _kinds(cell):
    """What a cell shows: text, a picture, ..."""
    shown = [output.get("data", {output.get("name"): ""}) for output in cell.get("outputs", ())]
    return {kind for kinds in shown for kind in kinds}


@pytest.mark.compilers
@pytest.mark.timeout(900)
@pytest.mark.compiles_for("v5e 16x16")
def test_notebook_of_machines(machine, newcomer_env, monkeypatch):
    """Its verdicts are those that are committed with it."""
    found = _execute(_MACHINES, newcomer_env, monkeypatch, 600)
    kept = nbformat.read(_MACHINES, as_version=4)
    assert [_verdicts(cell) for cell in found.cells] == [_verdicts(cell) for cell in kept.cells]
    assert sum(len(_verdicts(cell)) for cell in kept.cells) == 4


def _verdicts(cell):
    """Whether programs fit, as a cell has shown it; how many bytes is for the compiler to say."""
    outputs = cell.get("outputs", ())
    shown = [x.get("text") or x.get("data", {}).get("text/plain", "") for x in outputs]
    said = "\n".join(shown)
    return ["missing" in line for line in said.splitlines() if "the program needs" in line]


def _execute(path, env, monkeypatch, seconds):
    # The kernel of this interpreter, not one that the user has registered under the same name.
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=seconds,
        resources={"metadata": {"path": str(_EXAMPLES)}},
    )
    client.execute(env=env)
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            # The kernel's own machinery warns too much for `-W error`; its cells may not.
            assert output.get("name") != "stderr", output["text"]
    return notebook


@pytest.mark.parametrize("path", [*_NOTEBOOKS, _MACHINES], ids=_name)
def test_notebook_is_as_one_run_left_it(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell.outputs]
    assert not any(output.output_type == "error" for output in outputs)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert not any(cell.metadata for cell in notebook.cells)


def test_there_are_examples():
    assert {path.name for path in [*_SCRIPTS, *_NOTEBOOKS]} >= {"train.py", "shard_a_model.ipynb"}


# tests/clusters has it of processes that real clusters have started.
@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_many_processes(newcomer_env):
    """The same numbers in one process and in several."""
    alone, losses = _run(_MANY_PROCESSES, newcomer_env)
    assert alone == "8 devices in 1 process(es)"
    launch = ["-m", "mylib.testing", "launch", "-n2", "--devices-per-process=4"]
    said = _run(_MANY_PROCESSES, newcomer_env, *launch)
    # Gloo, by which these processes exchange what devices would, has things to say as well, in
    # whole lines and in broken ones.
    together = [line for line in said if "devices in" in line or "loss" in line]
    assert together == ["[0] 8 devices in 2 process(es)", f"[0] {losses}"]

"""The programs of examples/models: the numbers of one device, and what each strategy may send."""

import importlib.util
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_models import FOLDER, OTHERS, PROGRAMS, TRAINED, program, size_of, task_of
from scripts import printed_by

import mylib
from mylib._programs.contracts.text import bytes_in
from mylib._training.advice import replicated

_ROOT = Path(__file__).resolve().parent.parent
slow, thorough = pytest.mark.slow, pytest.mark.thorough


# Of each kind of training one program; what the others show of mylib, other tests do, too.
SLOW = ["llama", "gan", "generate"]


def strategies(*names):
    """The first of some programs is `slow`, the others `thorough`."""
    return [
        pytest.param(
            *(name, strategy),
            id=f"{name}-{strategy}",
            marks=thorough if i or name not in SLOW else slow,
        )
        for name in names
        for i, strategy in enumerate(program(name).STRATEGIES)
    ]


@pytest.fixture(autouse=True)
def all_products_are_worth_dividing(monkeypatch):
    """`ReplicatedWarning` is silent in all of them, and warnings are errors here."""
    monkeypatch.setattr(replicated, "_FEW", 1)


@pytest.fixture(scope="module")
def on_one_device():
    known = {}

    def losses(name):
        if name not in known:
            running = program("running")
            mesh = mylib.make_mesh(data=1, devices=jax.devices()[:1])
            if name in OTHERS:
                of_size = program(name).train, size_of(name)
            else:
                of_size = running.train, task_of(name)
            known[name] = of_size[0](of_size[1], running.ONE_DEVICE, mesh, 3)
        return known[name]

    return losses


@pytest.mark.parametrize(("name", "strategy"), strategies(*TRAINED))
def test_training(name, strategy, on_one_device):
    running, how = program("running"), program(name).STRATEGIES[strategy]
    mesh = mylib.make_mesh(**how.axes)
    losses = running.train(task_of(name, how), how, mesh, 3)
    np.testing.assert_allclose(losses, on_one_device(name), rtol=1e-4)
    running.report(task_of(name, how), how, mesh).expect(*how.contracts)


@pytest.mark.parametrize(("name", "strategy"), strategies(*OTHERS))
def test_training_with_a_step_of_its_own(name, strategy, on_one_device):
    module = program(name)
    how, size = module.STRATEGIES[strategy], size_of(name)
    mesh = mylib.make_mesh(**how.axes)
    losses = module.train(size, how, mesh, 3)
    np.testing.assert_allclose(losses, on_one_device(name), rtol=1e-3)
    module.report(size, how, mesh).expect(*how.contracts)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [pytest.param(False, marks=thorough), True])
def test_generated_tokens_are_those_without_a_cache(tied):
    generate, llama = program("generate"), program("llama")
    size = llama.Size(2, 32, 4, 2, 64, 64, 16, 8, tied=tied)
    model = llama.Llama(size, jax.random.key(0))
    prompts = jnp.asarray(llama.task(size).batch(0)[:, :4])
    tokens = prompts
    for _ in range(5):
        logits = eqx.filter_jit(lambda m, t: jax.vmap(m)(t))(model, tokens)
        tokens = jnp.concatenate([tokens, jnp.argmax(logits[:, -1:], -1)], 1)
    for how in generate.STRATEGIES.values():
        mesh = mylib.make_mesh(**how.axes)
        with jax.set_mesh(mesh):
            placed = mylib.filter_shard(model, how.used)
            found = generate.program(how, mesh)(placed, np.asarray(prompts), 5)
        np.testing.assert_array_equal(found, tokens[:, 4:])
    assert found.sharding.spec == jax.P("data")


@pytest.mark.parametrize(("name", "strategy"), strategies("generate"))
def test_what_generating_communicates(name, strategy):
    generate, llama = program(name), program("llama")
    how = generate.STRATEGIES[strategy]
    report = generate.report(how, mylib.make_mesh(**how.axes), llama.SMALL)
    report.expect(*how.contracts)


# The others call the same `running.main`.
@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["adapters", "generate", "unet", "gan"])
def test_program(name, checkout_env, cache_env):
    env = {k: v for k, v in (checkout_env | cache_env).items() if k not in ("XLA_FLAGS", "NPROC")}
    printed = printed_by("-W", "error", FOLDER / f"{name}.py", env=env)
    assert printed.count("\n") == len(program(name).STRATEGIES)


# Takes minutes for each program, so .ci/run does not.
@pytest.mark.thorough
@pytest.mark.compilers
@pytest.mark.timeout(900)
@pytest.mark.compiles_for("h100 x 16", "v5e 4x4")
@pytest.mark.parametrize("name", PROGRAMS)
def test_on_machines(name, machine):
    """They compile and fit, at full size."""
    running, module = program("running"), program(name)
    for strategy, how in module.STRATEGIES.items():
        mesh = machine.mesh(**how.axes)
        if name == "generate":
            report = module.report(how, mesh)
        elif name in OTHERS:
            report = module.report(module.LARGE, how, mesh)
        else:
            report = running.report(task_of(name, how, "LARGE"), how, mesh)
        fit = report.memory.fits(machine)
        assert fit, f"{strategy}: {fit}"


def imported(path):
    spec = importlib.util.spec_from_file_location(f"benchmarks_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


TABLE = imported(_ROOT / "benchmarks" / "models.py")


def test_the_table_names_programs_that_are_there():
    for row in TABLE.rows_of(TABLE.PAGE.read_text()):
        assert row.strategy in program(row.model.removesuffix(", full size")).STRATEGIES, row


# Those that compile fastest.
CHEAP = {
    "h100 x 16": [("generate", "tensor parallel"), ("gan", "FSDP")],
    "v5e 4x4": [("generate", "tensor parallel")],
}


@pytest.mark.compilers
@pytest.mark.timeout(300)
@pytest.mark.compiles_for(*CHEAP)
def test_rows_of_the_table(machine):
    """A few, again. If one differs, all rows are to be written again."""
    rows = {row[:3]: row for row in TABLE.rows_of(TABLE.PAGE.read_text())}
    for row in CHEAP[str(machine)]:
        known = rows[*row, str(machine)]
        found = TABLE.measured(*row, str(machine), hand=False)
        for column in ("memory", "temporaries", "sent"):
            was, now = (bytes_in(getattr(x, column)) for x in (known, found))
            assert now == pytest.approx(was, rel=0.05), (column, known, found)


@pytest.mark.compilers
@pytest.mark.timeout(300)
@pytest.mark.compiles_for("h100 x 16")
def test_program_for_a_machine(machine, checkout_env):
    """What a program prints with `--machine`. The others call the same `running.main`."""
    env = {k: v for k, v in checkout_env.items() if k not in ("XLA_FLAGS", "NPROC")}
    options = "--machine", str(machine), "--strategy", "FSDP"
    printed = printed_by(FOLDER / "gan.py", *options, env=env)
    assert f"FSDP on {machine}: the program needs" in printed
    assert "each device sends" in printed

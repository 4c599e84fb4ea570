"""The steps of the public examples, compiled for GPUs and TPUs that are not here.

The functions are the examples' own; the meshes that they make are of the machine's devices.
"""

import ast
import importlib.util
import json
import re
from types import SimpleNamespace

import _pages
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import mylib
from mylib.rules import fsdp

pytestmark = pytest.mark.compilers
BOTH = pytest.mark.compiles_for("h100 x 8", "v5e 2x4")
EXAMPLES = _pages.ROOT / "examples"
KEY = jax.eval_shape(lambda: jax.random.key(0))


@pytest.fixture(autouse=True)
def meshes_of_the_machine(machine, monkeypatch):
    monkeypatch.setattr(mylib, "make_mesh", machine.mesh)
    # Examples set these for themselves.
    for name in ("XLA_FLAGS", "NPROC", "JAX_PLATFORMS"):
        monkeypatch.setenv(name, "")


def shaped(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def script(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def notebook(name, *wanted):
    """What some code cells of a notebook define, each of which has one of some texts in it."""
    cells = json.loads((EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names = {}
    for text in wanted:
        (found,) = [ast.parse(x) for x in code if text in x]
        # What comes after the last function calls it, and trains.
        functions = [i for i, x in enumerate(found.body, 1) if isinstance(x, ast.FunctionDef)]
        found.body = found.body[: functions[-1]] if functions else found.body
        exec(compile(found, f"{name}.ipynb", "exec"), names)
    return SimpleNamespace(**names)


def trees(make, optimiser, kept, mesh):
    """A model and the state of its optimiser, as they are kept."""

    def both():
        model = make()
        return model, optimiser.init(eqx.filter(model, eqx.is_array))

    return mylib.filter_shard(eqx.filter_eval_shape(both), kept, mesh=mesh)


def assert_fit(machine, *programs):
    for lowered in programs:
        assert lowered.compile().fits(machine)


@BOTH
def test_evolution_strategies(machine):
    example = script("evolution_strategies")
    model = eqx.filter_eval_shape(example.make_model)
    data = shaped(64, 16), shaped(64, 4)
    train = mylib.filter_jit(example.train)
    compiled = train.lower(model, data, example.direction_made_again).compile()
    # What the example is about: in each step a device gets four bytes from each of the others. The
    # TPU's compiler sums zeros and these numbers instead of gathering them, which takes two turns.
    turns = 2 if machine.chip.platform == "tpu" else 1
    report = mylib.audit(compiled, mesh=example.MESH)
    assert {c.kind for c in report.collectives} == {"all-reduce" if turns == 2 else "all-gather"}
    assert report.wire_bytes() <= turns * 4 * 7 * example.STEPS
    assert compiled.fits(machine)


@BOTH
@pytest.mark.everyday("v5e 2x4", rest="thorough")
def test_newton(machine):
    example = script("newton")
    assert_fit(
        machine,
        mylib.filter_jit(example.kepler).lower(shaped(64), shaped(64)),
        mylib.filter_jit(example.fit).lower(shaped(2), shaped(64), shaped(64)),
    )


@BOTH
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_opaque_kernel(machine):
    """With the real kernel, where the example simulates one."""
    example = script("opaque_kernel")
    example.call = lambda kernel, *args, shape: pl.pallas_call(kernel, out_shape=shape)(*args)
    rows = P("data", None)
    mapped = mylib.filter_shard_map(
        example.normalised, mesh=example.MESH, in_specs=(rows, P()), out_specs=rows
    )
    gradient = jax.grad(lambda x, scale: jnp.sum(jnp.sin(mapped(x, scale))), (0, 1))
    compiled = mylib.filter_jit(gradient).lower(shaped(512, 128), shaped(128)).compile()
    # The gradient of the scale is summed over "data", and that is all.
    text = compiled.as_text()
    assert len(set(re.findall(r"(\S+) = [^=]* all-reduce(?:-start)?\(", text))) == 1


@BOTH
def test_train(machine):
    example, mesh = script("train"), machine.mesh(data=8)
    with jax.set_mesh(mesh):
        model, state = trees(
            lambda: eqx.nn.MLP(64, 16, 1024, 3, key=jax.random.key(0)),
            example.OPTIMISER,
            example.KEPT,
            mesh,
        )
        batch = shaped(example.BATCH, 64), shaped(example.BATCH, 16)
        batch = mylib.filter_shard(batch, P("data"))
        assert_fit(machine, example.step.lower(batch, model, state))


@BOTH
@pytest.mark.everyday("h100 x 8", rest="thorough")
def test_many_processes(machine):
    example = script("many_processes")
    make = mylib.filter_jit(example.make, out_shardings=fsdp("data"), mesh=example.mesh)
    model, state = eqx.filter_eval_shape(example.make, KEY)
    model, state = mylib.filter_shard((model, state), fsdp("data"), mesh=example.mesh)
    assert_fit(
        machine,
        make.lower(KEY),
        example.step.lower(model, state, shaped(example.BATCH, 8), shaped(example.BATCH, 1)),
    )


STRATEGIES = ["data parallel", "fully sharded", "tensor parallel"]
ALL_STRATEGIES = [
    *(pytest.param(name, marks=pytest.mark.thorough) for name in STRATEGIES),
    "tensor parallel, and fully sharded",
]


@BOTH
@pytest.mark.parametrize("name", ALL_STRATEGIES)
def test_strategies(machine, name):
    example, mesh = script("strategies"), machine.mesh(data=4, model=2)
    kept, used = example.STRATEGIES[name]
    with jax.set_mesh(mesh):
        model, state = mylib.filter_shard(eqx.filter_eval_shape(example.make, KEY), kept)
        text = shaped(example.BATCH, example.LENGTH + 1, dtype=jnp.int32)
        assert_fit(machine, example.step.lower(text, model, state, kept, used))


@BOTH
def test_gpt(machine):
    """Both machines gather each weight over "data" and sum activations over "model"."""
    example = script("gpt")
    report = example.communication(example.SMALL, machine.mesh(data=4, model=2))
    gathers = [c for c in report.among("all-gather", "data") if c.loops]
    assert {c.phase for c in gathers} == {"forward", "recomputed"}
    assert len({path for c in gathers for path in c.arrays}) == 4
    sums = [c for c in report.among("all-reduce", "model") if c.loops]
    assert sum(c.times for c in sums) == 5 * example.SMALL.layers
    report.expect(mylib.contracts.never("all-gather", "model"))
    assert report.memory.fits(machine)


@BOTH
@pytest.mark.everyday("v5e 2x4", rest="thorough")
def test_shard_a_model(machine):
    example = notebook("shard_a_model", "import equinox", "def make(", "def training_step")
    kept = fsdp("data", min_size=0)
    with jax.set_mesh(machine.mesh(data=8)):
        model, state = mylib.filter_shard(eqx.filter_eval_shape(example.make, KEY), kept)
        batch = mylib.filter_shard((shaped(256, 64), shaped(256, 16)), P("data"))
        step = example.training_step(kept, P("data"))
        assert_fit(machine, step.lower(batch, model, state))


@BOTH
@pytest.mark.everyday("h100 x 8", rest="thorough")
def test_feed_the_mesh(machine):
    example = notebook("feed_the_mesh", "from IPython.display", "def loss_fn")
    make = lambda: eqx.nn.MLP(2, "scalar", 128, 2, key=jax.random.key(0))  # noqa: E731
    model, state = trees(make, example.optimiser, P(), example.mesh)
    batch = mylib.filter_shard(
        {"x": shaped(256, 2), "y": shaped(256)}, P("data"), mesh=example.mesh
    )
    assert_fit(machine, example.step.lower(batch, model, state))

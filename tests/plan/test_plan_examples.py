"""A plan that is fixed to a strategy of examples/models compiles to the example's own program."""

from collections import Counter

import equinox as eqx
import jax
import numpy as np
import pytest
from example_models import PROGRAMS, TRAINED, program, size_of, task_of

import mylib

# Why no plan can have the others.
_NO_AXIS = "no mesh of cpu x 8 is considered with "
_REFUSED = {
    # Plans have no axes for positions or experts.
    ("llama", "FSDP, sequence parallel"): _NO_AXIS + "data=4, time=2",
    ("experts", "experts"): _NO_AXIS + "data=2, expert=4",
    ("experts", "experts, FSDP"): _NO_AXIS + "data=2, expert=4",
    "long_context": _NO_AXIS + "data=2, sequence=4",
    # It calls the parts of its model, not the model.
    "generate": "the step calls none of its models",
}


def _all():
    """Of each example the first strategy is `slow`, the others are `thorough`."""
    return [
        pytest.param(name, how, marks=pytest.mark.thorough if i else pytest.mark.slow)
        for name in PROGRAMS
        for i, how in enumerate(program(name).STRATEGIES)
    ]


def _unplaced(model, *_, **__):
    return model


def step_of(name, how):
    """The step of an example as for one device, the arguments, and the classes of its layers."""
    key, module = jax.eval_shape(lambda: jax.random.key(0)), program(name)
    size, mesh = size_of(name), mylib.make_mesh(data=1, devices=jax.devices()[:1])
    if name == "generate":
        prompts = np.zeros((size.rows, 4), np.int32)
        model = eqx.filter_eval_shape(program("llama").Llama, size, key)
        return lambda prompts, model: module.generate(model, prompts, 4), (prompts, model), None
    if name in TRAINED:
        task = task_of(name, how)
        make, step = program("running").training(task, how, mesh, _unplaced)
        batch, layers = task.batch(0), task.layers
    else:
        make, step = module.training(size, how, mesh, _unplaced)
        batch, layers = module.batch_of(size, 0), getattr(module, "Block", eqx.nn.Linear)
    made = eqx.filter_eval_shape(make.__wrapped__, key)
    return step.__wrapped__, (batch, *([made] if name == "gan" else made)), layers


def figures(report):
    copies = {"copies": "replica"}
    sent = Counter(
        (x.kind, tuple(copies.get(axis, axis) for axis in x.axes), x.times, x.bytes, x.dtype)
        for x in report.collectives
    )
    return sent, report.memory.aliased, report.memory.temporaries


def compare(name, strategy, machine):
    """A plan's program has the figures of the example's own."""
    how = program(name).STRATEGIES[strategy]
    mesh = machine.mesh(**how.axes)
    step, args, layers = step_of(name, how)
    axes = {{"copies": "replica"}.get(axis, axis): n for axis, n in mesh.shape.items()}
    fixed = {"axes": axes, "kept": how.kept, "used": how.used, "policies": ("full",)}
    plan = mylib.plan(step, *args, layers=layers, machine=machine, compile=0, **fixed)
    ours = plan.jit(step).lower(*args).compile().audit(mesh=plan.mesh)
    if name in TRAINED:
        theirs = program("running").report(task_of(name, how), how, mesh)
    else:
        theirs = program(name).report(size_of(name), how, mesh)
    (*ours, needed), (*theirs, least) = figures(ours), figures(theirs)
    assert ours == theirs and ours[0]
    # By hand the U-Net's weights are gathered before its images get noise, and in a plan after it,
    # where the model is called: arrays live a little longer (3.4 % with JAX 0.10).
    assert needed == least or (name == "unet" and abs(needed / least - 1) < 0.04)


@pytest.mark.parametrize(("name", "strategy"), _all())
def test_is_the_program_of_the_example(name, strategy):
    told = _REFUSED.get((name, strategy), _REFUSED.get(name))
    if told is not None:
        with pytest.raises(mylib.errors.PlanError, match=told):
            compare(name, strategy, mylib.machines.here())
    else:
        compare(name, strategy, mylib.machines.here())


@pytest.mark.compilers
@pytest.mark.timeout(600)
@pytest.mark.compiles_for("h100 x 16")
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("llama", "FSDP, tensor parallel"),
        pytest.param("llama", "HSDP", marks=pytest.mark.thorough),
        ("gan", "FSDP"),
    ],
)
def test_is_the_program_of_the_example_on_gpus(name, strategy, machine):
    compare(name, strategy, machine)


# Those for GPUs are compared each day.
@pytest.mark.thorough
@pytest.mark.compilers
@pytest.mark.timeout(900)
@pytest.mark.compiles_for("v5e 2x4")
@pytest.mark.parametrize(
    ("name", "strategy"),
    [("llama", "FSDP"), ("llama", "FSDP, tensor parallel"), ("vit", "tensor parallel")],
)
def test_is_the_program_of_the_example_on_tpus(name, strategy, machine):
    compare(name, strategy, machine)

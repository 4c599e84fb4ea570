"""Plans for machines that are not here, by their compilers."""

import jax
import jax.numpy as jnp
import planned_steps as steps
import pytest

import mylib
from mylib._planning.plan.candidates import priced
from mylib._planning.plan.plan import plan_of
from mylib._planning.plan.trace import PlannedStep, trace

pytestmark = pytest.mark.compilers


@pytest.mark.compiles_for("h100 x 8")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("FSDP 8", marks=pytest.mark.thorough),
        "FSDP 4 x TP 2",
    ],
)
def test_prices_are_those_of_the_compiled_program(machine, name):
    """In a scan. Collectives over "model" aren't compared: compilers write them in several ways."""
    make = lambda key: steps.StackedTransformer(key, width=512, heads=8, depth=4, vocab=1024)  # noqa: E731
    args = steps.abstract(make, jax.ShapeDtypeStruct((64, 129), jnp.int32))
    step = steps.step_of(steps.language_loss)
    traced = trace(PlannedStep.of(step, args), "full", (steps.PlainBlock,))
    (one,) = [x for x in priced(traced, machine, float("inf")) if x.name == name]
    plan = plan_of([one], [], machine, float("inf"), False, None)
    compiled = plan.jit(step).lower(*args).compile()
    report = compiled.audit(mesh=plan.mesh)
    gathered = report.bytes("all-gather", axes="data")
    assert abs(one.price.sent["all-gather over data"] / gathered - 1) < 0.05
    assert 0.5 < one.price.memory / report.memory.peak < 1.5


@pytest.mark.compiles_for("h100 x 8")
def test_the_fastest_that_fits(machine):
    plan = mylib.plan(steps.STEP, *steps.MLP, machine=machine, policies=("full",), compile=1)
    assert plan.chosen.compiled and plan.audit.axes == plan.axes
    low, high = plan.seconds
    assert 0 < low <= plan.chosen.seconds <= high

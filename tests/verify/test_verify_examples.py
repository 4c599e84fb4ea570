"""The steps of examples/models are those of one device, by `verify`."""

import equinox as eqx
import jax
import pytest
from example_models import TRAINED, program, task_of

import mylib
from mylib.testing import verify

CASES = [(name, strategy) for name in TRAINED for strategy in program(name).STRATEGIES]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_the_steps_of_examples(name, strategy):
    running, how = program("running"), program(name).STRATEGIES[strategy]
    task, mesh = task_of(name, how), mylib.make_mesh(**how.axes)
    make, step = running.training(task, how, mesh)
    model, state = eqx.filter_eval_shape(make, jax.random.key(0))
    with jax.set_mesh(mesh):
        assert verify(step, task.batch(0), model, state).wide

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
    reference = alone(running, how, mesh, (model, state)) if name == "long_context" else None
    with jax.set_mesh(mesh):
        assert verify(step, task.batch(0), model, state, reference=reference).wide


def alone(running, how, mesh, given):
    """The step with the attention of one device, which isn't written per device."""
    options = {**how.options, "attention": program("long_context").alone}
    task = task_of("long_context", how._replace(options=options))
    make, step = running.training(task, how, mesh)
    plain = eqx.filter_eval_shape(make, jax.random.key(0))

    def like(tree, other):
        return jax.tree.unflatten(jax.tree.structure(tree), jax.tree.leaves(other))

    def run(batch, *given_arrays):
        model, state, loss = step.__wrapped__(batch, *like(plain, given_arrays))
        return *like(given, (model, state)), loss

    return run

"""Plans in several processes."""

import jax
import numpy as np
import planned_steps as steps
import pytest
from agreeing import all_equal

import mylib


@pytest.mark.slow
@pytest.mark.multihost(processes=2, devices_per_process=2)
def test_all_read_one_plan():
    step, args = steps.step_of(steps.squared_loss), steps.abstract(steps.mlp, steps.ROWS)
    with pytest.raises(ValueError, match="2 processes might choose different plans"):
        mylib.plan(step, *args, policies=("full",))
    options = {"policies": ("full",), "compile": 0, "axes": {"data": 2, "model": 2}}
    plan = mylib.Plan.of(mylib.plan(step, *args, **options).as_text())
    all_equal(plan.as_text())
    model, state = plan.make(lambda key: steps.with_state(steps.mlp(key)), jax.random.key(0))
    *_, loss = plan.jit(step)(np.ones((16, 64), np.float32), model, state)
    all_equal(float(loss))
    assert loss > 0

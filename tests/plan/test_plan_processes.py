"""Plans in several processes."""

import jax
import numpy as np
import planned_steps as steps
import pytest
from agreeing import all_equal
from planned_steps import MLP, STEP, modelled

import mylib


@pytest.mark.slow
@pytest.mark.multihost(processes=2, devices_per_process=2)
def test_all_read_one_plan():
    with pytest.raises(ValueError, match="2 processes might choose different plans"):
        mylib.plan(STEP, *MLP, policies=("full",))
    plan = mylib.Plan.of(modelled(STEP, *MLP, axes={"data": 2, "model": 2}).as_text())
    all_equal(plan.as_text())
    model, state = plan.make(lambda key: steps.with_state(steps.mlp(key)), jax.random.key(0))
    *_, loss = plan.jit(STEP)(np.ones((16, 64), np.float32), model, state)
    all_equal(float(loss))
    assert loss > 0

"""Random steps have the numbers of one device under a plan, where the plan says, or are refused by
one of its sentences. `random_steps.py` runs more of them by hand.
"""

from dataclasses import fields

import numpy as np
import pytest
from random_models import PARTS
from random_steps import OPTIONS, draw, run, same

EVERYDAY = (2, 3, 12)
SLOW = range(20, 24)
THOROUGH = range(30, 60)


@pytest.mark.parametrize("seed", EVERYDAY)
def test_a_random_step_is_planned(seed):
    outcome = run(draw(seed), calls=0)
    assert outcome.kind == "passed", f"{draw(seed)}\n{outcome.why}"


@pytest.mark.parametrize(
    "seed",
    [
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW),
        *(pytest.param(seed, marks=pytest.mark.thorough) for seed in THOROUGH),
    ],
)
def test_a_random_step_has_the_numbers_of_one_device(seed):
    outcome = run(draw(seed))
    assert outcome.kind != "failed", f"{draw(seed)}\n{outcome.why}"


def test_the_thorough_programs_have_something_of_everything():
    programs = [draw(seed) for seed in (*SLOW, *THOROUGH)]
    for name, options in OPTIONS.items():
        seen = {getattr(program, name) for program in programs}
        assert len(seen) > 0.6 * len({*options}), name
    assert {part for program in programs for part in program.parts} == {*PARTS}
    assert {field.name for field in fields(programs[0])} - {"seed", "parts"} == {*OPTIONS}


def test_wrong_numbers_are_found():
    with pytest.raises(AssertionError, match=r"first: \['a'\] is off by 1, of 1"):
        same({"a": np.ones(3)}, {"a": np.zeros(3)}, None, "first: ")

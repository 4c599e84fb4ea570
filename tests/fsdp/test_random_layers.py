"""Random models and programs of `fully_shard` have the numbers and shardings that they should have,
or are refused by one of its sentences. `random_layers.py` runs more of them by hand.
"""

from dataclasses import fields, replace

import numpy as np
import pytest
from layer_kinds import ORDINARY
from random_layers import (
    DERIVATIVES,
    MESHES,
    Program,
    compare_all,
    draw,
    draw_derivative,
    run,
)

# The quickest among the first, all of which pass or are refused.
EVERYDAY = (25,)
THOROUGH = [seed for seed in range(36) if seed not in EVERYDAY]


@pytest.mark.parametrize("seed", EVERYDAY)
def test_a_random_program(seed):
    outcome = run(draw(seed))
    assert outcome.kind in ("passed", "refused"), f"{draw(seed)}\n{outcome.why}"


@pytest.mark.thorough
@pytest.mark.parametrize("seed", THOROUGH)
def test_more_random_programs(seed):
    outcome = run(draw(seed))
    assert outcome.kind != "failed", f"{draw(seed)}\n{outcome.why}"


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.everyday("7", rest="thorough")
def test_random_derivatives_on_explicit_axes(seed):
    outcome = run(draw_derivative(seed))
    assert outcome.kind != "failed", f"{draw_derivative(seed)}\n{outcome.why}"


@pytest.mark.thorough
@pytest.mark.parametrize("reduce_dtype", ["float64", None])
@pytest.mark.parametrize("kind", ORDINARY)
def test_every_kind_of_layer(kind, reduce_dtype):
    layers = "mapping" if kind == "Codec" else "class"
    outcome = run(Program(0, kinds=(kind,), layers=layers, reduce_dtype=reduce_dtype))
    assert outcome.kind == "passed", outcome.why


def test_the_thorough_programs_have_something_of_everything():
    derivatives = [draw_derivative(seed) for seed in range(24)]
    assert {program.derivative for program in derivatives} == {*DERIVATIVES}
    programs = [*derivatives, *(draw(seed) for seed in (*EVERYDAY, *THOROUGH))]
    assert {program.mesh for program in programs} == {*MESHES}
    for field in fields(Program):
        values = {getattr(program, field.name) for program in programs}
        assert len(values) > 1 or field.name == "seed"
    assert len({kind for program in programs for kind in program.kinds}) > 0.8 * len(ORDINARY)


SMALL = Program(0, top="nothing")
CONTRADICTIONS = {
    "prefetch= is for layers that aren't stacked": {"arrangement": "stack", "prefetch": 1},
    "options that contradict each other": {"in_turn": False, "prefetch": 2},
    "a policy for layers that aren't rematerialised": {
        "policy": "dots_saveable", "checkpoint": False
    },
    "a stack of small arrays, split by layer": {
        "arrangement": "stack", "kinds": ("Rounded",), "kept": "unaware", "mesh": "4x2",
        "types": "aa",
    },
    "the same on Explicit axes, by JAX": {
        "arrangement": "stack", "kinds": ("Rounded",), "kept": "unaware", "mesh": "4x2",
        "types": "ee",
    },
    "a narrower reduce_dtype": {"dtype": "float32", "reduce_dtype": "bfloat16"},
    "layers of tied weights": {"kinds": ("Linears",), "layers": "inner", "top": "tied"},
}  # fmt: skip


@pytest.mark.parametrize("why", CONTRADICTIONS)
@pytest.mark.everyday(
    "a stack of small arrays, split by layer",
    "layers of tied weights",
    "a policy for layers that aren't rematerialised",
    "options that contradict each other",
    "a narrower reduce_dtype",
)
def test_what_is_refused(why):
    outcome = run(replace(SMALL, **CONTRADICTIONS[why]))
    assert (outcome.kind, outcome.why) == ("refused", why)


def test_wrong_numbers_are_found():
    expected = {"weight": np.ones(3), "scale": np.full((), 0.001)}
    compare_all("gradients", expected, expected, 1e-8)
    with pytest.raises(AssertionError, match=r"gradients\['scale'\] is off by 0.001, of 0.001"):
        compare_all("gradients", {**expected, "scale": np.zeros(())}, expected, 1e-8)
    with pytest.raises(AssertionError, match="has the leaves"):
        compare_all("gradients", {"weight": np.ones(3)}, expected, 1e-8)

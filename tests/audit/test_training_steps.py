"""Contracts are true of the training steps that people write, and each kind of sabotage is told,
the weight at fault first.
"""

import itertools
import re

import jax
import pytest
from training_steps import MODELS, SABOTAGES, STRATEGIES, Step

MACHINES = pytest.mark.compiles_for("h100 x 8")
TPU = pytest.mark.compiles_for("v5e 2x4")
# Where each weight is on all devices, none is sharded by a rule.
_OF_SHARDED = ("weight", "state", "no fully_shard")


def right_steps():
    """Every model and strategy, and ways to train, pairwise."""
    ways = itertools.cycle(
        [
            {},
            {"stacked": True},
            {"optimizer": "adafactor"},
            {"clipped": True, "stacked": True},
            {"pieces": 4},
            {"dtype": "bfloat16"},
            {"dtype": "bfloat16", "clipped": True},
            {"pieces": 4, "stacked": True, "optimizer": "adafactor"},
            {"clipped": True, "optimizer": "adafactor"},
        ]
    )
    for model, strategy in itertools.product(MODELS, STRATEGIES):
        for _ in range(2):
            yield Step(model, strategy, **next(ways))


def wrong_steps():
    for model, strategy, wrong in itertools.product(MODELS, STRATEGIES, SABOTAGES):
        if strategy != "data_parallel" or wrong not in _OF_SHARDED:
            yield Step(model, strategy, wrong=wrong)


# Every day a few of them.
EVERYDAY = {
    "gpt-fsdp-adamw-list", "adapters-data_parallel-adafactor-list",
    "adapters-fsdp-adamw-list-unsummed", "experts-data_parallel-adamw-list-twice",
    "adapters-hsdp-adamw-list-state", "experts-fsdp-adamw-list-activation",
    "adapters-fsdp-adamw-list-no fully_shard", "adapters-fsdp_tp-adamw-list-weight",
}  # fmt: skip


def some(steps):
    marks = {True: [], False: pytest.mark.thorough}
    return [pytest.param(s, marks=marks[str(s) in EVERYDAY], id=str(s)) for s in steps]


def found_in(step, devices):
    report = step.audit(devices)
    return [fault for contract in step.contract for fault in contract(report)]


def assert_told(step, found):
    """The first sentence names the weight, or its state; of an activation, what moves it."""
    assert found
    if step.wrong == "activation":
        assert any("moved by all-gather over" in fault for fault in found)
        return
    key = re.escape(step.guilty().removeprefix("model")).replace(r"\[0\]", r"\[0[.1]*\]")
    layer = re.sub(r"\.\w+(\.weight)?$", "", step.guilty()).replace("[0]", "").replace("[1]", "")
    first = found[0].split(": ")[0]
    if step.wrong == "no fully_shard":  # all weights of the layers are
        assert re.sub(r"\[[\d.]+\]", "", first).startswith(layer), found
    else:
        assert re.search(key, first), found


@pytest.mark.parametrize("step", some(right_steps()))
def test_right_steps(step):
    assert found_in(step, jax.devices()) == []


@pytest.mark.parametrize("step", some(wrong_steps()))
def test_wrong_steps(step):
    assert_told(step, found_in(step, jax.devices()))

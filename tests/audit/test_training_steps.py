"""Contracts are true of the training steps that people write, and each kind of sabotage is told,
the weight at fault first.
"""

import dataclasses
import itertools
import re

import jax
import pytest
from matrix import pairwise
from training_steps import MODELS, SABOTAGES, STRATEGIES, Step

# Where each weight is on all devices, none is sharded by a rule.
_OF_SHARDED = ("weight", "state", "no fully_shard")
# What XLA makes of it without `fully_shard` gathers each weight in each pass, too.
_FSDP_ANYWAY = ("convolutions-fsdp_tp-adamw-list-no fully_shard",)


def right_steps():
    """Every model and strategy, each with two of the ways to train."""
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
            step = Step(model, strategy, **next(ways))
            # JAX's convolutions are of one dtype, and statistics are not in bfloat16.
            yield dataclasses.replace(step, dtype="float32") if model == "convolutions" else step


def wrong_steps():
    for model, strategy, wrong in itertools.product(MODELS, STRATEGIES, SABOTAGES):
        step = Step(model, strategy, stacked=model == "tied", wrong=wrong)
        sharded = strategy != "data_parallel" or wrong not in _OF_SHARDED
        if sharded and str(step) not in _FSDP_ANYWAY:
            yield step


# Every day a few of them.
EVERYDAY = {
    "adapters-fsdp-adamw-list", "adapters-hsdp-adamw-list-state",
    "experts-fsdp-adamw-list-activation", "adapters-fsdp-adamw-list-no fully_shard",
    "adapters-fsdp_tp-adamw-list-weight",
}  # fmt: skip
assert {str(step) for step in itertools.chain(right_steps(), wrong_steps())} >= EVERYDAY


def some(steps):
    steps = list(steps)
    chosen = {str(step) for step in pairwise(steps)}

    def mark(step):
        return [] if str(step) in EVERYDAY else pytest.mark.thorough

    named = [step for step in steps if str(step) in chosen | EVERYDAY]
    return [pytest.param(step, marks=mark(step), id=str(step)) for step in named]


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
    if step.wrong == "no fully_shard":  # several weights are
        key = r"^model\."
    assert re.search(key, found[0].split(": ")[0]), found


@pytest.mark.parametrize("step", some(right_steps()))
def test_right_steps(step):
    assert found_in(step, jax.devices()) == []


@pytest.mark.parametrize("step", some(wrong_steps()))
def test_wrong_steps(step):
    assert_told(step, found_in(step, jax.devices()))


# Pairwise: each model, strategy and way to train; each sabotage once a contract.
ON_GPUS = [
    Step("gpt", "data_parallel", clipped=True),
    Step("gpt", "fsdp", stacked=True, dtype="bfloat16"),
    Step("tied", "fsdp", optimizer="adafactor"),
    Step("gpt", "fsdp_tp", stacked=True, clipped=True),
    Step("experts", "hsdp", pieces=4, optimizer="adafactor"),
    Step("experts", "fsdp_tp", dtype="bfloat16"),
    Step("adapters", "data_parallel", pieces=4, stacked=True),
    Step("adapters", "hsdp", clipped=True, dtype="bfloat16"),
    Step("convolutions", "fsdp", optimizer="adafactor", clipped=True),
    Step("adapters", "data_parallel", wrong="unsummed"),
    Step("experts", "data_parallel", wrong="twice"),
    Step("gpt", "data_parallel", wrong="activation"),
    Step("experts", "fsdp", wrong="unsummed"),
    Step("adapters", "fsdp", wrong="twice"),
    Step("convolutions", "fsdp", wrong="weight"),
    Step("experts", "fsdp", wrong="state", stacked=True),
    Step("adapters", "fsdp", wrong="activation", stacked=True),
    Step("gpt", "fsdp", wrong="no fully_shard"),
    Step("experts", "fsdp_tp", wrong="unsummed", stacked=True),
    Step("adapters", "fsdp_tp", wrong="twice"),
    Step("adapters", "fsdp_tp", wrong="weight", stacked=True),
    Step("experts", "fsdp_tp", wrong="state"),
    Step("adapters", "fsdp_tp", wrong="activation"),
    Step("gpt", "fsdp_tp", wrong="no fully_shard", stacked=True),
]
ON_TPUS = [
    Step("gpt", "data_parallel", stacked=True),
    Step("gpt", "fsdp", clipped=True, dtype="bfloat16"),
    Step("adapters", "hsdp", optimizer="adafactor"),
    Step("experts", "fsdp_tp", stacked=True),
    Step("convolutions", "data_parallel", clipped=True),
    Step("adapters", "data_parallel", wrong="unsummed"),
    Step("experts", "data_parallel", wrong="twice"),
    Step("experts", "fsdp", wrong="unsummed"),
    Step("adapters", "fsdp", wrong="weight"),
    Step("adapters", "fsdp", wrong="state", stacked=True),
    Step("experts", "fsdp", wrong="activation"),
    Step("gpt", "fsdp", wrong="no fully_shard"),
]


def assert_judged(step, machine):
    found = found_in(step, list(machine.devices))
    if step.wrong:
        assert_told(step, found)
    else:
        assert found == []


@pytest.mark.compilers
@pytest.mark.thorough
@pytest.mark.compiles_for("h100 x 8")
@pytest.mark.parametrize("step", ON_GPUS, ids=str)
def test_on_gpus(machine, step):
    assert_judged(step, machine)


@pytest.mark.compilers
@pytest.mark.thorough
@pytest.mark.compiles_for("v5e 2x4")
@pytest.mark.parametrize("step", ON_TPUS, ids=str)
def test_on_tpus(machine, step):
    assert_judged(step, machine)

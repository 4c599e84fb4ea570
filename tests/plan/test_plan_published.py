"""Published steps with kernels, of `benchmarks/plan.py`, planned without a compiler."""

import importlib

import _pages
import pytest


@pytest.fixture(scope="module")
def rows():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(_pages.ROOT / "benchmarks")
        return {row.name: row for row in importlib.import_module("plan").WITH_KERNELS}


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("Llama 2 70B", "FSDP 256"),
        ("Mixtral 8x7B", "FSDP 256, saves offload_inputs"),
        ("GPT-3 175B", "FSDP 256, saves offload_inputs"),
    ],
)
def test_the_published_strategy_is_chosen(rows, name, chosen):
    """With the inputs of layers in the host's memory, where that was published, too."""
    plan = rows[name].plan(policies=("full", "offload_inputs"))
    assert plan.chosen.name == chosen
    assert 0.5 < plan.chosen.seconds / rows[name].seconds < 1


def test_the_published_strategy_is_near_the_first(rows):
    """FSDP 32 x TP 4 sends less for tensor parallelism, and fits by the model only
    (benchmarks/results/plan.md).
    """
    plan = rows["405B"].plan(policies=("full",))
    published = next(x for x in plan.others if x.name.startswith("FSDP 16 x TP 8"))
    assert published.seconds < 1.08 * plan.chosen.seconds


def test_fewer_rows_than_devices(rows):
    row = rows["70B, few rows"]
    plan = row.plan(policies=("full",))
    assert plan.chosen.name == "FSDP 16 x TP 4, splits saved"
    assert plan.chosen.memory < row.machine.memory

"""The compilers for GPUs and TPUs themselves, where they are installed."""

import jax
import known
import numpy as np
import pytest
import steps

import mylib
from mylib import contracts, machines

pytestmark = pytest.mark.compilers
MACHINES = pytest.mark.compiles_for("h100 x 8", "v5e 2x4")


@MACHINES
def test_known_answers(machine):
    devices = list(machine.devices)
    wrong = []
    count = 0
    for case in known.cases(devices):
        # The TPU's compiler joins or splits some of these; its texts are read in test_texts.py.
        if machine.chip.platform in case.without:
            continue
        count += 1
        report = mylib.audit(jax.jit(case.fun), *case.args)
        found = sorted((c.kind, c.axes, c.bytes, c.times) for c in report.collectives)
        if found != sorted(case.answer):
            wrong.append((case.name, found, case.answer))
    assert count >= 60 and not wrong


@MACHINES
@pytest.mark.parametrize("stacked", [False, True], ids=["list", "scan"])
@pytest.mark.parametrize("name", ["data_parallel", "fsdp", "tensor_parallel", "two_d"])
def test_contracts(machine, name, stacked):
    devices = list(machine.devices)
    one = known.mesh_of(devices, (8,), ("data",))
    two = known.mesh_of(devices, (4, 2), ("data", "model"))
    strategy = steps.strategies(one, two)[name]
    report = mylib.audit(strategy.step(stacked), *strategy.args(stacked))
    report.expect(
        {
            "data_parallel": contracts.data_parallel("data"),
            "fsdp": contracts.fsdp("data"),
            "tensor_parallel": contracts.tensor_parallel("model", forward=steps.LAYERS),
            "two_d": contracts.two_d("data", "model"),
        }[name]
    )
    estimate = report.estimate(machine)
    assert estimate.seconds > 0 and np.isfinite(estimate.seconds)


def test_an_estimate_says_that_it_is_one():
    """Figures that can be checked by hand."""
    mesh = known.mesh_of(jax.devices(), (8,), ("data",))
    strategy = steps.strategies(mesh, known.mesh_of(jax.devices(), (4, 2), ("data", "model")))
    strategy = strategy["data_parallel"]
    report = mylib.audit(strategy.step(True), *strategy.args(True))
    rows, pairs = strategy.rows // 8, steps.LAYERS * steps.WIDTH * steps.HIDDEN * 2
    # Forward, and twice as much backward; the first layer's input needs no gradient.
    products = 2 * rows * pairs
    assert 2.5 * products < sum(report.work.flops.values()) <= 3 * products
    chip = machines.CHIPS["h100"]
    machine = machines.Machine(chip, 1, (1, 8))
    estimate = report.estimate(machine)
    sent = report.wire_bytes() / (chip.links * chip.link_bandwidth)
    assert estimate.parts["communication over data"] == pytest.approx(sent)
    assert estimate.parts["compute"] == pytest.approx(
        sum(report.work.flops.values()) / chip.flops["float32"]
    )
    told = repr(estimate)
    assert told.startswith("an estimate: ") and "assuming peak rates" in told
    assert f"bound by {estimate.bound_by}" in told
    assert "data is within a host" in told

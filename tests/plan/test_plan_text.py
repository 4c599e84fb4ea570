"""A plan's text has all of it: it is equal to the plan, and to no other."""

import itertools
import json
from dataclasses import fields, replace

import equinox as eqx
import jax.numpy as jnp
import pytest
from planned_steps import MLP, STEP

import mylib
from mylib import machines
from mylib._planning.plan.apply import Applying

HOPPER = machines.CHIPS["h100"]
MACHINES = [
    machines.here(),
    machines.gpu("h100"),
    machines.gpu("h100", hosts=2),
    *(machines.gpu("h100", hosts=n, devices_per_host=8 // n) for n in (2, 4, 8)),
    machines.gpu("h100", devices_per_host=4),
    machines.gpu("h100", devices_per_host=16),
    machines.gpu("b200", hosts=3, devices_per_host=4),
    machines.gpu(replace(HOPPER, memory=HOPPER.memory // 2)),
    machines.gpu(replace(HOPPER, name="own", flops={"bfloat16": 1e15})),
    replace(machines.gpu(replace(HOPPER, memory=80 << 30)), is_here=True),
    machines.tpu("v5e", (4, 4)),
    machines.tpu("v5e", (2, 8)),
    machines.tpu("v5p", (4, 4, 8)),
    machines.tpu("v4", (2, 2, 2)),
]


@pytest.fixture(scope="module")
def plan():
    return mylib.plan(STEP, *MLP, machine="h100 x 64", compile=0, dtype=jnp.bfloat16)


def test_machines(plan):
    plans = [replace(plan, machine=machine) for machine in MACHINES]
    for ours in plans:
        again = mylib.Plan.of(ours.as_text())
        assert again == ours and again.machine == ours.machine and hash(again) == hash(ours)
        assert str(again) == str(ours)
    for a, b in itertools.combinations(plans, 2):
        assert a != b and a.machine != b.machine


@pytest.mark.parametrize("machine", MACHINES[1:9] + MACHINES[12:], ids=str)
def test_names_of_machines_say_all(machine):
    assert machines.Machine.of(str(machine)) == machine


def test_every_field_counts(plan):
    """What the text lacks can't differ."""
    contents = json.loads(plan.as_text())
    names = {x.name for x in fields(mylib.Plan)} | {x.name for x in fields(Applying)}
    assert names - {"applying", "audit", "_planned"} <= set(contents)
    for other in (
        replace(plan, axes={"data": 64}),
        replace(plan, notes=()),
        replace(plan, chosen=plan.others[0]),
        replace(plan, applying=replace(plan.applying, donated=())),
        replace(plan, applying=replace(plan.applying, dtype=None)),
        replace(plan, applying=replace(plan.applying, layers=(eqx.nn.MLP,))),
    ):
        assert other != plan and mylib.Plan.of(other.as_text()) == other
    # Another class of the same name.
    again = type("Linear", (), {"__module__": eqx.nn.Linear.__module__})
    assert replace(plan, applying=replace(plan.applying, layers=(again,))) != plan


def test_on_the_cluster():
    """There its devices are those that are here."""
    plan = mylib.plan(STEP, *MLP, machine="h100 x 8", axes={"data": 8}, compile=0)
    again = mylib.Plan.of(plan.as_text(), machine=machines.here())
    assert again.machine == machines.here() and again.mesh.devices[0] == machines.here().devices[0]


def test_why_not_takes_whole_names(plan):
    names = [x.name for x in (plan.chosen, *plan.others, *plan.rejected)]
    assert {"FSDP 8 x DP 8", "FSDP 8 x DP 4 x TP 2"} & {*names}
    for name in names:
        assert name in plan.why_not(name).split(" takes ")[0]
    for unknown in "FSDP 3", "FSDP 6", "FSDP 8 x", "DP 3, saves dots", "":
        with pytest.raises(
            mylib.errors.PlanError, match=r"no mesh of h100 x 64 has this.* There are "
        ):
            plan.why_not(unknown)
    with pytest.raises(mylib.errors.PlanError, match="TP stays within a host of GPUs"):
        plan.why_not("FSDP 4 x TP 16")


def test_why_not_without_the_policy():
    options = {"machine": "h100 x 8", "axes": {"data": 8}, "compile": 0}
    plan = mylib.plan(STEP, *MLP, **options, policies=("dots",))
    assert plan.why_not("FSDP 8").startswith("FSDP 8, saves dots ")
    plan = mylib.plan(STEP, *MLP, **options, policies=("dots", "all"))
    told = "'FSDP 8' may be 'FSDP 8, saves (dots' or 'FSDP 8, saves all|all' or .*dots)'"
    with pytest.raises(mylib.errors.PlanError, match=told):
        plan.why_not("FSDP 8")

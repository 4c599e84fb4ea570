"""A step under a plan is the program that is written by hand, with the numbers of one device."""

import functools
import io
import math
import sys
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import planned_steps as steps
import pytest
from jax.sharding import PartitionSpec as P
from planned_steps import MLP, STEP, modelled

import mylib
from mylib._planning.plan.candidates import priced
from mylib._planning.plan.plan import plan_of
from mylib._planning.plan.price import with_figures
from mylib._planning.plan.trace import PlannedStep, trace

KEY = jax.random.key(0)


@functools.cache
def candidates(make):
    """All strategies that layers of plain rematerialisation have here, by name."""
    step = steps.step_of(steps.language_loss)
    args = steps.abstract(make, steps.TOKENS)
    traced = trace(PlannedStep.of(step, args), "full", (steps.PlainBlock,))
    machine, _ = with_figures(mylib.machines.here())
    return step, args, {x.name: x for x in priced(traced, machine, math.inf)}


def planned(make, name):
    step, args, found = candidates(make)
    return step, args, plan_of([found[name]], [], mylib.machines.here(), math.inf, True, None)


def by_hand(plan, args):
    """As a user writes it, with the rules that `code` prints."""
    mesh, kept, used = plan.mesh, plan.kept, plan.used
    sharded = lambda m: mylib.fully_shard(m, steps.PlainBlock, kept, used, mesh=mesh)  # noqa: E731
    step = steps.step_of(steps.language_loss, sharded)
    places = plan.arguments
    return mylib.filter_jit(
        lambda batch, model, state: step(batch, model, state),
        in_shardings=tuple(places[name] for name in ("batch", "model", "state")),
        out_shardings=plan.results,
        mesh=mesh,
        donate="all-except-first",
    ).lower(*args)


def figures(lowered):
    compiled = lowered.compile()
    return steps.sent(compiled.audit()), compiled.memory.temporaries, compiled.memory.aliased


@pytest.mark.slow
@pytest.mark.parametrize(
    "make, name",
    [
        (steps.PlainTransformer, "FSDP 8"),
        pytest.param(steps.StackedTransformer, "FSDP 4 x TP 2", marks=pytest.mark.thorough),
        pytest.param(steps.PlainTransformer, "DP 4 x TP 2", marks=pytest.mark.thorough),
        pytest.param(steps.PlainTransformer, "FSDP 4 x TP 2", marks=pytest.mark.thorough),
        pytest.param(steps.StackedTransformer, "FSDP 8", marks=pytest.mark.thorough),
        pytest.param(steps.StackedTransformer, "DP 4 x TP 2", marks=pytest.mark.thorough),
    ],
)
def test_is_the_program_by_hand(make, name):
    step, args, plan = planned(make, name)
    ours = figures(plan.jit(step).lower(*args))
    assert ours == figures(by_hand(plan, args))
    assert ours[0]


def whole(module, path):
    """The model is one layer."""
    return not path


@pytest.mark.slow
def test_decoding_with_a_cache_is_the_program_by_hand():
    weights = mylib.rules.by_path(
        {"query": P(None, "model"), "key": P(None, "model"), "out": P("model")}
    )
    plan = modelled(steps.decode, *steps.DECODED, axes={"data": 4, "model": 2})

    def decode(x, model, cache, position):
        model = mylib.fully_shard(model, whole, weights, weights, mesh=plan.mesh)
        return model(x, cache, position)

    cache = P("data", None, "model")
    places = {"x": P("data"), "model": weights, "cache": cache, "position": P()}
    by_hand = mylib.filter_jit(
        decode, in_shardings=places, out_shardings=(P("data"), cache), donate=("cache",),
        mesh=plan.mesh,
    )  # fmt: skip
    ours, theirs = (fun.lower(*steps.DECODED) for fun in (plan.jit(steps.decode), by_hand))
    assert figures(ours) == figures(theirs)


@pytest.mark.slow
def test_a_recurrent_layer_is_the_program_by_hand():
    args = steps.abstract(steps.Recurrent, jax.ShapeDtypeStruct((16, 8, 64), jnp.float32))
    kept = mylib.rules.fsdp("data")
    plan = modelled(STEP, *args, axes={"data": 8}, kept=kept)
    assert plan.chosen.name == "FSDP 8"
    sharded = lambda m: mylib.fully_shard(m, whole, kept, mesh=plan.mesh)  # noqa: E731
    by_hand = mylib.filter_jit(
        steps.step_of(steps.squared_loss, sharded),
        in_shardings=(P("data"), kept, kept),
        out_shardings=(kept, kept, P()),
        mesh=plan.mesh,
        donate="all-except-first",
    )
    ours = figures(plan.jit(STEP).lower(*args))
    assert ours == figures(by_hand.lower(*args)) and ours[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "FSDP 4 x TP 2",
        pytest.param("FSDP 8", marks=pytest.mark.thorough),
        pytest.param("DP 2 x TP 4", marks=pytest.mark.thorough),
    ],
)
def test_has_the_losses_of_one_device(name):
    with jax.enable_x64(True):
        make = lambda key: _wide(steps.PlainTransformer(key, depth=1))  # noqa: E731
        step, _, plan = planned(make, name)
        tokens = np.asarray(jax.random.randint(KEY, (16, 17), 0, 128), np.int32)
        model, state = steps.with_state(make(KEY))
        alone, fun, ours = eqx.filter_jit(step), plan.jit(step), (model, state)
        theirs = ours = jax.tree.map(lambda x: np.asarray(x) if eqx.is_array(x) else x, ours)
        for _ in range(2):
            *theirs, loss = alone(tokens, *theirs)
            *ours, planned_loss = fun(tokens, *ours)
            assert abs(loss - planned_loss) < 1e-10
        arrays = (jax.tree.leaves(eqx.filter(x, eqx.is_array)) for x in (theirs, ours))
        for a, b in zip(*arrays, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-9)


def _wide(model):
    return jax.tree.map(lambda x: x.astype(jnp.float64) if eqx.is_inexact_array(x) else x, model)


@pytest.mark.slow
def test_bytes_are_those_of_the_compiled_program():
    """All-gathers of weights; the CPU's compiler makes no reduce-scatters."""
    step, args, plan = planned(steps.StackedTransformer, "FSDP 8")
    gathered = plan.jit(step).lower(*args).compile().audit().bytes("all-gather")
    sent = candidates(steps.StackedTransformer)[2]["FSDP 8"].price.sent
    assert abs(sent["all-gather over data"] / gathered - 1) < 0.01


@pytest.mark.slow
def test_compiled_figures_decide():
    plan = mylib.plan(STEP, *MLP, policies=("full",), compile=2)
    assert plan.chosen.compiled and sum(x.compiled for x in plan.others) == 1
    assert plan.audit.axes == plan.axes and plan.memory == plan.audit.memory.peak
    short = mylib.plan(STEP, *MLP, policies=("full",), compile=2, budget=0)
    assert short.chosen.compiled and not any(x.compiled for x in short.others)
    only = {"axes": {"model": 8}, "policies": ("full",)}
    needed = mylib.plan(STEP, *MLP, **only).memory
    with pytest.raises(mylib.errors.PlanError, match="by its compiler: .* as 5% are kept free"):
        mylib.plan(STEP, *MLP, **only, memory=needed)


@pytest.mark.slow
def test_no_candidate_is_begun_that_would_end_after_the_budget():
    """If it takes as long as the one before: here at least two seconds."""

    def slow(*args):
        time.sleep(2)
        return STEP(*args)

    plan = mylib.plan(slow, *MLP, policies=("full",), compile=3, budget=3.9)
    assert plan.chosen.compiled and not any(x.compiled for x in plan.others)


@pytest.mark.slow
def test_measured_times_decide(capsys):
    options = {"policies": ("full",), "compile": 2, "measure": 2, "progress": True}
    plan = mylib.plan(STEP, *MLP, **options)
    assert plan.chosen.measured == plan.chosen.seconds > 0
    assert plan.others[0].measured is not None
    # In turns: what slows a machine for a while slows all alike.
    lines = [x.strip() for x in capsys.readouterr().err.split("\r") if x.startswith("measuring")]
    names = [x.partition(": ")[2] for x in lines]
    assert len(names) >= 8 and len(set(names[:2])) == 2 and names == names[:2] * (len(names) // 2)
    with pytest.raises(ValueError, match="h100 x 8 is unavailable"):
        mylib.plan(STEP, *MLP, machine="h100 x 8", measure=1)


class PressesCtrlC(io.StringIO):
    """Where the line of progress is written: as many measured calls are let through."""

    left = 1

    def write(self, text):
        if "measuring" in text:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
        return super().write(text)


@pytest.mark.slow
@pytest.mark.parametrize(("calls", "source"), [(1, "compiled"), (5, "measured")])
def test_ctrl_c_while_it_measures(monkeypatch, calls, source):
    """Measured times decide if all candidates have been called as often."""
    monkeypatch.setattr(sys, "stderr", PressesCtrlC())
    monkeypatch.setattr(PressesCtrlC, "left", calls)
    options = {"policies": ("full",), "compile": 2, "measure": 2, "progress": True}
    plan = mylib.plan(STEP, *MLP, **options)
    assert plan.chosen.source == plan.others[0].source == source


@pytest.mark.thorough
def test_saved_inputs_in_parts_take_less_memory():
    make = functools.partial(steps.StackedTransformer, depth=16)
    step, args, plan = planned(make, "FSDP 4 x TP 2, splits saved")
    assert plan.applying.saved == ("model",)  # under `vmap` a layer sees [time, embed]
    assert 'saved=P("model")' in plan.code()
    assert mylib.Plan.of(plan.as_text()) == plan
    _, _, whole = planned(make, "FSDP 4 x TP 2")
    ours, theirs = (figures(x.jit(step).lower(*args))[1] for x in (plan, whole))
    assert ours < theirs


def test_saved_inputs_are_gathered():
    """Each layer gathers its input twice, and its result's gradient."""
    _, _, found = candidates(steps.StackedTransformer)
    whole, saved = (found[f"FSDP 4 x TP 2{end}"].price for end in ("", ", splits saved"))
    gathered = saved.sent["all-gather over model"] - whole.sent.get("all-gather over model", 0)
    # Two layers, 4 rows of 16 words on each device, and 64 numbers of four bytes.
    assert gathered == 3 * 2 * 4 * 16 * 64 * 4
    assert saved.sent["all-reduce over model"] == whole.sent["all-reduce over model"]
    assert saved.parts["tensor parallelism"] > whole.parts["tensor parallelism"]

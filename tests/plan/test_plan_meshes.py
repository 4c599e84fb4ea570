"""A plan is made, compiled and called on a mesh of its own, whatever mesh is in force."""

import warnings
from contextlib import nullcontext

import equinox as eqx
import jax
import numpy as np
import planned_steps as steps
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from planned_steps import STEP, modelled

import mylib

KEY = jax.random.key(0)
BATCH = np.ones((16, 64), np.float32)
MESHES = {
    "README's": lambda: mylib.make_mesh(data=-1),
    "Explicit": lambda: jax.make_mesh((4, 2), ("data", "model")),
    "both": lambda: mylib.make_mesh(data=4, model=2, explicit="model"),
    "of other devices": lambda: jax.make_mesh((2,), ("data",), devices=jax.devices()[2:4]),
}


def start():
    return steps.with_state(steps.mlp(KEY))


@pytest.fixture(params=MESHES)
def mesh(request):
    with jax.set_mesh(MESHES[request.param]()) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def loss():
    return eqx.filter_jit(STEP)(BATCH, *start())[2]


@pytest.mark.slow
def test_plans_and_runs(mesh, loss):
    args = BATCH, *start()
    kept = mylib.rules.by_path({"layers.0.weight": P(None, "data")})
    plan = modelled(STEP, *args, axes={"data": 8}, kept=kept)
    fun = plan.jit(STEP)
    abstract = steps.abstract(steps.mlp, BATCH)
    compiled = fun.lower(*abstract).compile()
    for call, state in [
        (fun, mylib.filter_device_put(start())),
        (fun, plan.make(lambda key: steps.with_state(steps.mlp(key)), KEY)),
        (compiled, start()),
    ]:
        model, _, found = call(BATCH, *state)
        assert abs(float(found) - float(loss)) < 1e-5
        assert model.layers[0].weight.sharding.spec == P(None, "data")
    assert not mylib.explain(args[1], plan).faults
    assert jax.sharding.get_abstract_mesh() == jax.sharding.get_mesh().abstract_mesh


@pytest.mark.slow
def test_compiles_and_measures(mesh):
    args = steps.abstract(steps.mlp, steps.ROWS)
    plan = mylib.plan(STEP, *args, policies=("full",), compile=1, measure=1)
    assert plan.chosen.source == "measured"


def test_machines_that_are_not_here(mesh):
    args = steps.abstract(steps.mlp, steps.ROWS)
    assert modelled(STEP, *args, machine="h100 x 16").machine.count == 16


def test_with_mesh():
    """The older way to put one in force."""
    mesh = mylib.make_mesh(data=4, model=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with mesh:
            modelled(STEP, BATCH, *start())


@pytest.mark.slow
def test_in_another_program(loss):
    """It stays on that program's mesh."""
    plan = modelled(STEP, BATCH, *start(), axes={"data": 8})
    for mesh in nullcontext(), jax.set_mesh(mylib.make_mesh(data=8)):
        with mesh:
            found = jax.jit(lambda batch: plan.jit(STEP)(batch, *start())[2])(BATCH)
        assert abs(float(found) - float(loss)) < 1e-5


L, KEPT = eqx.nn.Linear, mylib.rules.fsdp("data")
HANDED = "hand over the step as for one device, without fully_shard, in_shardings"


@pytest.mark.parametrize("machine", [None, "h100 x 16"])
@pytest.mark.parametrize(
    "sharded",
    [
        lambda model, mesh: mylib.fully_shard(model, L, KEPT),
        lambda model, mesh: mylib.fully_shard(model, L, KEPT, mesh=mesh),
        lambda model, mesh: mylib.fully_shard(model, eqx.nn.MLP, KEPT, mesh=mesh),
    ],
)
def test_a_step_with_fully_shard(sharded, machine):
    with jax.set_mesh(mylib.make_mesh(data=-1)) as mesh:
        step = steps.step_of(steps.squared_loss, lambda model: sharded(model, mesh))
        with pytest.raises(mylib.errors.PlanError, match=HANDED) as caught:
            modelled(step, BATCH, *start(), machine=machine)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "placed",
    [
        lambda x: jax.lax.with_sharding_constraint(x, P()),
        lambda x: jax.sharding.reshard(x, P("data")),
        lambda x: jax.device_put(x, P("data")),
    ],
)
def test_a_step_with_constraints_of_jax(placed):
    def step(batch, model, state):
        return STEP(placed(batch), model, state)

    with pytest.raises(mylib.errors.PlanError, match=HANDED) as caught:
        mylib.plan(step, BATCH, *start(), machine="h100 x 16", compile=0)
    assert "test_plan_meshes.py:" in str(caught.value)
    assert "mylib.filter_shard(x, mylib.rules.where_present(spec))" in str(caught.value)


def test_a_constraint_that_a_plan_may_lack():
    def step(batch, model, state):
        batch = mylib.filter_shard(batch, mylib.rules.where_present(P("data")))
        return STEP(batch, model, state)

    modelled(step, BATCH, *start(), machine="h100 x 16")


@pytest.mark.parametrize(
    "options",
    [
        {"in_shardings": {"batch": P("data")}},
        {"out_shardings": (KEPT, KEPT, P())},
        {"in_shardings": {"model": KEPT}, "out_shardings": (KEPT, KEPT, P()), "donate": "all"},
    ],
    ids=str,
)
@pytest.mark.parametrize("is_given", [False, True])
def test_a_step_with_placements(options, is_given):
    with jax.set_mesh(mylib.make_mesh(data=-1)) as mesh:
        step = mylib.filter_jit(STEP, **options, mesh=mesh if is_given else None)
        with pytest.raises(mylib.errors.PlanError, match=HANDED) as caught:
            modelled(step, BATCH, *start())
    assert len(str(caught.value).splitlines()) == 1


def test_a_step_with_constraints():
    """They would be of another mesh than the plan's."""
    placed = NamedSharding(mylib.make_mesh(data=-1), P("data"))

    def step(batch, *others):
        return STEP(eqx.filter_shard(batch, placed), *others)

    with pytest.raises(mylib.errors.PlanError, match=rf"{HANDED}.*places an array at NamedShard"):
        modelled(step, BATCH, *start())


def test_a_step_that_is_compiled():
    """Without placements there is nothing to leave out."""
    step = mylib.filter_jit(STEP, donate="all-except-first")
    assert modelled(step, BATCH, *start()).applying.donated

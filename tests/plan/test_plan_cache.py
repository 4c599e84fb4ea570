"""Plans that are kept in JAX's compilation cache."""

import sys

import jax
import jax.numpy as jnp
import planned_steps as steps
import pytest
from jax.sharding import PartitionSpec as P

import mylib
from mylib._plan import cache

MLP = steps.abstract(steps.mlp, steps.ROWS)
STEP = steps.step_of(steps.squared_loss)


def planned(step=STEP, args=MLP, **options):
    return mylib.plan(step, *args, **{"compile": 0, "policies": ("full",), **options})


@pytest.fixture
def priced(monkeypatch):
    """What is priced, and so not read."""
    # The function has the module's name.
    module = sys.modules["mylib._plan.plan"]
    calls, original = [], module.priced
    monkeypatch.setattr(module, "priced", lambda *args: calls.append(args) or original(*args))
    return calls


def test_a_second_plan_is_read_and_equal(plans, priced):
    folder = plans()
    first = planned(machine="h100 x 8")
    (file,) = folder.iterdir()
    assert planned(machine="h100 x 8") == first and len(priced) == 1
    assert planned(steps.step_of(steps.squared_loss), machine="h100 x 8") == first
    assert len(priced) == 1 and [*folder.iterdir()] == [file]


@pytest.mark.parametrize(
    "other",
    [
        {"step": steps.step_of(lambda model, x: steps.squared_loss(model, x) * 2)},
        {"kept": mylib.rules.by_path({"layers.0.weight": P()})},
        *(
            pytest.param(x, marks=pytest.mark.thorough)
            for x in (
                {"machine": "h100 x 16"},
                {"memory": 1e9},
                {"dtype": jnp.bfloat16},
                {"axes": {"data": 8}},
                {"args": steps.abstract(steps.mlp, jax.ShapeDtypeStruct((32, 64), jnp.float32))},
                {"budget": 1},
            )
        ),
    ],
)
def test_another_one_is_not_taken_for_it(plans, priced, other):
    plans()
    planned(machine="h100 x 8")
    planned(**{"machine": "h100 x 8", **other})
    assert len(priced) == 2


@pytest.mark.parametrize(
    "content",
    ["cut", *(pytest.param(x, marks=pytest.mark.thorough) for x in ("foreign", "", "{}"))],
)
def test_a_damaged_file_is_made_anew(plans, priced, content):
    folder = plans()
    first = planned()
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    if content == "foreign":
        planned(axes={"data": 8})
        (other,) = set(folder.iterdir()) - {file}
        other.replace(file)
    else:
        file.write_bytes(whole[:-20] if content == "cut" else content.encode())
    priced.clear()
    assert planned() == first and len(priced) == 1 and file.read_bytes() == whole


def test_where_it_can_not_be_written(plans, tmp_path):
    plans().write_text("a file")
    with pytest.warns(mylib.MylibWarning, match="the plan isn't kept in"):
        planned()


def test_a_machine_of_ones_own(plans):
    plans()
    chip = mylib.machines.CHIPS["h100"]
    machine = mylib.machines.gpu(chip, hosts=2)
    assert planned(machine=machine) == planned(machine=machine)
    assert planned(machine=machine).machine == machine


def test_it_is_where_jax_keeps_programs(monkeypatch):
    monkeypatch.undo()
    before = jax.config.jax_compilation_cache_dir
    try:
        for given, found in (("/a", True), (None, False), ("gs://bucket", False)):
            jax.config.update("jax_compilation_cache_dir", given)
            assert (cache.folder() is not None) == found
    finally:
        jax.config.update("jax_compilation_cache_dir", before)

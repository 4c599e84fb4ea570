"""Weights that arrive otherwise than `fully_shard` keeps them are named, and nothing else is."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import mylib
from mylib.rules import fsdp, replicated

AUTO = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
EXPLICIT = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
KEPT = fsdp("data", min_size=64)
MODEL = eqx.nn.MLP(32, 32, 32, 3, key=jax.random.key(0))
X = np.ones((16, 32), np.float32)


def loss_of(model, x, kept=KEPT, mesh=AUTO, **options):
    model = mylib.fully_shard(model, eqx.nn.Linear, kept, mesh=mesh, **options)
    return jnp.mean(jax.vmap(model)(x) ** 2)


def step_of(loss, **options):
    # A function of its own: equal ones share their programs, and have been compiled already.
    return mylib.filter_jit(eqx.filter_value_and_grad(lambda model, x: loss(model, x)), **options)


def at(placement, model=MODEL, mesh=AUTO):
    return mylib.filter_shard(model, placement, mesh=mesh)


@pytest.fixture
def batch():
    return mylib.filter_shard(X, P("data"), mesh=AUTO)


def told(step, *args):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(*args)
    assert {w.category for w in caught} <= {mylib.errors.PlacementWarning}
    return [str(w.message) for w in caught]


def test_weights_that_arrive_replicated_are_named(batch):
    step = step_of(loss_of)
    (text,) = told(step, at(P()), batch)
    assert "model.layers[0..3].weight: P() instead of P('data')" in text
    assert "Each device holds 16 KiB of them instead of 2 KiB" in text
    assert "bias" not in text and "in_shardings" in text
    assert told(step, at(P()), batch) == []  # compiled already
    assert told(step, at(KEPT), batch) == []


def test_also_if_only_shardings_have_changed(batch):
    step = step_of(loss_of)
    assert told(step, at(KEPT), batch) == []
    (text,) = told(step, at(P()), batch)
    assert "16 KiB" in text


def test_an_other_dimension(batch):
    by_columns = jax.tree.map(lambda x: P(None, "data") if x.ndim == 2 else P(), MODEL_ARRAYS)
    (text,) = told(step_of(loss_of), at(by_columns), batch)
    assert "Each call moves them" in text and "layers[0..3].weight" in text


MODEL_ARRAYS = eqx.filter(MODEL, eqx.is_array)


@pytest.mark.parametrize(
    "options",
    [
        {"donate": "all-except-first"},
        pytest.param({"out_shardings": None}, marks=pytest.mark.thorough),
    ],
)
def test_a_step_of_training(batch, options):
    optim_state = jax.tree.map(jnp.zeros_like, MODEL_ARRAYS)

    @mylib.filter_jit(in_shardings={"x": P("data")}, mesh=AUTO, **options)
    def step(x, model, state):
        grads = eqx.filter_grad(loss_of)(model, x)
        state = jax.tree.map(lambda m, g: 0.9 * m + g, state, grads)
        return eqx.apply_updates(model, state), state

    (text,) = told(step, X, at(P()), at(P(), optim_state))
    assert "model.layers[0..3].weight" in text and "state.layers" not in text
    assert told(step, X, at(KEPT), at(KEPT, optim_state)) == []


def test_a_loss_that_is_compiled_itself(batch):
    inner = mylib.filter_jit(loss_of)
    (text,) = told(step_of(lambda model, x: inner(model, x)), at(P()), batch)
    assert "layers[0..3].weight" in text
    # Its trace is cached now.
    (text,) = told(step_of(lambda model, x: 2 * inner(model, x)), at(P()), batch)
    assert "layers[0..3].weight" in text
    (text,) = told(
        eqx.filter_grad(mylib.filter_jit(lambda m, x: loss_of(m, x) + 1)), at(P()), batch
    )
    assert "m.layers[0..3].weight" in text


def test_accumulated_gradients():
    def step(model, xs):
        def body(total, x):
            return jax.tree.map(jnp.add, total, eqx.filter_grad(loss_of)(model, x)), None

        zeros = jax.tree.map(jnp.zeros_like, eqx.filter(model, eqx.is_array))
        zeros = eqx.filter(zeros, eqx.is_array)
        return jax.lax.scan(body, zeros, xs)[0]

    (text,) = told(mylib.filter_jit(step), at(P()), np.ones((2, 16, 32), np.float32))
    assert "model.layers[0..3].weight" in text


def test_programs_compiled_ahead(batch):
    step = step_of(loss_of)
    compiled = step.lower(at(P()), batch).compile()
    (text,) = told(compiled, at(P()), batch)
    assert "layers[0..3].weight" in text
    assert told(compiled, at(P()), batch) == []


def test_under_set_mesh(batch):
    with jax.set_mesh(AUTO):
        step = step_of(lambda model, x: loss_of(model, x, mesh=None))
        assert told(step, at(KEPT), batch) == []
        (text,) = told(step, at(P()), batch)
    assert "layers[0..3].weight" in text


def losing(**options):
    return lambda model, x: loss_of(model, x, **options)


def of_half(model, x):
    return loss_of(jax.tree.map(lambda w: w / 2 if eqx.is_array(w) else w, model), x)


ONE = mylib.make_mesh(data=1, devices=jax.devices()[:1])
IN_NUMPY = jax.tree.map(lambda x: np.asarray(x) if eqx.is_array(x) else x, MODEL)
IN_HOST_MEMORY = jax.tree.map(
    lambda s: s.with_memory_kind("pinned_host"), mylib.resolve(MODEL, KEPT, mesh=AUTO)
)
# Each gives a step and its arguments.
SILENT = {
    "as kept": lambda x: (step_of(loss_of), at(KEPT), x),
    "in_shardings": lambda x: (
        step_of(loss_of, in_shardings=(KEPT, None), mesh=AUTO), at(P()), x
    ),
    "uncommitted": lambda x: (step_of(loss_of), MODEL, x),
    "numpy": lambda x: (step_of(loss_of), IN_NUMPY, x),
    "kept is None": lambda x: (step_of(losing(kept=None, used=replicated())), at(P()), x),
    "used is None": lambda x: (step_of(losing(used=None)), at(KEPT), x),
    "replicated": lambda x: (step_of(losing(kept=P())), at(KEPT), x),
    "changed before": lambda x: (step_of(of_half), at(P()), x),
    "one device": lambda x: (step_of(losing(mesh=ONE)), MODEL, X),
    "explicit": lambda x: (
        step_of(losing(mesh=EXPLICIT)), at(P(), mesh=EXPLICIT), at(P("data"), X, EXPLICIT)
    ),
    "host memory": lambda x: (
        step_of(losing(kept=IN_HOST_MEMORY)), mylib.filter_device_put(MODEL, IN_HOST_MEMORY), x
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SILENT)
def test_nothing_is_said(case, batch):
    assert told(*SILENT[case](batch)) == []


def test_integers_and_what_is_too_small(batch):
    class Quantised(eqx.Module):
        weight: jax.Array
        scale: jax.Array

        def __call__(self, x):
            return x @ (self.weight * self.scale)

    model = Quantised(jnp.ones((32, 32), jnp.int8), jnp.ones(32))

    def loss(model, x):
        model = mylib.fully_shard(model, Quantised, KEPT, mesh=AUTO)
        return jnp.mean(model(x) ** 2)

    assert told(mylib.filter_jit(loss), at(P(), model), batch) == []


@pytest.mark.slow
def test_no_tracer_is_kept(batch):
    with jax.checking_leaks():
        told(step_of(loss_of), at(P()), batch)


def test_where_uncommitted_weights_arrive(batch):
    """Why they are not named: the compiler takes `kept`."""
    compiled = step_of(loss_of).lower(MODEL, batch).compile().compiled
    arrays, _ = compiled.input_shardings
    wanted = NamedSharding(AUTO, P("data"))
    assert all(here.is_equivalent_to(wanted, 2) for here in arrays[:-1:2])

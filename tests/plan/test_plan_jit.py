"""A step under a plan has the step's own arguments, and donates those that are replaced."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import planned_steps as steps
import pytest
from jax.sharding import PartitionSpec as P
from planned_steps import MLP, STEP, modelled

import mylib

BATCH = np.ones((16, 64), np.float32)


def mlp(seed):
    return steps.mlp(jax.random.key(seed))


def descended(batch, model, others=0.0):
    grads = eqx.filter_grad(lambda m: steps.squared_loss(m, batch) + others)(model)
    return eqx.apply_updates(model, jax.tree.map(lambda x: -0.1 * x, grads)), grads


def distance(a, b):
    arrays = (jax.tree.leaves(eqx.filter(x, eqx.is_array)) for x in (a, b))
    return sum(jnp.sum((x - y) ** 2) for x, y in zip(*arrays, strict=True))


def proximal(batch, anchor, model):
    loss = lambda m: steps.squared_loss(m, batch) + distance(m, anchor)  # noqa: E731
    return eqx.apply_updates(model, jax.tree.map(jnp.negative, eqx.filter_grad(loss)(model)))


def with_gradient(batch, model, state, anchor):
    loss = lambda m: steps.squared_loss(m, batch) + distance(m, anchor)  # noqa: E731
    grads = eqx.filter_grad(loss)(model)
    return eqx.apply_updates(model, grads), grads


def averaged(batch, model, average):
    model, _ = descended(batch, model)
    mix = lambda a, b: 0.9 * a + 0.1 * b if eqx.is_array(a) else a  # noqa: E731
    return model, jax.tree.map(mix, average, model)


def distilled(batch, teacher, model):
    return descended(batch, model, jnp.mean(jax.vmap(teacher)(batch)))[0]


def with_rate(batch, model, state, rate):
    return STEP(batch, model, state)


def state_alone(batch, model, state):
    return STEP(batch, model, state)[1:]


STATE = steps.with_state(mlp(0))[1]


class TestDonated:
    @pytest.mark.parametrize(
        ("step", "args", "donated", "unclear"),
        [
            (proximal, (mlp(0), mlp(1)), (), "anchor and model"),
            (with_gradient, (mlp(0), STATE, mlp(1)), (), "model and anchor"),
            (averaged, (mlp(0), mlp(1)), (), "model and average"),
            (distilled, (mlp(0), mlp(1)), ("model",), ""),
            (with_rate, (mlp(0), STATE, jnp.float32(1)), ("model", "state"), ""),
            (state_alone, (mlp(0), STATE), ("state",), ""),
        ],
        ids=lambda x: getattr(x, "__name__", ""),
    )
    def test_what_the_results_replace(self, step, args, donated, unclear):
        plan = modelled(step, BATCH, *args)
        assert plan.applying.donated == donated
        notes = [note for note in plan.notes if note.startswith("not donated: ")]
        assert bool(notes) == bool(unclear) and all(unclear in note for note in notes)

    @pytest.mark.slow
    def test_what_is_only_read_is_left(self):
        plan = modelled(proximal, BATCH, mlp(0), mlp(1))
        fun, anchor = plan.jit(proximal), mlp(0)
        model = fun(BATCH, anchor, fun(BATCH, anchor, mlp(1)))
        fun = plan.jit(proximal, donate=("model",))
        after = fun(BATCH, anchor, model)
        assert model.layers[0].weight.is_deleted() and not anchor.layers[0].weight.is_deleted()
        fun(BATCH, anchor, after)
        with pytest.raises(ValueError, match="'modle'.*no tuple of parameters of proximal"):
            plan.jit(proximal, donate=("modle",))


@pytest.fixture(scope="module")
def report():
    plan = modelled(STEP, *MLP, axes={"data": 8}, kept=mylib.rules.replicated())
    return mylib.audit(plan.jit(STEP), *MLP)


class TestArguments:
    def test_names_are_the_steps_own(self, report):
        roots = [x.path.partition(".")[0].partition("[")[0] for x in report.parameters]
        assert list(dict.fromkeys(roots)) == ["batch", "model", "state"]
        assert "arguments[" not in str(report) and "returned[" not in str(report)
        assert "gradient of model.layers" in str(report)

    def test_contracts(self, report):
        report.expect(mylib.contracts.data_parallel("data", argument="model"))

    def test_by_keyword(self):
        plan = modelled(STEP, BATCH, mlp(0), STATE)
        model, state = steps.with_state(mlp(0))
        plan.jit(STEP)(BATCH, state=state, model=model)
        told = "planned with the arguments batch, model, state: missing.* 'state'"
        with pytest.raises(TypeError, match=told):
            plan.jit(STEP)(BATCH, model)

    @pytest.mark.slow
    def test_further_positions(self):
        def step(batch, *others):
            return STEP(batch, *others)

        plan = modelled(step, BATCH, mlp(0), STATE)
        assert plan.applying.donated == ("others_0", "others_1")
        names = [x.path for x in plan.jit(step).lower(*MLP).compile().audit().parameters]
        assert "others_0.layers[0].weight" in names

    @pytest.mark.slow
    def test_paths_that_end_alike(self):
        """`b[0]` of one argument is not the `[0]` of another, or of the one before."""

        def step(batch, model, pair):
            a, (b,) = pair
            return descended(batch, model)[0], (a + 1, (b + 1,))

        make = lambda: (mlp(0), (jnp.zeros((8, 8, 64)), (jnp.zeros((64, 1024)),)))  # noqa: E731
        places = {"pair": (P(None, None, "data"), (P("data"),))}
        plan = modelled(step, BATCH, *make(), axes={"data": 8}, kept=places)
        _, (a, (b,)) = plan.jit(step)(BATCH, *make())
        assert a.sharding.spec == P(None, None, "data") and b.sharding.spec == P("data")
        _, (a, (b,)) = plan.make(make, arguments=("model", "pair"))
        assert a.sharding.spec == P(None, None, "data") and b.sharding.spec == P("data")

"""Which dimensions go together."""

import equinox as eqx
import jax
import jax.numpy as jnp
import planned_steps as steps
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P
from planned_steps import traced

from mylib._core.dims import program_of
from mylib._planning.plan.lifetimes import lives_of
from mylib._planning.plan.trace import LayerInput, PlanError, PlannedStep, trace

KEY = jax.random.key(0)


def named(group):
    return {(path.partition("]")[2], dim) for path, dim in group.members}


class TestTransformer:
    @pytest.mark.parametrize("make", [steps.PlainTransformer, steps.StackedTransformer])
    def test_megatron(self, make):
        """Without a name: columns and rows by heads and by hidden layers, and the vocabulary."""
        found = traced(make, steps.TOKENS, steps.language_loss)
        sets = [set().union(*map(named, chosen)) for chosen in found.choices(2)]
        block = ".blocks" if make is steps.StackedTransformer else ".blocks[0]"
        up = make is steps.StackedTransformer
        expected = {
            (".embed.weight", 0),
            (".head.weight", 0),
            (f"{block}.attend.query_proj.weight", 0 + up),
            (f"{block}.attend.key_proj.weight", 0 + up),
            (f"{block}.attend.value_proj.weight", 0 + up),
            (f"{block}.attend.output_proj.weight", 1 + up),
            (f"{block}.up.weight", 0 + up),
            (f"{block}.up.bias", 0 + up),
            (f"{block}.down.weight", 1 + up),
        }
        (megatron,) = [x for x in sets if expected <= x]
        assert {x for x in megatron if ".blocks[1]" not in x[0]} == expected

    def test_heads_limit_the_axis(self):
        found = traced(steps.PlainTransformer, steps.TOKENS, steps.language_loss)
        (heads,) = [
            x for x in found.groups if (".blocks[0].attend.query_proj.weight", 0) in named(x)
        ]
        assert heads.limit == 4
        assert not any(heads in chosen for chosen in found.choices(8))

    @pytest.mark.slow
    def test_layers_and_rows(self):
        plain = traced(steps.PlainTransformer, steps.TOKENS, steps.language_loss)
        stacked = traced(steps.StackedTransformer, steps.TOKENS, steps.language_loss)
        assert plain.layers == stacked.layers == (steps.PlainBlock,)
        assert plain.batch_size == stacked.batch_size == 16
        first = {x.path for x in stacked.leaves if stacked.is_stacked(x)}
        assert first and all(".blocks" in path for path in first)
        assert not any(plain.is_stacked(x) for x in plain.leaves)


def test_inputs_of_layers():
    """Time can be split, whether a layer sees the rows or `jax.vmap` hides them."""
    hidden = traced(steps.PlainTransformer, steps.TOKENS, steps.language_loss).input
    assert hidden == LayerInput(rank=2, rows=None, free=((0, 16),))
    assert hidden.spec("data", "model", 4) == ("model",)
    assert hidden.spec("data", "model", 3) is None
    seen = LayerInput(rank=3, rows=0, free=((1, 16),))
    assert seen.spec(("replica", "data"), "model", 4) == (("replica", "data"), "model")
    assert traced(steps.mlp, steps.ROWS, steps.squared_loss).input.free == ()


def test_an_mlp_alternates():
    found = traced(steps.mlp, steps.ROWS, steps.squared_loss)
    sets = [set().union(*map(named, chosen)) for chosen in found.choices(2)]
    assert any({(".layers[0].weight", 0), (".layers[1].weight", 1)} <= x for x in sets)
    arrays = [{path for path, _ in x} for x in sets]
    assert all(len(x) == len(paths) for x, paths in zip(sets, arrays, strict=True))


def test_what_is_unknown_is_named():
    def loss(model, x):
        y = jax.vmap(model)(x)
        return jnp.mean(jax.lax.stop_gradient(jax.lax.linalg.qr(y)[0]))

    with pytest.raises(
        PlanError, match=r"don.t know|doesn't know how these may be split: qr \(.*test_plan"
    ):
        traced(steps.mlp, steps.ROWS, loss)


def _kernel(y):
    def double(x, out):
        out[...] = x[...] * 2

    return pl.pallas_call(double, jax.ShapeDtypeStruct(y.shape, y.dtype), interpret=True)(y)


def _mapped(y):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(jnp.sin, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(y)


@pytest.mark.parametrize(
    ("call", "name"), [(_kernel, "pallas_call"), (_mapped, "shard_map")], ids=["kernel", "mapped"]
)
def test_kernels_and_shard_map_are_refused_by_name(call, name):
    def loss(model, x):
        y = jax.vmap(model)(x)
        return jnp.mean(call(jax.lax.stop_gradient(y)) * y)

    told = rf"how these may be split: {name} \(.*test_plan_groups.py.*write the step without them"
    with pytest.raises(PlanError, match=told):
        traced(steps.mlp, steps.ROWS, loss)


def test_forward_mode():
    step = lambda batch, model: jax.jvp(jax.vmap(model), (batch,), (batch,))  # noqa: E731
    found = trace(
        PlannedStep.of(step, (steps.ROWS, steps.abstract(steps.mlp, steps.ROWS)[1])),
        "full",
        (eqx.nn.Linear,),
    )
    assert not found.program.unknown and found.groups


@pytest.mark.parametrize("values_last", [True, False])
def test_the_loss_s_value_is_computed_last(values_last):
    """If its gradient computes it again, so that its weights are held until then; not on TPUs."""

    def loss(w, v, x):
        v, rows = v @ v, jnp.tanh(x @ w)
        values = jax.lax.map(jax.checkpoint(lambda row: jnp.sum((row @ v) ** 2)), rows)
        return jnp.sum(values)

    arrays = jnp.ones((16, 32)), jnp.ones((32, 32)), jnp.ones((64, 4, 16))
    program = program_of(jax.make_jaxpr(jax.value_and_grad(loss))(*arrays))
    lives = [x for scope in program.scopes for x in lives_of(scope, values_last)]
    (held,) = [x for x in lives if x.shape == (32, 32) and x.top]
    assert (held.stop > max(x.start for x in lives)) == values_last

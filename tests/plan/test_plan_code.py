"""`plan.code()`: all of it runs where it is pasted, and makes the step of the plan."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import planned_steps as steps
import pytest

import mylib

BATCH = np.linspace(-1, 1, 16 * 64, dtype=np.float32).reshape(16, 64)


class Row(eqx.Module):
    """One of its classes has the name of another."""

    class Linear(eqx.nn.Linear):
        pass

    layers: list[Linear]

    def __init__(self, key):
        self.layers = [Row.Linear(64, 64, key=key) for key in jax.random.split(key)]

    def __call__(self, x):
        return self.layers[1](jnp.tanh(self.layers[0](x)))


class Linear(eqx.nn.Linear):
    pass


class Other(Row):
    def __init__(self, key):
        self.layers = [Linear(64, 64, key=key) for key in jax.random.split(key)]


class Both(eqx.Module):
    encode: Row
    inner: dict[str, Other]


def keys():
    return jax.random.split(jax.random.key(0))


# What the loss calls, with the names of what the code makes for each.
MODELS = {
    "one": (lambda: Row(keys()[0]), {"": lambda m: m}),
    "MLP": (lambda: steps.mlp(keys()[0]), {"": lambda m: m}),
    "tuple": (
        lambda: (Row(keys()[0]), steps.mlp(keys()[1])),
        {"_model_0": lambda m: m[0], "_model_1": lambda m: m[1]},
    ),
    "nested": (
        lambda: Both(Row(keys()[0]), {"decode": Other(keys()[1])}),
        {"_model_encode": lambda m: m.encode, "_model_inner_decode": lambda m: m.inner["decode"]},
    ),
}


def step_of(parts, sharded):
    def loss(model, batch):
        x = batch
        for end, part in parts.items():
            x = jax.vmap(sharded(end)(part(model)))(x)
        return jnp.mean(x**2)

    def step(batch, model):
        value, grads = eqx.filter_value_and_grad(loss)(model, batch)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), value

    return step


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"data": 8}, {"data": 4, "model": 2}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_is_the_step_of_the_plan(name, axes):
    make, parts = MODELS[name]
    step = step_of(parts, lambda end: lambda model: model)
    plan = mylib.plan(
        step, BATCH, make(), axes=axes, policies=("dots",), compile=0, dtype=jnp.bfloat16
    )
    names = {}
    exec(plan.code(), names)
    assert all(f"sharded{end}" in names and f"kept{end}" in names for end in parts)
    kept = make()
    kept = functools.reduce(
        lambda tree, end: eqx.tree_at(parts[end], tree, names[f"kept{end}"]), parts, kept
    )
    by_hand = mylib.filter_jit(
        step_of(parts, lambda end: names[f"sharded{end}"]),
        in_shardings=(names["rows"], kept),
        out_shardings=(kept, jax.sharding.PartitionSpec()),
        mesh=names["mesh"],
        donate=("model",),
    )
    ours, theirs = (mylib.audit(fun, BATCH, make()) for fun in (plan.jit(step), by_hand))
    assert steps.sent(ours) == steps.sent(theirs) and steps.sent(ours)
    (model, value), (same, wanted) = (fun(BATCH, make()) for fun in (plan.jit(step), by_hand))
    assert value == wanted and eqx.tree_equal(model, same)


def test_classes_are_imported():
    make, parts = MODELS["nested"]
    step = step_of(parts, lambda end: lambda model: model)
    plan = steps.modelled(step, BATCH, make(), axes={"data": 8})
    assert "from test_plan_code import Row\n" in plan.code()
    assert "        Row.Linear,\n        kept_model_encode" in plan.code()
    assert mylib.Plan.of(plan.as_text()).code() == plan.code()
    mlp = steps.modelled(steps.STEP, *steps.MLP, axes={"data": 8})
    assert "from equinox.nn import Linear\n" in mlp.code()

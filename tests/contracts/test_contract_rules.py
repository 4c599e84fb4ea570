"""Contracts judge by what is computed, not by names: cases that once passed, or were refused."""

from typing import Any

import contract_steps
import equinox as eqx
import handwritten
import jax
import jax.numpy as jnp
import known
import optax
import pytest
import transformer
from jax import lax
from jax.sharding import PartitionSpec as P

import mylib
from mylib import contracts
from mylib.rules import by_path

ONE, TWO = known.meshes(jax.devices())
DATA = contracts.data_parallel("data")
PAIR = {"up": (16, 32), "down": (32, 16)}
COLUMNS = {"up": P(None, "model"), "down": P("model")}


def pair() -> Any:
    return {name: known.abstract(ONE, P(), shape) for name, shape in PAIR.items()}


def test_a_batch_that_is_called_as_a_weight_is_a_batch():
    def step(model, batch):
        return handwritten.summing(up=lambda g: g, down=lambda g: g)(model, batch["up"])

    mapped = jax.shard_map(
        step, mesh=ONE, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
    )
    x = {"up": known.abstract(ONE, P("data"), (64, 16))}
    (fault,) = DATA(mylib.audit(jax.jit(mapped), pair(), x))
    assert fault == (
        "model['down'], model['up']: its gradient is not sent over data: in filter_jit, call "
        "mylib.fully_shard in the loss; in shard_map, sum it by jax.lax.psum; and check the "
        "numbers by mylib.testing.verify(step, ...)"
    )


def test_trained_weights_need_data():
    def step(model, decay):
        return jax.tree.map(lambda w: w * decay, model)

    report = mylib.audit(jax.jit(step), pair(), known.abstract(ONE, P(), ()))
    assert "no argument but the model is split over data" in DATA(report)[0]


@pytest.mark.parametrize("way", contract_steps.SUMS)
@pytest.mark.everyday(
    "psum", "gather and sum", "looped ring", "passed on", "hierarchical", "8 bits"
)
def test_sums(way):
    step = handwritten.summing(up=handwritten.psum, down=contract_steps.SUMS[way])
    assert DATA(handwritten.audited(ONE, step, handwritten.WHOLE)) == []


@pytest.mark.parametrize("way", contract_steps.NO_SUMS)
@pytest.mark.everyday("nothing", "pmax")
def test_no_sums(way):
    step = handwritten.summing(up=handwritten.psum, down=contract_steps.NO_SUMS[way])
    (found,) = DATA(handwritten.audited(ONE, step, handwritten.WHOLE))
    told = "not sent" if way == "nothing" else "reduced over data without being added: all-reduce"
    assert found.startswith(f"model['down']: its gradient is {told}")
    assert found.endswith("check the numbers by mylib.testing.verify(step, ...)")


def test_a_sum_of_what_was_summed_in_part():
    step = handwritten.summing(up=handwritten.psum, down=lambda g: handwritten.psum(g + g.mean()))
    assert DATA(handwritten.audited(ONE, step, handwritten.WHOLE)) == []
    step = handwritten.summing(
        up=handwritten.psum, down=lambda g: handwritten.psum(g + handwritten.psum(g * g))
    )
    (found,) = DATA(handwritten.audited(ONE, step, handwritten.WHOLE))
    assert found.startswith("model['down']: summed twice: the all-reduce over data")
    assert found.endswith("sums a sum of it")


@pytest.mark.parametrize("clipped", [True, False])
def test_a_weight_that_is_a_single_number(clipped):
    """It is computed from single numbers, of which arrays make no gradient that is sent."""

    def step(model, x):
        def loss(model):
            return jnp.mean((model["scale"] * jnp.tanh(x @ model["up"]) @ model["down"]) ** 2)

        gradients = jax.grad(loss)(model)
        if clipped:
            norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients)))
            gradients = jax.tree.map(lambda g: g / lax.psum(norm, "data"), gradients)
        gradients["scale"] = lax.psum(gradients["scale"], "data")
        gradients["up"] = lax.psum(gradients["up"], "data")
        return handwritten.updated(model, gradients)

    (found,) = DATA(handwritten.audited(ONE, step, {**handwritten.WHOLE, "scale": P()}))
    assert found.startswith("model['down']: its gradient is not sent over data")


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [256, 512])
def test_a_table_whose_rows_are_exchanged(vocab):
    """XLA:CPU scatters the rows of such a table after an all-to-all."""
    kept = mylib.rules.fsdp("data", min_size=128)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    @mylib.filter_jit(in_shardings=(P("data"), kept, kept), out_shardings=kept, mesh=ONE)
    def step(tokens, model, state):
        def loss(model):
            model = mylib.fully_shard(model, transformer.Block, kept, mesh=ONE, dtype=jnp.bfloat16)
            scores = jax.nn.log_softmax(jax.vmap(model)(tokens[:, :-1]).astype(jnp.float32))
            return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], -1))

        value, gradients = eqx.filter_value_and_grad(loss)(model)
        updates, state = optimizer.update(gradients, state, model)
        return eqx.apply_updates(model, updates), state, value

    def make(key):
        return transformer.Transformer(32, 64, 4, vocab, 1, key=key)

    model = eqx.filter_eval_shape(make, jax.random.key(0))
    arrays = eqx.filter(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    state = eqx.filter_eval_shape(optimizer.init, arrays)
    report = mylib.audit(step, jax.ShapeDtypeStruct((32, 9), jnp.int32), model, state)
    assert report.count("all-to-all", "data")
    report.expect(contracts.fsdp("data", argument="model"))


def test_only_what_was_scattered_may_be_gathered():
    """A pair whose activations are scattered, and one that gathers columns between its products."""

    def predict(model, x):
        part = lax.psum_scatter(jnp.tanh(x @ model["up"]) @ model["down"], "model", tiled=True)
        x = lax.all_gather(part, "model", tiled=True)
        h = lax.all_gather(jnp.tanh(x @ model["up"]), "model", axis=1, tiled=True)
        n = len(model["down"])
        own = lax.dynamic_slice_in_dim(h, lax.axis_index("model") * n, n, 1)
        return lax.psum(own @ model["down"], "model")

    report = handwritten.audited(TWO, predict, COLUMNS, out=P("data"))
    for contract in (contracts.tensor_parallel("model"), contracts.two_d("data", "model")):
        assert any(
            fault.startswith("all_gather: moved by all-gather over model")
            for fault in contract(report)
        )


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.everyday("True")
def test_statistics_of_a_split_vocabulary_are_no_activations(stacked):
    rule = by_path({"unembed.weight": P("model")}) | transformer.MODEL
    contract = contracts.tensor_parallel("model", forward=2 * transformer.DEPTH)
    step = transformer.Strategy(TWO, rule, None, contract)
    assert contract(step.audit(stacked)) == []


def test_products_of_an_optimiser_that_have_no_name():
    optimizer = optax.contrib.muon(1e-3)
    shapes = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in PAIR.items()}

    @mylib.filter_jit(in_shardings=(P(), P(), P("data")), out_shardings=P(), mesh=ONE)
    def step(model, state, x):
        gradients = jax.grad(handwritten.loss)(model, x)
        updates, state = optimizer.update(gradients, state, model)
        return optax.apply_updates(model, updates), state

    state = jax.eval_shape(optimizer.init, shapes)
    report = mylib.audit(step, shapes, state, jax.ShapeDtypeStruct((64, 16), jnp.float32))
    assert DATA(report) == []


class Layers(eqx.Module):
    """Four layers, kept in one way or another."""

    first: Any
    second: Any = None
    third: Any = None
    fourth: Any = None

    def __call__(self, x):
        for layer in jax.tree.leaves(self, is_leaf=lambda x: isinstance(x, eqx.nn.Linear)):
            x = jnp.tanh(layer(x))
        return x


def _layers(of: str) -> Layers:
    widths = [32, 32, 48, 64, 32] if of == "other sizes" else [32] * 5
    keys = jax.random.split(jax.random.key(0), 4)
    layers = [
        eqx.nn.Linear(n, m, use_bias=False, key=key)
        for n, m, key in zip(widths, widths[1:], keys, strict=False)
    ]
    match of:
        case "list":
            return Layers(layers)
        case "dict":
            return Layers(dict(zip("abcd", layers, strict=True)))
    return Layers(*layers)


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("of", ["attributes", "dict", "list", "other sizes"])
@pytest.mark.everyday("attributes-True", "dict-True", "attributes-False")
def test_a_model_that_is_gathered_once(of, held):
    kept = mylib.rules.fsdp("data", min_size=128)

    @mylib.filter_jit(in_shardings=(kept, P("data")), out_shardings=kept, mesh=ONE)
    def gradient(model, x):
        def loss(model):
            if held:
                model = mylib.filter_shard(model, P(), mesh=ONE)
            else:
                model = mylib.fully_shard(model, eqx.nn.Linear, kept, mesh=ONE)
            return jnp.mean(jax.vmap(model)(x) ** 2)

        return eqx.filter_grad(loss)(model)

    model = eqx.filter_eval_shape(_layers, of)
    report = mylib.audit(gradient, model, jax.ShapeDtypeStruct((64, 32), jnp.float32))
    found = contracts.fsdp("data")(report)
    assert bool(found) is held
    assert all("gathered once for the forward and the backward pass" in text for text in found)


def test_sums_in_each_iteration_are_those_of_the_compiler():
    kind = contract_steps.KINDS["rnn"]
    model = {k: jax.ShapeDtypeStruct(shape, jnp.float32) for k, shape in kind.shapes.items()}

    @mylib.filter_jit(in_shardings=(P(), P("data")), out_shardings=P(), mesh=ONE)
    def step(model, x):
        def loss(model):
            return jnp.mean(jax.vmap(lambda x: kind.loss(model, x))(x))

        return handwritten.updated(model, jax.grad(loss)(model))

    report = mylib.audit(step, model, jax.ShapeDtypeStruct((64, *kind.example), jnp.float32))
    report.expect(DATA)
    assert "XLA:CPU sums gradients in each iteration of a loop" in str(report)


def test_rows_of_a_batch_that_are_gathered_for_a_table():
    """The violation names the table."""

    def step(table, rows, tokens):
        def one(table, rows, tokens):
            rows = lax.all_gather(rows, "data", tiled=True)
            tokens = lax.all_gather(tokens, "data", tiled=True)
            whole = jnp.zeros((64, 16)).at[tokens].add(rows)
            return {"table": table["table"] - handwritten.own_part(whole)}

        specs = P("data"), P("data"), P("data")
        return jax.shard_map(one, mesh=ONE, in_specs=specs, out_specs=P("data"), check_vma=False)(
            table, rows, tokens
        )

    table = {"table": known.abstract(ONE, P("data"), (64, 16))}
    rows = known.abstract(ONE, P("data"), (128, 16))
    tokens = known.abstract(ONE, P("data"), (128,), "int32")
    report = mylib.audit(jax.jit(step), table, rows, tokens)
    found = contracts.fsdp("data")(report)
    assert len(found) == 1, found
    assert found[0].startswith("table['table']: moved by all-gather over data")
    report.expect(contracts.fsdp("data", activations="8 KiB"))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.everyday("0", "1", rest="thorough")
def test_random_steps(seed):
    assert contract_steps.told(seed) == ""

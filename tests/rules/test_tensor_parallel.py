"""`tensor_parallel`: which dimension of which layer is sharded, and what programs communicate."""

import equinox as eqx
import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec as P
from jaxtyping import Array, Float

import mylib
from mylib.rules import by_path, fsdp, replicated, tensor_parallel, where_even, where_present

KEY = jax.random.key(0)
GRID = AbstractMesh((4, 2), ("data", "model"))
RULE = tensor_parallel("model", column=["up", "unembed"], row=["down"])


def shapes(tree):
    return eqx.filter_eval_shape(lambda: eqx.filter(tree, eqx.is_array))


def specs(tree, rule, mesh=GRID):
    tree = shapes(tree)
    found = jax.tree_util.tree_leaves_with_path(mylib.resolve(tree, rule, mesh=mesh))
    return {jax.tree_util.keystr(path): target.spec for path, target in found}


class Block(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        self.up, self.down = eqx.nn.Linear(8, 32, key=key), eqx.nn.Linear(32, 8, key=key)


def made(make, stacked):
    return eqx.filter_vmap(make)(jax.random.split(KEY, 3)) if stacked else make(KEY)


class TestRoles:
    @pytest.mark.parametrize("stacked", [False, True])
    def test_columns_and_rows(self, stacked):
        front = (None,) * stacked
        model = made(Block, stacked)
        assert specs(model, tensor_parallel("model", column="up", row="down")) == {
            ".up.weight": P(*front, "model"),
            ".up.bias": P(*front, "model"),
            ".down.weight": P(*front, None, "model"),
            ".down.bias": P(),
        }

    @pytest.mark.parametrize("stacked", [False, True])
    def test_attention_by_heads(self, stacked):
        options = {"use_query_bias": True, "use_output_bias": True}
        model = made(lambda key: eqx.nn.MultiheadAttention(4, 16, **options, key=key), stacked)
        front = (None,) * stacked
        projections = {f".{name}_proj.weight": P(*front, "model") for name in ("key", "value")}
        assert specs(model, tensor_parallel("model")) == {
            ".query_proj.weight": P(*front, "model"),
            ".query_proj.bias": P(*front, "model"),
            **projections,
            ".output_proj.weight": P(*front, None, "model"),
            ".output_proj.bias": P(),
        }

    def test_an_mlp_alternates(self):
        found = specs(eqx.nn.MLP(8, 8, 16, 3, key=KEY), tensor_parallel("model"))
        assert list(found.values()) == [P("model"), P("model"), P(None, "model"), P()] * 2

    def test_the_last_layer_of_an_mlp_without_a_partner_is_whole(self):
        found = specs(eqx.nn.MLP(8, 3, 16, 2, key=KEY), tensor_parallel("model"))
        assert list(found.values())[-2:] == [P(), P()]
        assert set(specs(eqx.nn.MLP(8, 3, 16, 0, key=KEY), tensor_parallel("model")).values()) == {
            P()
        }
        scanned = eqx.nn.MLP(8, 8, 16, 3, scan=True, key=KEY)
        assert set(specs(scanned, tensor_parallel("model")).values()) == {P()}

    def test_vocabulary(self):
        class Head(eqx.Module):
            embed: eqx.nn.Embedding
            head: eqx.nn.Linear

        model = Head(eqx.nn.Embedding(32, 8, key=KEY), eqx.nn.Linear(8, 32, key=KEY))
        assert set(specs(model, tensor_parallel("model")).values()) == {P("model")}

    def test_convolutions_and_annotations(self):
        class Custom(eqx.Module):
            weight: Float[Array, "in out"]
            bias: Float[Array, "out"]  # noqa: F821

        model = {
            "up": eqx.nn.Conv2d(4, 8, 3, key=KEY),
            "down": Custom(jnp.ones((8, 4)), jnp.ones(4)),
        }
        found = specs(model, tensor_parallel("model", column="['up']", row="['down']"))
        assert found == {
            "['up'].weight": P("model"),
            "['up'].bias": P("model"),
            "['down'].weight": P("model"),
            "['down'].bias": P(),
        }

    def test_a_pattern_comes_before_the_table(self):
        mlp = eqx.nn.MLP(8, 8, 16, 1, key=KEY)
        found = specs(mlp, tensor_parallel("model", row="layers.0", column="layers.1"))
        assert list(found.values()) == [P(None, "model"), P(), P("model"), P("model")]

    def test_an_optimiser_state_goes_with_its_model(self):
        model = eqx.filter(Block(KEY), eqx.is_array)
        rule = tensor_parallel("model", column="up", row="down") | replicated()
        adam = mylib.resolve(shapes(optax.adamw(1e-3).init(model)), rule, mesh=GRID)[0]
        assert adam.mu.down.weight.spec == P(None, "model") and adam.count.spec == P()
        factored = shapes(optax.adafactor(1e-3, min_dim_size_to_factor=8).init(model))
        found = mylib.resolve((shapes(model), factored), where_even(rule), mesh=GRID)[1][0].v_row
        assert found.up.weight.spec == P()


class TestCombined:
    def test_with_fsdp(self):
        found = specs(Block(KEY), tensor_parallel("model", column="up", row="down") & fsdp("data"))
        assert found[".up.weight"] == P("model")  # small
        both = tensor_parallel("model", column="up", row="down") & fsdp("data", min_size=0)
        assert specs(Block(KEY), both) == {
            ".up.weight": P("model", "data"),
            ".up.bias": P("model"),
            ".down.weight": P("data", "model"),
            ".down.bias": P("data"),
        }

    def test_another_rule_first(self):
        rule = by_path({"up.*": P()}) | tensor_parallel("model", column="up", row="down")
        assert specs(Block(KEY), rule)[".up.weight"] == P()

    def test_where_present(self):
        rule = where_present(tensor_parallel("model", column="up", row="down"))
        assert set(specs(Block(KEY), rule, AbstractMesh((4,), ("data",))).values()) == {P()}

    def test_explained(self):
        model = {"block": Block(KEY), "mlp": eqx.nn.MLP(8, 8, 16, 1, key=KEY)}
        rule = tensor_parallel("model", column="up", row="down") | replicated()
        why = {row.leaf.parts[1:]: row.why for row in mylib.explain(model, rule, GRID).rows}
        name = "tensor_parallel('model'): "
        assert why["up", "weight"] == name + "column, pattern 'up'"
        assert why["down", "weight"] == name + "row, pattern 'down'"
        assert why["down", "bias"] == name + "row, pattern 'down', replicated"
        assert why["layers", "1", "weight"] == name + "row, every other layer of MLP"
        assert repr(rule) == "tensor_parallel('model', column=['up'], row=['down']) | replicated()"


def said(tree, rule, mesh=GRID):
    with pytest.raises(mylib.PlacementError) as caught:
        mylib.resolve(shapes(tree), rule, mesh=mesh)
    return str(caught.value)


class TestFaults:
    def test_heads_that_do_not_divide(self):
        attention = eqx.nn.MultiheadAttention(6, 24, key=KEY)
        text = said([attention], tensor_parallel("model"), AbstractMesh((4,), ("model",)))
        assert "[0].query_proj.weight (24, 24)" in text
        assert "its 6 heads do not divide into the 4 parts of 'model'" in text
        whole = by_path({"query_proj.*": P()}) | tensor_parallel("model")
        assert "query_proj" not in said([attention], whole, AbstractMesh((4,), ("model",)))

    def test_sizes_that_do_not_divide(self):
        model = eqx.nn.MLP(8, 8, 15, 1, key=KEY)
        assert ".layers[0].weight (15, 8)" in said(model, tensor_parallel("model"))

    def test_a_pattern_that_matches_nothing(self):
        text = said(Block(KEY), tensor_parallel("model", column="upp", row="down") | replicated())
        assert "column 'upp'" in text and "did you mean 'up.weight'?" in text

    def test_a_layer_can_not_be_both(self):
        text = said(Block(KEY), tensor_parallel("model", column="up", row=["up", "down"]))
        assert "patterns of both kinds match it" in text

    def test_an_array_without_names(self):
        rule = tensor_parallel("model", column="['up']") | replicated()
        text = said({"up": jnp.ones((8, 8))}, rule)
        assert "it is not the weight or bias of a linear layer or a convolution" in text

    def test_no_such_axis(self):
        assert "has no axis 'modle'" in said(Block(KEY), tensor_parallel("modle", column="up"))

    def test_not_called(self):
        with pytest.raises(TypeError, match="is not a mesh axis"):
            mylib.resolve(Block(KEY), tensor_parallel, mesh=GRID)


def loss_of(model, batch):
    tokens = batch
    predicted = jax.nn.log_softmax(jax.vmap(model)(tokens[:, :-1]))
    return -jnp.mean(jnp.take_along_axis(predicted, tokens[:, 1:, None], -1))


def square_loss(model, batch):
    return jnp.mean((jax.vmap(model)(batch) - 1) ** 2)


def tokens():
    return np.random.default_rng(0).integers(0, models.VOCAB, (8, models.LENGTH + 1), np.int32)


CASES = {
    "mlp": (
        lambda: eqx.nn.MLP(16, 16, 64, 3, key=KEY),
        tensor_parallel("model") | replicated(),
        lambda: np.random.default_rng(0).normal(size=(8, 16)),
        square_loss,
        2,
    ),
    "transformer": (
        lambda: models.Transformer(key=KEY),
        RULE | replicated(),
        tokens,
        loss_of,
        2 * 2 + 1,  # the embedding; the loss' largest logit and sum are no activations
    ),
    "scanned": (
        lambda: models.Transformer(key=KEY, scanned=True),
        RULE | replicated(),
        tokens,
        loss_of,
        2 * 2 + 1,  # the embedding; the loss' largest logit and sum are no activations
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        "mlp",
        pytest.param("transformer", marks=pytest.mark.slow),
        pytest.param("scanned", marks=pytest.mark.thorough),
    ],
)
def test_numbers_and_collectives_are_those_of_megatron(name):
    make, rule, batch, loss, forward = CASES[name]
    mesh = mylib.make_mesh(data=4, model=2)
    with jax.enable_x64(True):
        model, data = make(), batch()
        expected = eqx.filter_jit(eqx.filter_value_and_grad(loss))(model, data)
        model = mylib.filter_shard(model, rule, mesh=mesh)
        data = mylib.filter_shard(data, P("data"), mesh=mesh)
        step = mylib.filter_jit(
            eqx.filter_value_and_grad(loss), out_shardings=(None, rule), mesh=mesh
        )
        report = mylib.audit(step, model, data)
        found = step(model, data)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.dtype == jnp.float64
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)
    report.expect(mylib.contracts.tensor_parallel("model", forward=forward))


@pytest.mark.compilers
@pytest.mark.timeout(600)
@pytest.mark.compiles_for("h100 x 8", "v5e 2x4")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.everyday("h100 x 8-transformer", "v5e 2x4-transformer", rest="thorough")
def test_collectives_on_machines(name, machine):
    make, rule, batch, loss, _ = CASES[name]
    mesh = machine.mesh(data=4, model=2)
    model, data = eqx.filter_eval_shape(make), jax.eval_shape(lambda: jnp.asarray(batch()))
    step = mylib.filter_jit(
        eqx.filter_value_and_grad(loss),
        in_shardings=(rule, P("data")),
        out_shardings=(None, rule),
        mesh=mesh,
    )
    report = mylib.audit(step, model, data)
    # Not how often it sums: the TPU's compiler sums the chosen logits on their own.
    report.expect(mylib.contracts.tensor_parallel("model"))

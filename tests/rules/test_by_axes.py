"""`by_axes`: the names of dimensions as the description of a model's sharding."""

import time

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import models
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray

import mylib
from mylib.rules import PASS, by_axes, replicated

MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
KEY = jax.random.key(0)


def specs(tree, rule):
    resolved = mylib.resolve(tree, rule, mesh=MESH)
    return {jtu.keystr(path): target.spec for path, target in jtu.tree_leaves_with_path(resolved)}


def faults(tree, rule):
    with pytest.raises(mylib.PlacementError) as caught:
        mylib.resolve(tree, rule, mesh=MESH)
    return caught.value.faults


def spec_of(annotation, shape, axes):
    class Layer(eqx.Module):
        field: annotation

    return by_axes(axes)(one_leaf(Layer(jnp.zeros(shape))))


def one_leaf(tree):
    seen = []
    mylib.resolve(tree, lambda leaf: seen.append(leaf))
    (leaf,) = seen
    return leaf


AXES = {"out": "model", "in": "data"}


class TestAnnotations:
    @pytest.mark.parametrize(
        ("annotation", "shape", "spec"),
        [
            (Float[Array, "out in"], (8, 8), P("model", "data")),
            (Float[Array, "in out"], (8, 8), P("data", "model")),
            (Float[Array, "out _"], (8, 8), P("model")),
            (Float[Array, "_ out"], (8, 8), P(None, "model")),
            (Float[Array, "other other2"], (8, 8), P()),
            (Float[Array, ""], (), P()),
            # More dimensions than annotated: stacked layers.
            (Float[Array, "out in"], (6, 8, 8), P(None, "model", "data")),
            (Float[Array, "out in"], (2, 6, 8, 8), P(None, None, "model", "data")),
            # Fewer: a factored moment.
            (Float[Array, "out in"], (8,), PASS),
            (Float[Array, "out in"], (), P()),
            # No names.
            (Array, (8, 8), PASS),
            (Array, (), P()),
        ],
    )
    def test_form(self, annotation, shape, spec):
        assert spec_of(annotation, shape, AXES) == spec

    def test_nodes_whose_keys_lead_nowhere(self):
        class Key:
            """Is equal to no other one, made anew every time."""

            def __str__(self):
                return "key"

        class Node:
            def __init__(self, child):
                self.child = child

        def flatten(node):
            return [(Key(), node.child), (jtu.GetAttrKey("nowhere"), node.child)], None

        jtu.register_pytree_with_keys(Node, flatten, lambda _, children: Node(children[0]))
        layer = models.AnnotatedMLP(key=KEY)
        explanation = mylib.explain(Node(layer), by_axes({"mlp": "model"}), MESH)
        assert [row.spec for row in explanation.rows[:3]] == [
            "P('model')",
            "P('model')",
            "P(None, 'model')",
        ]

    def test_the_state_of_a_stateful_model_takes_no_quadratic_time(self):
        def seconds(size):
            indices = [eqx.nn.StateIndex(np.zeros(8, np.float32)) for _ in range(size)]
            state, times = eqx.nn.State(indices), []
            for _ in range(3):
                start = time.thread_time()
                mylib.resolve(state, by_axes({}) | replicated(), mesh=MESH)
                times.append(time.thread_time() - start)
            return min(times)

        # Linear time would be 4 times as long, quadratic time 16 times.
        assert seconds(1200) < 10 * seconds(300)

    def test_a_factored_state(self):
        model = models.AnnotatedMLP(128, 256, key=KEY)
        state = optax.adafactor(1e-3).init(model)
        rule = by_axes({"mlp": "model"})
        # v_row and v_col of a matrix have lost a dimension, and v is a placeholder of shape (1,).
        assert {fault.shape for fault in faults(state, rule)} == {(128,), (256,), (1,)}
        found = specs(state, mylib.rules.where_even(rule) | replicated())
        assert found["[0].v_row.up"] == P() and found["[0].v.up_bias"] == P("model")


class TestMeshAxes:
    def test_an_axis_is_used_once_and_the_first_name_has_it(self):
        for axes, spec in [
            ({"out": "model", "in": "model"}, P("model")),
            ({"in": "model", "out": "model"}, P(None, "model")),
        ]:
            assert spec_of(Float[Array, "out in"], (8, 8), axes) == spec
            assert spec_of(Float[Array, "out out in"], (8, 8, 8), axes).count("model") == 1

    def test_of_two_dimensions_of_one_name_the_first_has_it(self):
        assert spec_of(Float[Array, "_ out out"], (8, 8, 8), AXES) == P(None, "model")

    def test_several_axes(self):
        both = {"out": ("data", "model")}
        assert spec_of(Float[Array, "out in"], (8, 8), both) == P(("data", "model"))
        # What is left of them.
        both = {"in": "data", "out": ("data", "model")}
        assert spec_of(Float[Array, "out in"], (8, 8), both) == P(("model",), "data")

    def test_none_leaves_whole(self):
        assert spec_of(Float[Array, "out in"], (8, 8), {"out": None, "in": "data"}) == P(
            None, "data"
        )

    def test_why_tells_who_won(self):
        class Layer(eqx.Module):
            weight: Float[Array, "out in _"]

        leaf = one_leaf(Layer(jnp.zeros((8, 8, 8))))
        assert by_axes({"out": "model"}).why(leaf) == "names 'out in _'"
        rule = by_axes({"in": "model", "out": "model"})
        assert rule.why(leaf) == "names 'out in _'; 'model' goes to 'in', not to 'out'"

    def test_uneven_dimensions_and_unknown_axes_are_errors(self):
        class Layer(eqx.Module):
            weight: Float[Array, "out"]

        (uneven,) = faults(Layer(jnp.zeros(7)), by_axes({"out": "model"}))
        assert "size 7 does not divide into the 2 parts of 'model'" in uneven.reason
        (unknown,) = faults(Layer(jnp.zeros(8)), by_axes({"out": "modle"}))
        assert unknown.fix == "did you mean 'model'?"

    def test_a_name_found_nowhere(self):
        model = models.AnnotatedMLP(key=KEY)
        (found,) = faults(model, by_axes({"mpl": "model"}))
        assert found.request == "by_axes: 'mpl' over 'model'"
        assert found.reason == "no dimension of the 3 leaves has that name"
        assert found.fix == "did you mean 'mlp'?"
        (found,) = faults(model, by_axes({"vocab": "model"}))
        assert found.fix == "the names there are 'embed', 'mlp'"
        (found,) = faults({"w": jnp.zeros(8)}, by_axes({"vocab": None}) | replicated())
        assert found.fix.startswith("annotate the fields")

    def test_nothing_but_a_counter_is_no_fault(self):
        assert specs({"count": jnp.zeros((), int)}, by_axes({"mlp": "model"})) == {"['count']": P()}


def layers():
    """Every layer of `eqx.nn` that holds arrays, and what its dimensions are."""
    nn = eqx.nn
    linear = {".weight": (5, 3), ".bias": (5,)}
    attention = nn.MultiheadAttention(
        2,
        6,
        use_query_bias=True,
        use_key_bias=True,
        use_value_bias=True,
        use_output_bias=True,
        output_size=10,
        key=KEY,
    )
    heads = {"weight": "heads in", "bias": "heads"}
    conv = {".weight": "out in " + "_ ", ".bias": "out _"}
    norm = {".weight": "_", ".bias": "_"}
    return [
        (nn.Linear(3, 5, key=KEY), {".weight": "out in", ".bias": "out"}, linear),
        (nn.Embedding(7, 3, key=KEY), {".weight": "vocab embed"}, {".weight": (7, 3)}),
        (
            attention,
            {
                f".{name}_proj.{field}": dims
                for name in ("query", "key", "value")
                for field, dims in heads.items()
            }
            | {".output_proj.weight": "out heads", ".output_proj.bias": "out"},
            {".query_proj.weight": (6, 6), ".output_proj.weight": (10, 6)},
        ),
        (nn.Conv1d(3, 5, 2, key=KEY), conv, {".weight": (5, 3, 2), ".bias": (5, 1)}),
        (
            nn.Conv2d(3, 5, 2, key=KEY),
            {".weight": "out in _ _", ".bias": "out _ _"},
            {".weight": (5, 3, 2, 2)},
        ),
        (
            nn.Conv3d(4, 6, 2, groups=2, key=KEY),
            {".weight": "out in _ _ _", ".bias": "out _ _ _"},
            {".weight": (6, 2, 2, 2, 2)},
        ),
        (nn.ConvTranspose1d(3, 5, 2, key=KEY), conv, {".weight": (5, 3, 2), ".bias": (5, 1)}),
        (
            nn.ConvTranspose2d(3, 5, 2, key=KEY),
            {".weight": "out in _ _", ".bias": "out _ _"},
            {".weight": (5, 3, 2, 2)},
        ),
        (
            nn.ConvTranspose3d(3, 5, 2, key=KEY),
            {".weight": "out in _ _ _", ".bias": "out _ _ _"},
            {".weight": (5, 3, 2, 2, 2)},
        ),
        (nn.LayerNorm(4), norm, {".weight": (4,)}),
        (nn.LayerNorm((4, 3)), {".weight": "_ _", ".bias": "_ _"}, {".weight": (4, 3)}),
        (nn.RMSNorm(4), norm, {".weight": (4,)}),
        (nn.GroupNorm(2, 4), {".weight": "channels", ".bias": "channels"}, {".weight": (4,)}),
        (
            nn.GRUCell(3, 5, key=KEY),
            {
                ".weight_ih": "gates in",
                ".weight_hh": "gates hidden",
                ".bias": "gates",
                ".bias_n": "hidden",
            },
            {".weight_ih": (15, 3), ".weight_hh": (15, 5), ".bias": (15,), ".bias_n": (5,)},
        ),
        (
            nn.LSTMCell(3, 5, key=KEY),
            {".weight_ih": "gates in", ".weight_hh": "gates hidden", ".bias": "gates"},
            {".weight_ih": (20, 3), ".weight_hh": (20, 5), ".bias": (20,)},
        ),
        (
            nn.make_with_state(nn.BatchNorm)(5, "batch", mode="batch")[0],
            {".weight": "input_size", ".bias": "input_size"},
            {".weight": (5,)},
        ),
        (
            nn.WeightNorm(nn.Linear(3, 5, key=KEY)),
            {".layer.weight": "out in", ".layer.bias": "out", ".g": "out _"},
            {".g": (5, 1)},
        ),
        (nn.PReLU(), {".negative_slope": ""}, {".negative_slope": ()}),
        (
            nn.MLP(3, 5, 4, 1, key=KEY),
            {
                f".layers[{i}].{field}": dims
                for i in (0, 1)
                for field, dims in (("weight", "out in"), ("bias", "out"))
            },
            {".layers[0].weight": (4, 3), ".layers[1].weight": (5, 4)},
        ),
    ]


def is_inexact(shape):
    return isinstance(shape, jax.ShapeDtypeStruct) and jnp.issubdtype(shape.dtype, jnp.inexact)


class TestEquinoxLayers:
    # As shapes: to draw weights for all of them takes seconds, whenever tests are collected.
    @pytest.mark.parametrize(
        ("layer", "names", "shapes"),
        eqx.filter_eval_shape(layers),
        ids=lambda x: type(x).__name__,
    )
    def test_names(self, layer, names, shapes):
        """The names stand for what the layer's dimensions really are."""
        seen = {}

        def look(leaf):
            told = by_axes({}).why(leaf)
            seen[leaf.name] = (told, leaf.shape)

        mylib.resolve(eqx.filter(layer, is_inexact), look)
        expected = {
            name: f"names {dims.strip()!r}" if dims.strip("_ ") else "no axis for its names"
            for name, dims in names.items()
        }
        assert {name: told for name, (told, _) in seen.items()} == expected
        assert {name: seen[name][1] for name in shapes} == shapes

    def test_no_layer_is_forgotten(self):
        """An `eqx.nn` that grows a layer with arrays in it needs an entry in the table."""
        nn = vars(eqx.nn).values()
        classes = {c for c in nn if isinstance(c, type) and issubclass(c, eqx.Module)}
        tested = {type(layer) for layer, _, _ in eqx.filter_eval_shape(layers)}
        without_arrays = {
            *(eqx.nn.Dropout, eqx.nn.Identity, eqx.nn.Lambda, eqx.nn.RotaryPositionalEmbedding),
            *(c for c in classes if issubclass(c, eqx.nn.Pool | eqx.nn.AdaptivePool)),
            # What they hold has names of its own; the state of SpectralNorm is no dimension of it.
            *(eqx.nn.Sequential, eqx.nn.Shared, eqx.nn.SpectralNorm, eqx.nn.StatefulLayer),
            eqx.nn.StateIndex,
            # Conv1d to Conv3d are tested in their place.
            *(eqx.nn.Conv, eqx.nn.ConvTranspose),
        }
        assert classes == tested | without_arrays

    def test_attention_by_heads(self):
        attention = eqx.nn.MultiheadAttention(4, 32, key=KEY)
        assert specs(attention, by_axes({"heads": "model"})) == {
            ".query_proj.weight": P("model"),
            ".key_proj.weight": P("model"),
            ".value_proj.weight": P("model"),
            ".output_proj.weight": P(None, "model"),
        }


class Gate(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    inner: models.AnnotatedMLP

    def __init__(self, *, key: PRNGKeyArray):
        self.up = eqx.nn.Linear(8, 16, key=key)
        self.down = eqx.nn.Linear(16, 8, key=key)
        self.inner = models.AnnotatedMLP(8, 16, key=key)


class TestNamesForOthers:
    NAMES = {Gate: {"up.weight": "mlp embed", "up.bias": "mlp", "down.weight": "embed mlp"}}

    def test_the_outer_class_counts_more_than_the_inner(self):
        assert specs(Gate(key=KEY), by_axes({"mlp": "model", "out": "data"}, names=self.NAMES)) == {
            ".up.weight": P("model"),
            ".up.bias": P("model"),
            ".down.weight": P(None, "model"),
            # Not named: the names of `eqx.nn.Linear`, and annotations.
            ".down.bias": P("data"),
            ".inner.up": P("model"),
            ".inner.up_bias": P("model"),
            ".inner.down": P(None, "model"),
        }

    def test_what_is_given_counts_more_than_an_annotation(self):
        names = {models.AnnotatedMLP: {"up": "a b"}}
        rule = by_axes({"b": "data", "mlp": "model"}, names=names)
        assert specs(models.AnnotatedMLP(key=KEY), rule) == {
            ".up": P(None, "data"),
            ".up_bias": P("model"),
            ".down": P(None, "model"),
        }

    def test_of_given_classes_the_outermost_counts(self):
        names = {Gate: {"**.up_bias": "a"}, models.AnnotatedMLP: {"up_bias": "b", "up": "b _"}}
        found = specs(
            Gate(key=KEY), by_axes({"a": "data", "b": "model"}, names=names) | replicated()
        )
        assert found[".inner.up_bias"] == P("data") and found[".inner.up"] == P("model")

    def test_a_subclass_has_the_names_of_its_base_unless_it_has_its_own(self):
        class Wide(eqx.nn.Linear):
            pass

        class Wider(Wide):
            pass

        names = {Wide: {"weight": "wide in"}}
        rule = by_axes({"wide": "model", "out": "data"}, names=names)
        tree = [Wider(8, 8, key=KEY), eqx.nn.Linear(8, 8, key=KEY)]
        assert specs(tree, rule) == {
            "[0].weight": P("model"),
            "[0].bias": P("data"),
            "[1].weight": P("data"),
            "[1].bias": P("data"),
        }

    def test_patterns_speak_of_the_whole_path_from_the_class(self):
        tree = {"gates": [Gate(key=KEY)]}
        rule = by_axes({"a": "model"}, names={Gate: {"*.weight": "a _", "**": "_"}}) | replicated()
        found = specs(tree, rule)
        assert found["['gates'][0].up.weight"] == P("model")
        assert found["['gates'][0].inner.up_bias"] == P()
        (wrong,) = faults(tree, by_axes({}, names={Gate: {"weight": "a b"}}) | replicated())
        assert wrong.request == "by_axes: names 'a b' for 'weight' of Gate"
        assert wrong.reason == "no leaf there has this number of dimensions"

    def test_fewer_dimensions_than_named(self):
        rule = by_axes({"a": "model"}, names={eqx.nn.Linear: {"weight": "a b c", "bias": "a"}})
        assert {fault.path for fault in faults(eqx.nn.Linear(8, 8, key=KEY), rule)} >= {".weight"}

    def test_names_of_too_many_dimensions_are_of_no_use(self):
        names = {Gate: {"up.weight": "a b c"}}
        (wrong,) = faults(Gate(key=KEY), by_axes({}, names=names) | replicated())
        assert wrong.request == "by_axes: names 'a b c' for 'up.weight' of Gate"

    @pytest.mark.parametrize("dims", ["out, in", ("out", "in")])
    def test_what_is_no_annotation(self, dims):
        with pytest.raises(ValueError, match="write names as in an annotation"):
            by_axes({}, names={eqx.nn.Linear: {"weight": dims}})

    def test_the_state_of_one_who_is_named(self):
        state = optax.adamw(1e-3).init(eqx.filter(Gate(key=KEY), eqx.is_array))
        rule = by_axes({"mlp": "model"}, names=self.NAMES)
        assert specs(state, rule)["[0].nu.down.weight"] == P(None, "model")

    def test_other_dataclasses_and_named_tuples(self):
        state = optax.ScaleByAdamState(jnp.zeros((), int), {"w": jnp.zeros((8, 8))}, {})
        names = {optax.ScaleByAdamState: {"mu.w": "a b"}}
        assert specs(state, by_axes({"b": "data"}, names=names)) == {
            ".count": P(),
            ".mu['w']": P(None, "data"),
        }

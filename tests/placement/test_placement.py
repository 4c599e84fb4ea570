"""`resolve`: one target for every array leaf, whatever the placement and the tree."""

import functools
import re
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import _generate as generate
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from hypothesis import given
from jax.experimental.layout import Format, Layout
from jax.sharding import (
    AbstractMesh,
    AxisType,
    NamedSharding,
    PartitionSpec as P,
    SingleDeviceSharding,
)

import mylib
from mylib._core.placement import bytes_on_each
from mylib.rules import PASS

MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
EXPLICIT = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
FLAT = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
ROWS = NamedSharding(MESH, P("data"))
WHOLE = NamedSharding(MESH, P())

X = np.zeros((8, 4), np.float32)


def mlp():
    return eqx.nn.MLP(8, 8, 8, 1, key=jax.random.key(0))


def targets(tree, placement, mesh=MESH):
    """The targets of a tree's array leaves, in order."""
    resolved = mylib.resolve(tree, placement, mesh=mesh)
    return jtu.tree_leaves(resolved, is_leaf=lambda x: x is None)


class TestKinds:
    @pytest.mark.parametrize(
        "placement",
        [
            SingleDeviceSharding(jax.devices()[3]),
            ROWS,
            NamedSharding(EXPLICIT, P("data", "model")),
            NamedSharding(MESH, P("data"), memory_kind="pinned_host"),
            Format(Layout((1, 0)), ROWS),
        ],
        ids=lambda p: type(p).__name__,
    )
    def test_a_sharding_or_format_is_its_own_target(self, placement):
        assert mylib.resolve(X, placement) is placement
        assert mylib.resolve(X, placement, mesh=FLAT) is placement

    def test_device(self):
        device = jax.devices()[3]
        assert mylib.resolve(X, device) == SingleDeviceSharding(device)
        assert mylib.resolve(X, device, mesh=MESH) == SingleDeviceSharding(device)

    def test_none(self):
        assert mylib.resolve(X, None) is None
        assert mylib.resolve([X, {"a": X}], None) == [None, {"a": None}]

    def test_spec_over_the_mesh_argument(self):
        assert mylib.resolve(X, P("data"), mesh=MESH) == ROWS
        assert mylib.resolve(X, P("data"), mesh=EXPLICIT) == NamedSharding(EXPLICIT, P("data"))

    @pytest.mark.parametrize("mesh", [MESH, EXPLICIT], ids=["auto", "explicit"])
    def test_spec_over_the_mesh_that_is_set(self, mesh):
        with jax.set_mesh(mesh):
            assert mylib.resolve(X, P("data")) == NamedSharding(mesh, P("data"))

    def test_spec_under_the_deprecated_with_mesh(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            with MESH:
                assert mylib.resolve(X, P("data")) == ROWS

    def test_the_mesh_argument_goes_first(self):
        with jax.set_mesh(EXPLICIT):
            assert mylib.resolve(X, P("data"), mesh=MESH) == ROWS

    def test_mesh_means_nothing_to_shardings(self):
        with jax.set_mesh(EXPLICIT):
            assert mylib.resolve(X, ROWS, mesh=FLAT) is ROWS

    @pytest.mark.parametrize(
        "spec",
        [
            P(),
            P(None),
            P(None, "model"),
            P("data", None),
            P(("data", "model")),
            P(("model", "data"), None),
            P((), "model"),
            P(P.UNCONSTRAINED, "model"),
        ],
        ids=str,
    )
    def test_specs_are_taken_as_they_are_written(self, spec):
        assert mylib.resolve(X, spec, mesh=MESH).spec == spec

    def test_spec_in_a_jitted_function(self):
        seen = []

        def f(x):
            seen.append(mylib.resolve(x, P("data")))
            seen.append(mylib.resolve(x, P("data"), mesh=MESH))
            return x

        with jax.set_mesh(MESH):
            jax.jit(f)(X)
        implied, given = seen
        assert implied.spec == P("data")
        assert implied.mesh.shape == MESH.shape
        assert given == ROWS

    def test_spec_inside_shard_map(self):
        seen = []

        def f(x):
            seen.append(mylib.resolve(x, P(None, "model")))
            return x

        rows = dict(in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
        jax.jit(jax.shard_map(f, mesh=MESH, **rows))(X)
        assert seen[0].spec == P(None, "model")

    def test_spec_over_a_mesh_of_one_device(self):
        alone = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
        assert mylib.resolve(np.zeros(7), P("data"), mesh=alone) == NamedSharding(alone, P("data"))


class TestLeaves:
    @pytest.mark.parametrize(
        "x",
        [
            X,
            jnp.zeros((8, 4)),
            np.zeros((0, 4)),
            np.zeros(()),
            np.float32(1.0),
            np.float64(1.0),
            np.int64(1),
            np.uint8(1),
            np.bool_(True),
            np.complex128(1.0),
            np.zeros(8, np.float16),
            np.zeros(8, jnp.bfloat16),
            np.zeros(8, jnp.int4),
            np.zeros(8, jnp.float8_e4m3fn),
            jax.random.key(0),
            jax.random.split(jax.random.key(0), 8),
            jax.random.PRNGKey(0),
            jax.ShapeDtypeStruct((8, 4), jnp.float32),
        ],
        ids=lambda x: f"{type(x).__name__}-{x.dtype}{list(x.shape)}",
    )
    def test_placed(self, x):
        assert mylib.resolve(x, P(), mesh=MESH) == WHOLE
        assert mylib.resolve([x], [P()], mesh=MESH) == [WHOLE]

    @pytest.mark.parametrize(
        "x",
        [
            3,
            2.5,
            1j,
            True,
            "text",
            b"bytes",
            len,
            jnp.float32,
            np.dtype("float32"),
            AxisType.Auto,
            MESH,
            ROWS,
            np.array(["text"]),
            np.array([b"text"]),
            np.array(["text"], np.dtypes.StringDType()),
            np.array([object()]),
            np.array(["2026-01-01"], "M8[D]"),
            np.array([1], "m8[s]"),
            np.zeros(2, [("a", "f4"), ("b", "i4")]),
            np.zeros(2, np.dtype("V3")),
            np.zeros(2, jax.dtypes.float0),
            np.ma.masked_array([1.0, 2.0], [True, False]),
            np.str_("text"),
            np.datetime64(1, "s"),
        ],
        # Without addresses: a name is the same in every session.
        ids=lambda x: re.sub(" at 0x[0-9a-f]+", "", repr(x)),
    )
    @pytest.mark.parametrize("placement", [P("data"), P("no such axis"), 3, "text", PASS, MESH])
    def test_static_whatever_is_asked_of_it(self, x, placement):
        assert mylib.resolve(x, placement, mesh=MESH) is None
        assert mylib.resolve([x], [placement], mesh=MESH) == [None]
        assert mylib.filter_shard(x, placement, mesh=MESH) is x

    def test_bytes_in_another_order(self):
        x = np.arange(8, dtype=">f4")
        for placed in (
            mylib.filter_shard(x, P("data"), mesh=MESH),
            jax.jit(lambda: mylib.filter_shard(x, P("data"), mesh=MESH))(),
            mylib.filter_jit(lambda x: x, in_shardings=ROWS)(x),
            mylib.filter_device_put(x),
        ):
            assert placed.dtype == np.float32 and placed.tolist() == [*range(8)]
        assert mylib.filter_shard(x, None) is x

    def test_nothing_to_place_needs_no_mesh(self):
        assert mylib.resolve((1, None, "text"), P("data")) == (None, None, None)
        assert mylib.resolve([], P("data")) == []
        assert mylib.resolve(None, P("data")) is None

    def test_the_result_has_the_structure_of_the_tree(self):
        tree = {"model": mlp(), "step": 3, "batch": (X, None)}
        resolved = mylib.resolve(tree, P(), mesh=MESH)
        expected = jax.tree.map(lambda x: WHOLE if eqx.is_array(x) else None, tree)
        assert eqx.tree_equal(resolved, expected)
        assert isinstance(resolved["model"], eqx.nn.MLP)


class TestAbstractLeaves:
    """`jax.ShapeDtypeStruct`s can be placed on paper."""

    def test_larger_than_any_memory(self):
        paper = jax.ShapeDtypeStruct((2**20, 2**20), jnp.float32)
        placed = mylib.filter_shard(paper, P("data", "model"), mesh=MESH)
        assert (placed.shape, placed.dtype) == (paper.shape, paper.dtype)
        assert placed.sharding == NamedSharding(MESH, P("data", "model"))
        assert mylib.filter_device_put(paper, P("data", "model"), mesh=MESH) == placed

    def test_over_a_mesh_without_devices(self):
        abstract = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        paper = jax.ShapeDtypeStruct((8, 4), jnp.float32)
        assert mylib.resolve(paper, P("data"), mesh=abstract) == NamedSharding(abstract, P("data"))
        with jax.sharding.use_abstract_mesh(abstract):
            assert mylib.resolve(paper, P("data")) == NamedSharding(abstract, P("data"))

    def test_everything_but_the_sharding_stays(self):
        paper = jax.ShapeDtypeStruct((8,), jnp.bfloat16, weak_type=True)
        placed = mylib.filter_shard(paper, P("data"), mesh=MESH)
        assert placed.weak_type and placed.dtype == jnp.bfloat16
        assert mylib.filter_shard(paper, None) is paper

    def test_in_memory_kinds_and_on_devices(self):
        paper = jax.ShapeDtypeStruct((8,), jnp.float32)
        host = NamedSharding(MESH, P("data"), memory_kind="pinned_host")
        device = jax.devices()[3]
        assert mylib.filter_shard(paper, host).sharding == host
        assert mylib.filter_shard(paper, device).sharding == SingleDeviceSharding(device)

    def test_in_layouts(self):
        paper = jax.ShapeDtypeStruct((8, 4), jnp.float32)
        format = Format(Layout((1, 0)), ROWS)
        assert mylib.filter_shard(paper, format).format == format

    def test_keys(self):
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8))
        assert mylib.filter_shard(keys, P("data"), mesh=MESH).sharding == ROWS

    def test_a_model_on_paper_compiles_to_where_it_was_placed(self):
        model = eqx.filter_eval_shape(mlp)
        placed = mylib.filter_shard(model, lambda leaf: P(*["data"][: leaf.ndim]), mesh=MESH)
        arrays, static = eqx.partition(placed, lambda x: isinstance(x, jax.ShapeDtypeStruct))
        compiled = jax.jit(lambda m: jax.tree.map(jnp.sin, m)).lower(arrays).compile()
        ((shardings,), _) = compiled.input_shardings
        assert shardings.layers[0].weight.spec == P("data")

    def test_a_resolved_model_on_paper_places_the_real_one(self):
        def rule(leaf):
            return P("data") if leaf.name.endswith("weight") else P()

        plan = mylib.resolve(eqx.filter_eval_shape(mlp), rule, mesh=MESH)
        placed = mylib.filter_shard(mlp(), plan)
        assert placed.layers[1].weight.sharding == ROWS
        assert placed.layers[1].bias.sharding == WHOLE
        assert placed.activation is mlp().activation


def by_rank(leaf):
    return P("data") if leaf.ndim == 2 else P()


class TestRules:
    def test_a_rule_is_asked_about_every_array(self):
        assert targets([X, np.zeros(3), 3], by_rank) == [ROWS, WHOLE, None]

    def test_a_rule_is_not_asked_about_what_is_no_array(self):
        def fail(leaf):
            raise AssertionError(leaf)

        tree = (1, "text", None, len, np.array(["text"]))
        assert mylib.resolve(tree, fail) == (None,) * 5

    @pytest.mark.parametrize(
        ("answer", "target"),
        [
            (None, None),
            (P("data"), ROWS),
            (ROWS, ROWS),
            (jax.devices()[3], SingleDeviceSharding(jax.devices()[3])),
            (Format(Layout((1, 0)), ROWS), Format(Layout((1, 0)), ROWS)),
            (by_rank, ROWS),
            (lambda leaf: by_rank, ROWS),
        ],
        ids=["none", "spec", "sharding", "device", "format", "rule", "rule of a rule"],
    )
    def test_what_a_rule_may_return(self, answer, target):
        assert targets([X], lambda leaf: answer) == [target]

    def test_a_rule_in_a_prefix_rules_its_part(self):
        tree = {"a": [X, X], "b": X}
        assert targets(tree, {"a": by_rank, "b": P()}) == [ROWS, ROWS, WHOLE]

    def test_kinds_of_callables(self):
        class Method:
            def rule(self, leaf):
                return by_rank(leaf)

        @dataclass(frozen=True)
        class Frozen:
            axis: str

            def __call__(self, leaf):
                return P(self.axis)

        class Node(eqx.Module):
            axis: str
            inner: Any = None

            def __call__(self, leaf):
                return P(self.axis)

            def rule(self, leaf):
                return self

        def over(axis, leaf):
            return P(axis)

        rules = [
            by_rank,
            lambda leaf: by_rank(leaf),
            functools.partial(over, "data"),
            Method().rule,
            Frozen("data"),
            Node("data"),
            Node("data", by_rank),
            Node("data").rule,
            jax.tree_util.Partial(over, "data"),
            eqx.Partial(over, "data"),
        ]
        for rule in rules:
            assert targets([X], rule) == [ROWS]
            assert targets({"a": [X], "b": X}, {"a": rule, "b": P()}) == [ROWS, WHOLE]
            assert targets([X], rule | mylib.rules.replicated()) == [ROWS]
            assert targets([X], mylib.rules.where_even(rule)) == [ROWS]
            step = mylib.filter_jit(lambda x: x, in_shardings={"x": rule}, mesh=MESH)
            assert step(X).sharding == ROWS

    def test_a_rule_without_end(self):
        class Endless:
            def rule(self, leaf):
                return self.rule

        with pytest.raises(mylib.PlacementError, match="the rule returns itself"):
            targets([X], Endless().rule)

    def test_each_leaf_is_asked_about_once_and_in_order(self):
        asked = []

        def rule(leaf):
            asked.append(leaf.name)
            return P()

        mylib.filter_shard({"a": [X, X], "b": X}, rule, mesh=MESH)
        assert asked == ["['a'][0]", "['a'][1]", "['b']"]

    def test_the_same_array_twice_is_two_leaves(self):
        def rule(leaf):
            return P("data") if leaf.name == "[0]" else P()

        assert targets([X, X], rule) == [ROWS, WHOLE]

    def test_a_rule_that_makes_a_new_answer_every_time(self):
        def rule(leaf):
            return NamedSharding(MESH, P("data" if leaf.path[0].idx % 2 else None))

        expected = [WHOLE, ROWS] * 50
        for target, wanted in zip(targets([X] * 100, rule), expected, strict=True):
            assert target.is_equivalent_to(wanted, 2)

    def test_a_rule_that_raises_is_heard_with_rule_and_leaf(self):
        def broken(leaf):
            return {}[leaf.name]

        with pytest.raises(KeyError) as caught:
            mylib.resolve([3, {"w": X}], broken, mesh=MESH)
        (note,) = caught.value.__notes__
        assert note == f"(raised by the rule {broken!r} for the leaf [1]['w'])"

    def test_a_rule_that_raises_under_jit(self):
        def broken(leaf):
            raise RuntimeError("broken")

        def f(x):
            return mylib.filter_shard(x, broken, mesh=MESH)

        with pytest.raises(RuntimeError, match="^broken") as caught:
            jax.jit(f)(X)
        assert any("for the leaf the array" in note for note in caught.value.__notes__)


class Demanding:
    """A rule that expects to be asked about leaves of certain names."""

    def __init__(self, *wanted, answer=None):
        self.wanted = wanted
        self.answer = answer
        self.calls = []

    def __call__(self, leaf):
        return self.answer

    def __repr__(self):
        return f"Demanding{self.wanted}"

    def faults(self, leaves):
        names = [leaf.name for leaf in leaves]
        self.calls.append(names)
        return [f"no leaf is called {name}" for name in self.wanted if name not in names]


class TestRulesWithFaults:
    def test_asked_once_with_all_leaves(self):
        rule = Demanding("['a']")
        mylib.resolve({"a": X, "b": [X, 3]}, rule)
        assert rule.calls == [["['a']", "['b'][0]"]]

    def test_asked_once_though_it_stands_at_several_places(self):
        rule = Demanding("[0]", "[2]")
        mylib.resolve([X, X, X], [rule, None, rule])
        assert rule.calls == [["[0]", "[2]"]]

    def test_a_rule_that_another_rule_returns_is_asked_too(self):
        inner = Demanding("[1]")
        mylib.resolve([X, X], lambda leaf: inner if leaf.name == "[1]" else None)
        assert inner.calls == [["[1]"]]

    def test_its_complaints_are_faults(self):
        with pytest.raises(mylib.PlacementError) as caught:
            mylib.resolve([X], Demanding("w", "b"))
        assert [fault.reason for fault in caught.value.faults] == [
            "no leaf is called w",
            "no leaf is called b",
        ]

    def test_they_come_with_the_faults_of_leaves(self):
        with pytest.raises(mylib.PlacementError) as caught:
            mylib.resolve([X], Demanding("w", answer=P("typo")), mesh=MESH)
        of_leaf, of_rule = caught.value.faults
        assert of_leaf.path == "[0]"
        assert (of_rule.path, of_rule.shape, of_rule.request) == ("", None, "Demanding('w',)")

    def test_asked_under_jit_as_well(self):
        rule = Demanding("the weight")
        with pytest.raises(mylib.PlacementError, match="no leaf is called the weight"):
            jax.jit(lambda x: mylib.filter_shard(x, rule))(X)


class Layer(eqx.Module):
    weight: Any
    bias: Any
    activation: Any = jax.nn.relu
    name: str = eqx.field(static=True, default="layer")

    def __call__(self, x):
        return self.activation(self.weight @ x + self.bias)


class TestPrefixes:
    @pytest.mark.parametrize(
        ("tree", "prefix", "expected"),
        [
            ([X, X], P("data"), [ROWS, ROWS]),
            ([X, X], [P("data"), P()], [ROWS, WHOLE]),
            ((X, [X, X]), (P(), P("data")), [WHOLE, ROWS, ROWS]),
            ({"a": X, "b": (X, X)}, {"a": P(), "b": (P("data"), None)}, [WHOLE, ROWS, None]),
            (OrderedDict(b=X, a=X), OrderedDict(b=P(), a=P("data")), [WHOLE, ROWS]),
            ([X, None, X], [P(), None, P("data")], [WHOLE, None, ROWS]),
            ([X, None, X], [P(), P("data"), P("data")], [WHOLE, None, ROWS]),
            ([X, (), {}], [P(), (), {}], [WHOLE]),
            ([X, (), {}], [P(), P(), P()], [WHOLE]),
            ([X, "text", 3], [P("data"), P(), None], [ROWS, None, None]),
            ([[X, "text"], X], [None, P()], [None, None, WHOLE]),
        ],
    )
    def test_of_containers(self, tree, prefix, expected):
        assert targets(tree, prefix) == expected

    def test_of_modules(self):
        layer = Layer(X, np.zeros(8))
        prefix = Layer(P("data"), P(), None)
        assert targets(layer, prefix) == [ROWS, WHOLE, None]
        assert targets({"x": [layer, X]}, {"x": [prefix, None]}) == [ROWS, WHOLE, None, None]

    def test_a_module_of_shardings_is_a_prefix_though_it_can_be_called(self):
        prefix = jax.tree.map(lambda x: WHOLE, Layer(X, X, activation=None))
        assert callable(prefix)
        assert targets(Layer(X, X), prefix) == [WHOLE, WHOLE, None]

    def test_a_module_of_rules_is_a_prefix_of_its_own_structure(self):
        prefix = Layer(by_rank, lambda leaf: P(), None)
        assert targets(Layer(X, X), prefix) == [ROWS, WHOLE, None]
        assert targets([Layer(X, X)], [prefix]) == [ROWS, WHOLE, None]

    def test_a_module_without_placements_that_does_not_fit_is_called(self):
        asked = []

        class Asked(eqx.Module):
            name: str

            def __call__(self, leaf):
                asked.append((self.name, leaf.name))
                return None

        tree = {"a": Layer(X, X), "b": X}
        assert targets(tree, {"a": Asked("first"), "b": Asked("second")}) == [None] * 4
        assert asked == [
            ("first", "['a'].weight"), ("first", "['a'].bias"), ("second", "['b']"),
        ]  # fmt: skip

    def test_a_model_with_parts_of_it_replaced(self):
        model = mlp()
        prefix = jax.tree.map(lambda x: P() if eqx.is_array(x) else None, model)
        prefix = eqx.tree_at(lambda m: m.layers[0].weight, prefix, P("data"))
        resolved = mylib.resolve(model, prefix, mesh=MESH)
        assert resolved.layers[0].weight == ROWS
        assert resolved.layers[1].weight == WHOLE

    def test_a_model_with_subtrees_replaced(self):
        model = mlp()
        prefix = eqx.tree_at(lambda m: (m.layers[0], m.layers[1]), model, (P("data"), ROWS))
        resolved = mylib.resolve(model, prefix, mesh=MESH)
        assert resolved.layers[0].weight == resolved.layers[0].bias == ROWS

    def test_a_function_left_in_a_prefix_says_nothing_of_a_function(self):
        # As in a model of shardings that was made with `eqx.tree_at`: the activation stands where
        # the tree has no array.
        assert targets(Layer(X, X), Layer(P(), P())) == [WHOLE, WHOLE, None]

    def test_named_tuples(self):
        class Batch(NamedTuple):
            x: Any
            y: Any

        assert targets(Batch(X, [X]), Batch(P("data"), None)) == [ROWS, None]

    def test_states_of_optimisers(self):
        params = {"w": X, "b": np.zeros(8)}
        state = optax.chain(optax.clip(1.0), optax.adam(1e-3)).init(params)
        clip, (adam, scale) = state
        one_for_each = (clip, (type(adam)(count=P(), mu=P("data"), nu=None), scale))
        resolved = mylib.resolve(state, one_for_each, mesh=MESH)
        moments = resolved[1][0]
        assert moments.count == WHOLE
        assert moments.mu == {"w": ROWS, "b": ROWS}
        assert moments.nu == {"w": None, "b": None}

        of_params = {"w": P("data"), "b": P()}
        like_params = (P(), (type(adam)(P(), of_params, of_params), None))
        resolved = mylib.resolve(state, like_params, mesh=MESH)
        assert resolved[1][0].mu == resolved[1][0].nu == {"w": ROWS, "b": WHOLE}

    def test_a_spec_is_one_placement_and_not_a_sequence_of_axes(self):
        assert targets([X, X], P("data", "model")) == [NamedSharding(MESH, P("data", "model"))] * 2

    def test_partial_functions_are_nodes(self):
        tree = jtu.Partial(len, X, y=X)
        assert targets(tree, jtu.Partial(len, P("data"), y=None)) == [ROWS, None]


def with_nones(tree):
    return jtu.tree_flatten(tree, is_leaf=lambda x: x is None)


@given(generate.cases())
def test_every_leaf_of_any_tree_gets_its_target(case):
    resolved = mylib.resolve(case.tree, case.placement, mesh=case.mesh)
    expected = jtu.tree_structure(case.tree).unflatten(case.targets)
    assert with_nones(resolved) == with_nones(expected)


@given(generate.cases())
def test_what_is_resolved_is_itself_a_placement(case):
    resolved = mylib.resolve(case.tree, case.placement, mesh=case.mesh)
    assert with_nones(mylib.resolve(case.tree, resolved)) == with_nones(resolved)


@given(generate.cases())
def test_a_tree_on_paper_resolves_as_the_tree_itself(case):
    def on_paper(x):
        return jax.eval_shape(lambda x: x, x) if generate.is_placed(x) else x

    paper = jax.tree.map(on_paper, case.tree)
    resolved = mylib.resolve(paper, case.placement, mesh=case.mesh)
    expected = mylib.resolve(case.tree, case.placement, mesh=case.mesh)
    assert with_nones(resolved) == with_nones(expected)


@pytest.mark.parametrize(
    ("sharding", "each"),
    [
        (None, 7 * 4 * 4),
        (SingleDeviceSharding(jax.devices()[0]), 7 * 4 * 4),
        (NamedSharding(MESH, P()), 7 * 4 * 4),
        (NamedSharding(MESH, P(None, ("data", "model"))), 7 * 1 * 4),
        (NamedSharding(MESH, P("data", P.UNCONSTRAINED)), 2 * 4 * 4),  # an uneven size
        (NamedSharding(MESH.abstract_mesh, P(None, "model")), 7 * 2 * 4),
    ],
)
def test_bytes_on_each_device(sharding, each):
    assert bytes_on_each(sharding, (7, 4), np.dtype("float32")) == each

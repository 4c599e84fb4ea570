"""The rules of `mylib.rules`: what each answers, how they combine, and what they find wrong."""

import inspect
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import models
import numpy as np
import optax
import pytest
import rooms
from hypothesis import given, strategies as st
from jax.experimental.layout import Format, Layout
from jax.sharding import (
    AbstractMesh,
    AxisType,
    NamedSharding,
    PartitionSpec as P,
    SingleDeviceSharding,
)

import mylib
from mylib.rules import PASS, Rule, batch, by_axes, by_path, fsdp, like, replicated, where_even

MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
ABSTRACT = AbstractMesh((4, 2), ("data", "model"))


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def leaf(*shape, path="weight", mesh=ABSTRACT):
    keys = tuple(
        jtu.SequenceKey(int(part)) if part.isdigit() else jtu.GetAttrKey(part)
        for part in path.split(".")
    )
    return mylib.Leaf(keys, shape, np.dtype("float32"), mesh)


def specs(tree, rule, mesh=MESH):
    """The spec of every array leaf, by name."""
    resolved = mylib.resolve(tree, rule, mesh=mesh)
    return {jtu.keystr(path): target.spec for path, target in jtu.tree_leaves_with_path(resolved)}


def fault(tree, rule, mesh=MESH):
    """The one thing that is wrong."""
    with pytest.raises(mylib.PlacementError) as caught:
        mylib.resolve(tree, rule, mesh=mesh)
    (only,) = caught.value.faults
    assert only.request in str(caught.value) and only.fix in str(caught.value)
    return only


class TestPatterns:
    @pytest.mark.parametrize(
        ("pattern", "path", "matches"),
        [
            # The end of a path, part by part.
            ("weight", "layers.0.weight", True),
            ("0.weight", "layers.0.weight", True),
            ("layers.0.weight", "layers.0.weight", True),
            ("layers.0", "layers.0.weight", False),
            ("eight", "layers.0.weight", False),
            ("0.layers.0.weight", "layers.0.weight", False),
            ("weight", "weight", True),
            # As it is printed.
            (".layers[0].weight", "layers.0.weight", True),
            ("['layers'][0]['weight']", "layers.0.weight", True),
            ('["layers"].0.weight', "layers.0.weight", True),
            ("layers[*].weight", "layers.0.weight", True),
            # `*` within one part.
            ("layers.*.weight", "layers.10.weight", True),
            ("*.weight", "layers.0.weight", True),
            ("*.weight", "weight", False),
            ("layers.*", "layers.0.weight", False),
            ("*_proj.weight", "attention.query_proj.weight", True),
            ("w*t", "layers.0.weight", True),
            ("l*s.*.*", "layers.0.weight", True),
            ("query*", "attention.query_proj", True),
            ("layers*weight", "layers.0.weight", False),
            # `**` for any number of whole parts.
            ("layers.**", "layers.0.weight", True),
            ("layers.**", "model.layers.0.weight", True),
            ("layers.**", "layers", True),
            ("layers.**.weight", "layers.weight", True),
            ("layers.**.weight", "layers.0.mlp.weight", True),
            ("layers.**.weight", "layers.0.mlp.bias", False),
            ("layers.**.weight", "mylayers.0.weight", False),
            ("**", "layers.0.weight", True),
            ("**.0.**", "layers.0.weight", True),
            ("**.1.**", "layers.0.weight", False),
            # Nothing else stands for anything but itself.
            ("we.ght", "weight", False),
            ("weigh?", "weight", False),
            ("w+", "w+", True),
            ("a(b)|c$", "a(b)|c$", True),
        ],
    )
    def test_match(self, pattern, path, matches):
        found = by_path({pattern: P("data")})(leaf(8, path=path))
        assert found == (P("data") if matches else PASS)

    def test_keys_that_hold_dots_and_brackets(self):
        tree = {"a.b": {"c[0]": array(8)}, "a": {"b": {"c": array(8)}}, "": array(8)}
        rule = by_path({"['a.b']['c[0]']": P("data"), "a.b.c": P("model"), "**": P()}, ordered=True)
        assert list(specs(tree, rule).values()) == [P(), P("model"), P("data")]

    def test_every_kind_of_key(self):
        class Node:
            pass

        def unflatten(_, children):
            return Node()

        jtu.register_pytree_node(Node, lambda node: ((array(8), array(8)), None), unflatten)
        with_keys = type("WithKeys", (), {})
        jtu.register_pytree_with_keys(
            with_keys, lambda node: ([("own key", array(8))], None), lambda *_: with_keys()
        )
        tree = [Node(), with_keys(), {3: array(8)}]
        rule = by_path({"0.1": P("data"), "own key": P("model"), "2.3": P()}) | fsdp("data")
        with pytest.raises(ValueError):  # these nodes can't be rebuilt with targets in them
            mylib.resolve(tree, 3, mesh=ABSTRACT)
        found = {row.leaf.parts: row.spec for row in mylib.explain(tree, rule, ABSTRACT).rows}
        assert found == {
            ("0", "0"): "P()",
            ("0", "1"): "P('data')",
            ("1", "own key"): "P('model')",
            ("2", "3"): "P()",
        }

    @pytest.mark.parametrize("text", ["", ".", "a.", "a..b", "a[", "a]", "a[]", "a['b", " [0"])
    def test_no_path(self, text):
        with pytest.raises(ValueError, match="is not a path: write parts with dots") as caught:
            by_path({text: P()})
        assert repr(text) in str(caught.value)

    @given(
        st.lists(st.sampled_from(["a", "b", "ab", "0", "10"]), min_size=1, max_size=5),
        st.data(),
    )
    def test_made_from_a_path_a_pattern_matches_it(self, parts, data):
        start = data.draw(st.integers(0, len(parts) - 1))
        pattern = []
        for part in parts[start:]:
            form = data.draw(st.sampled_from(["as it is", "*", "part", "**", "nothing more"]))
            cut = data.draw(st.integers(0, len(part)))
            pattern += {
                "as it is": [part],
                "*": ["*"],
                "part": [part[:cut] + "*"],
                "**": ["**"],
                "nothing more": ["**", part, "**"],
            }[form]
        path = ".".join(parts)
        assert by_path({".".join(pattern): P()})(leaf(8, path=path)) == P()
        assert by_path({".".join(["no", *pattern]): P()})(leaf(8, path=path)) is PASS


class TestByPath:
    def test_unmatched_leaves(self):
        tree = {"w": array(8, 2), "b": array(8)}
        rule = by_path({"w": P("data")})
        found = fault(tree, rule)
        assert (found.path, found.shape) == ("['b']", (8,))
        assert "returns PASS for this leaf, and no other rule follows" in found.reason
        assert specs(tree, rule | replicated()) == {"['w']": P("data"), "['b']": P()}
        assert specs(tree, rule | batch("model")) == {"['w']": P("data"), "['b']": P("model")}

    def test_an_optimiser_state_follows(self):
        model = models.Transformer(key=jax.random.key(0))
        rule = by_path({"up.weight": P("model"), "up.bias": P("model")}) | replicated()
        state = optax.adamw(1e-3).init(eqx.filter(model, eqx.is_array))
        found = specs(state, rule)
        assert found["[0].count"] == P()
        assert found["[0].mu.layers[1].up.weight"] == found["[0].nu.layers[0].up.bias"]
        assert found["[0].mu.layers[1].up.weight"] == P("model")

    def test_scalars_are_replicated_unless_named(self):
        tree = {"w": array(8), "count": array()}
        assert specs(tree, by_path({"w": P("data")}))["['count']"] == P()
        device = jax.devices()[3]
        placed = mylib.resolve(tree, by_path({"w": P("data"), "count": device}), mesh=MESH)
        assert placed["count"] == SingleDeviceSharding(device)

    def test_a_state_of_scalars_only_is_no_fault(self):
        state = optax.sgd(optax.constant_schedule(0.1)).init({"w": jnp.zeros(8)})
        assert specs(state, by_path({"w": P("data")})) == {"[1].count": P()}
        assert specs((), by_path({"w": P("data")})) == {}

    def test_values_of_every_kind(self):
        sharding = NamedSharding(MESH, P("model"))
        device = jax.devices()[5]
        rule = by_path(
            {
                "a": sharding,
                "b": device,
                "c": None,
                "d": fsdp("data", min_size=0),
                "e": batch("data"),
            }
        )
        resolved = mylib.resolve(
            {name: array(2, 8) for name in "abcd"} | {"e": array(4)}, rule, mesh=MESH
        )
        assert resolved == {
            "a": sharding,
            "b": SingleDeviceSharding(device),
            "c": None,
            "d": NamedSharding(MESH, P(None, "data")),
            "e": NamedSharding(MESH, P("data")),
        }

    def test_a_pattern_that_matches_nothing(self):
        model = eqx.nn.MLP(8, 8, 8, 1, key=jax.random.key(0))
        found = fault(model, by_path({"layrs.*.weight": P("model"), "**": P()}))
        assert found.request == "by_path: 'layrs.*.weight'"
        assert found.reason == "the pattern matches none of the 4 leaves"
        assert found.fix == "did you mean 'layers.*.weight'?"

    def test_a_pattern_counts_once_though_the_tree_is_asked_about_in_parts(self):
        rule = by_path({"w": P("data"), "b": P()})
        prefix = ({"w": rule, "b": rule}, rule)
        tree = ({"w": array(8), "b": array(8)}, array())
        assert len(specs(tree, prefix)) == 3

    def test_patterns_that_disagree(self):
        tree = {"w": array(8, 8), "b": array(8)}
        patterns = {"w": P("data"), "*": P("model"), "b": P("model")}
        found = fault(tree, by_path(patterns))
        assert (found.path, found.shape) == ("['w']", (8, 8))
        assert found.request == "by_path: 'w' gives P('data'), '*' gives P('model')"
        assert found.reason == "these patterns all match, and disagree"
        assert "ordered=True" in found.fix
        in_order = specs(tree, by_path(patterns, ordered=True))
        assert in_order == {"['w']": P("data"), "['b']": P("model")}

    def test_every_fault_at_once(self):
        tree = {"w": array(8, 8), "b": array(8), "c": array(3)}
        rule = by_path({"w": P("data"), "*": P("model"), "x": P(), "c": P(None, "data")})
        with pytest.raises(mylib.PlacementError) as caught:
            mylib.resolve(tree, rule, mesh=ABSTRACT)
        reasons = [fault.reason for fault in caught.value.faults]
        assert len(reasons) == 4
        # Not of `c`: a spec that is too long for it says nothing of it.
        assert sum("disagree" in reason for reason in reasons) == 1
        assert sum("matches none" in reason for reason in reasons) == 1
        assert sum("does not divide" in reason for reason in reasons) == 1
        assert sum("but matching leaves have at most" in reason for reason in reasons) == 1

    def test_a_spec_too_long_for_a_factored_moment_is_no_opinion(self):
        params = {"w": jnp.zeros((256, 128))}
        state = optax.adafactor(1e-3).init(params)
        rule = by_path({"w": P("data", "model")})
        found = specs((params, state), rule | replicated())
        assert found["[0]['w']"] == P("data", "model")
        assert found["[1][0].v_row['w']"] == found["[1][0].v_col['w']"] == P()

    def test_a_spec_too_long_for_all(self):
        found = fault({"w": array(8)}, by_path({"w": P(None, "model")}) | replicated())
        assert found.request == f"by_path: 'w': {P(None, 'model')}"
        assert found.reason == (
            "the spec has 2 entries, but matching leaves have at most 1 dimension"
        )
        assert found.fix == "give at most 1"

    def test_a_spec_too_long_leaves_the_leaf_to_other_patterns(self):
        model = {"norm": {"weight": array(8)}, "linear": {"weight": array(8, 8)}}
        for patterns in (
            {"weight": P(None, "model"), "norm.*": P()},
            {"weight": P(None, "model"), "**": P()},
        ):
            found = specs(model, by_path(patterns, ordered=True))
            assert found == {"['norm']['weight']": P(), "['linear']['weight']": P(None, "model")}
        assert len(specs(model, by_path({"weight": P(None, "model"), "norm.*": P()}))) == 2

    def test_a_state_by_itself_may_have_none_of_what_a_spec_is_for(self):
        state = optax.adafactor(1e-3).init({"w": jnp.zeros((256, 128))})
        assert set(specs(state, by_path({"w": P("data", "model")}) | replicated()).values()) == {
            P()
        }
        found = fault(state, by_path({"v": P("data", "model")}) | replicated())
        assert found.fix.endswith("place the state along with its model")

    def test_specs_that_mean_the_same_agree(self):
        tree = {"w": array(8, 8)}
        assert specs(tree, by_path({"w": P("data"), "*": P("data", None)}))

    def test_a_rule_for_a_subtree(self):
        tree = {"encoder": {"w": array(64, 128), "b": array(8)}, "head": array(8, 8)}
        rule = by_path({"encoder.**": by_path({"w": P("model")}) | replicated(), "head": P()})
        assert list(specs(tree, rule).values()) == [P(), P("model"), P()]
        # What is wrong with it is found, too.
        found = fault(
            tree, by_path({"encoder.**": by_path({"x": P()}) | replicated(), "head": P()})
        )
        assert found.request == "by_path: 'x'" and "none of the 2 leaves" in found.reason

    def test_one_rule_under_two_patterns(self):
        inner = by_path({"w": P("data"), "v": P("model")})
        tree = {"a": {"w": array(8)}, "b": {"v": array(8)}}
        assert specs(tree, by_path({"a.**": inner, "b.**": inner})) == {
            "['a']['w']": P("data"),
            "['b']['v']": P("model"),
        }

    def test_what_is_not_a_placement_is_named(self):
        found = fault({"w": array(8)}, by_path({"w": "data"}))
        assert found.fix == "write P('data')"


class TestSimple:
    def test_replicated(self):
        assert specs([array(), array(3), array(8, 8)], replicated()) == {
            "[0]": P(),
            "[1]": P(),
            "[2]": P(),
        }

    def test_batch(self):
        found = specs([array(), array(8), array(8, 3)], batch("data"))
        assert list(found.values()) == [P(), P("data"), P("data")]
        assert specs([array(8)], batch(("data", "model"))) == {"[0]": P(("data", "model"))}
        assert "does not divide into the 4 parts" in fault(array(6, 8), batch("data")).reason

    @pytest.mark.parametrize(
        ("shape", "spec"),
        [
            ((), P()),
            ((8,), P("data")),
            ((3,), P()),
            ((8, 16), P(None, "data")),
            ((16, 8), P("data")),
            # The first of equals.
            ((8, 8), P("data")),
            ((3, 8, 8, 4), P(None, "data")),
            # The largest that divides, not the largest.
            ((17, 4, 8), P(None, None, "data")),
            ((0, 4), P(None, "data")),
        ],
    )
    def test_fsdp(self, shape, spec):
        assert fsdp("data", min_size=0)(leaf(*shape)) == spec

    def test_fsdp_over_several_axes(self):
        assert fsdp(("data", "model"), min_size=0)(leaf(12, 16)) == P(None, ("data", "model"))

    def test_fsdp_leaves_small_arrays_whole(self):
        assert fsdp("data")(leaf(64, 64)) == P("data")
        assert fsdp("data")(leaf(64, 63)) == P()
        assert fsdp("data", min_size=65 * 64)(leaf(64, 64)) == P()

    def test_fsdp_says_why(self):
        assert "fewer than 4096 elements" in fsdp("data").why(leaf(8))
        assert "4 divides no dimension" in fsdp("data").why(leaf(97, 97))
        assert "the largest free dimension" in fsdp("data").why(leaf(97, 96))

    @pytest.mark.parametrize("size", [3, 1000])
    def test_a_misspelt_axis_is_found(self, size):
        assert fault(array(size, size), fsdp("dta")).fix == "did you mean 'data'?"

    @pytest.mark.parametrize("axis", [None, (), ("data", None), 3])
    @pytest.mark.parametrize("rule", [fsdp, batch])
    def test_what_is_no_axis(self, rule, axis):
        with pytest.raises(TypeError, match="is not a mesh axis"):
            rule(axis)

    def test_forgotten_parentheses(self):
        makers = [getattr(mylib.rules, name) for name in rooms.names_in(mylib.rules)]
        makers = [make for make in makers if inspect.isfunction(make)]
        assert {replicated, fsdp, batch, like, by_path} < set(makers)
        for make in makers:
            for rule in (make, by_path({"w": P()}) | make):
                with pytest.raises((TypeError, ValueError)) as caught:
                    mylib.resolve(array(8), rule, mesh=MESH)
                (note,) = caught.value.__notes__
                assert "raised by the rule" in note and f"<function {make.__name__} " in note

    @pytest.mark.parametrize(
        "make",
        [
            lambda: by_path([("w", P())]),
            lambda: by_axes("data"),
            lambda: by_axes({"a": "b"}, names={eqx.nn.Linear: "out in"}),
            lambda: where_even("data"),
            lambda: where_even({"w": P("data")}),
        ],
    )
    def test_other_types(self, make):
        with pytest.raises(TypeError, match="take"):
            make()

    def test_symbolic_sizes(self):
        (size,) = jax.export.symbolic_shape("b")
        tree = {"x": jax.ShapeDtypeStruct((size, 64), jnp.float32)}
        assert specs(tree, batch("data")) == {"['x']": P("data")}
        assert specs(tree, where_even(batch("data"))) == {"['x']": P("data")}
        assert specs(tree, fsdp("data")) == {"['x']": P(None, "data")}
        explanation = mylib.explain(tree, batch("data"), MESH)
        assert "symbolic" in str(explanation) and explanation.nbytes == 0

    @pytest.mark.parametrize("rule", [fsdp("data"), batch("data"), replicated()])
    def test_without_a_mesh(self, rule):
        found = fault(array(64, 64), rule, mesh=None)
        assert "a PartitionSpec needs a mesh" in found.reason
        assert found.request == repr(rule)

    def test_without_a_mesh_each_leaf_has_its_own_rule(self):
        def choose(leaf):
            return None if leaf.name == "['d']" else P()

        tree = {name: array(64, 64) for name in "abcd"}
        with pytest.raises(mylib.PlacementError) as caught:
            mylib.resolve(tree, {"a": fsdp("data"), "b": P(), "c": choose, "d": choose})
        requests = [(fault.path, fault.request) for fault in caught.value.faults]
        assert requests == [
            ("['a']", "fsdp('data')"),
            ("['b']", "P()"),
            ("['c']", choose.__qualname__),
        ]

    def test_where_even(self):
        rule = where_even(by_path({"w": P("data", "model"), "b": P(("data", "model"))}))
        tree = {"w": array(6, 8), "b": array(8)}
        assert specs(tree, rule) == {"['w']": P(None, "model"), "['b']": P(("data", "model"))}
        assert "; not sharded, as 4 does not divide 6" in rule.why(leaf(6, 8, path="w"))
        assert "whole" not in rule.why(leaf(8, path="b"))

    def test_where_even_forgives_nothing_else(self):
        assert "no axis 'dta'" in fault(array(6), where_even(batch("dta"))).reason
        found = fault({"w": array(8)}, where_even(by_path({"v": P()})) | replicated())
        assert found.request == "by_path: 'v'"
        assert where_even(lambda leaf: None)(leaf(8)) is None
        assert where_even(lambda leaf: PASS)(leaf(8)) is PASS


class TestLike:
    def trained(self):
        model = models.Transformer(key=jax.random.key(0))
        model = mylib.filter_shard(model, fsdp("data", min_size=256), mesh=MESH)
        return model, eqx.filter(model, eqx.is_array)

    def test_a_state_follows_a_model(self):
        model, params = self.trained()
        optim = optax.adamw(1e-3)
        state = mylib.filter_shard(optim.init(eqx.filter(model, eqx.is_array)), like(model))
        for moments in (state[0].mu, state[0].nu):
            wanted = jax.tree.map(lambda x: x.sharding, params)
            assert jax.tree.map(lambda x: x.sharding, moments) == wanted
        assert state[0].count.sharding == NamedSharding(MESH, P())

    def test_a_restored_tree_follows_a_running_one(self):
        model, params = self.trained()
        restored = jax.tree.map(np.asarray, params)
        again = mylib.filter_shard(restored, like(model))
        assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, again, params))

    def test_an_abstract_tree_is_followed_and_follows(self):
        rule = fsdp("data", min_size=256)
        make = eqx.filter_eval_shape(lambda: models.Transformer(key=jax.random.key(0)))
        abstract = mylib.filter_device_put(make, rule, mesh=ABSTRACT)
        assert specs(make, like(abstract)) == specs(make, rule)

    def test_a_traced_tree_is_followed(self):
        mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
        w = mylib.filter_shard(jnp.ones((8, 2)), P("data"), mesh=mesh)

        @jax.jit
        def double(w):
            return mylib.filter_shard({"w": jnp.zeros((8, 2))}, like({"w": w}))["w"] + w

        with jax.set_mesh(mesh):
            assert double(w).sharding.spec == P("data", None)

    def test_other_shapes_are_not_alike(self):
        w = mylib.filter_shard({"w": jnp.ones((256, 128))}, P("data"), mesh=MESH)
        state = optax.adafactor(1e-3).init(w)
        found = specs(state, like(w) | replicated(), mesh=MESH)
        assert set(found.values()) == {P()}
        assert len(found) > 3

    def test_the_longest_path_counts(self):
        rows, columns = (NamedSharding(MESH, spec) for spec in (P("data"), P(None, "data")))
        struct = jax.ShapeDtypeStruct
        rule = like(
            {
                "w": struct((8, 8), jnp.float32, sharding=rows),
                "a": {"w": struct((8, 8), jnp.float32, sharding=columns)},
            }
        )
        found = mylib.resolve({"b": {"w": array(8, 8)}, "mu": {"a": {"w": array(8, 8)}}}, rule)
        assert found == {"b": {"w": rows}, "mu": {"a": {"w": columns}}}

    def test_an_array_by_itself(self):
        x = mylib.filter_shard(jnp.ones(8), P("data"), mesh=MESH)
        assert mylib.resolve(np.ones(8), like(x)) == x.sharding
        assert (
            "ends like, a path of that tree"
            in fault({"w": np.ones(8)}, like(x) | replicated()).reason
        )

    def test_places_in_a_list_are_no_path(self):
        placed = [mylib.filter_shard(jnp.ones((8, 8)), P("data"), mesh=MESH)]
        assert mylib.resolve([np.ones((8, 8))], like(placed)) == [placed[0].sharding]
        tree = {"batches": [np.ones((8, 8))]}
        assert "no path of the 1 leaves" in fault(tree, like(placed) | replicated()).reason
        # But what a field holds is.
        state = optax.trace(0.9).init(placed)
        assert mylib.resolve(state, like(placed)).trace == [placed[0].sharding]

    def test_scalars_go_where_the_tree_is(self):
        state = {"mu": {"w": np.ones(8)}, "count": np.ones(())}
        w = NamedSharding(MESH, P("data"))
        on_device = SingleDeviceSharding(jax.devices()[3])
        for place, count in (
            (Format(Layout((0,)), w), NamedSharding(MESH, P())),
            (on_device, on_device),
        ):
            tree = {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=place)}
            assert mylib.resolve(state, like(tree))["count"] == count
        two = {
            name: jax.device_put(jnp.ones(8), d)
            for name, d in zip("wv", jax.devices()[:2], strict=True)
        }
        assert like(two)(leaf()) is PASS

    def test_like_nothing(self):
        model, _ = self.trained()
        found = fault({"w": array(7)}, like(model) | replicated())
        assert found.request == "like(a tree of 29 arrays)"
        assert "this one has" in found.fix

    @pytest.mark.parametrize("tree", [{"w": np.ones(8)}, {"w": array(8)}, {}, {"w": "x"}])
    def test_a_tree_without_places(self, tree):
        with pytest.raises(ValueError, match="no array of the tree has a sharding to follow"):
            like(tree)

    def test_it_keeps_no_array_alive(self):
        x = mylib.filter_shard({"w": jnp.ones(8)}, P("data"), mesh=MESH)
        rule = like(x)
        x["w"].delete()
        assert mylib.resolve({"w": np.ones(8)}, rule)["w"].spec == P("data")


def nothing(leaf):
    return PASS


def alone(leaf):
    return None


def by_hand(leaf):
    return P("model") if leaf.ndim == 2 else PASS


def last_dimension(leaf):
    return P(*[None] * (leaf.ndim - 1), "data") if leaf.ndim else PASS


RULES = [
    nothing,
    alone,
    by_hand,
    last_dimension,
    replicated(),
    batch("data"),
    fsdp("data", min_size=16),
    fsdp(("data", "model"), min_size=0),
    by_path({"weight": P(None, "model")}),
    by_path({"a.**": fsdp("model", min_size=0), "b.**": last_dimension}),
    by_axes({"x": "data"}),
    where_even(by_path({"weight": P("data", "model"), "bias": P("data")})),
    where_even(last_dimension),
]
LEAVES = [
    leaf(*shape, path=path)
    for shape in [(), (8,), (6, 8), (8, 16), (2, 3, 8)]
    for path in ["a.weight", "b.weight", "a.bias"]
]


def expressions():
    def grow(rules):
        pairs = st.tuples(rules, rules).filter(
            lambda pair: isinstance(pair[0], Rule) or isinstance(pair[1], Rule)
        )
        return pairs.map(lambda p: p[0] | p[1]) | pairs.map(lambda p: p[0] & p[1])

    return st.recursive(st.sampled_from(RULES), grow, max_leaves=4).filter(
        lambda rule: isinstance(rule, Rule)
    )


def answers(rule):
    return [rule(leaf) for leaf in LEAVES]


def entries(spec):
    return tuple(spec.partitions)


def names_in(spec):
    groups = [entry if isinstance(entry, tuple) else (entry,) for entry in entries(spec)]
    return [name for group in groups for name in group if name is not None]


class TestComposition:
    @given(expressions(), expressions(), expressions())
    def test_both_operators_are_associative(self, a, b, c):
        assert answers((a | b) | c) == answers(a | (b | c))
        assert answers((a & b) & c) == answers(a & (b & c))

    @given(expressions())
    def test_no_opinion_is_the_unit_of_both(self, a):
        for combined in (a | nothing, nothing | a, a & nothing, nothing & a):
            assert answers(combined) == answers(a)

    @given(expressions())
    def test_both_are_idempotent(self, a):
        assert answers(a | a) == answers(a) == answers(a & a)

    @given(expressions(), expressions())
    def test_or_is_the_first_opinion(self, a, b):
        expected = [y if x is PASS else x for x, y in zip(answers(a), answers(b), strict=True)]
        assert answers(a | b) == expected

    @given(expressions(), expressions())
    def test_and_keeps_the_first_and_fills_it(self, a, b):
        for one, other, both in zip(answers(a), answers(b), answers(a & b), strict=True):
            if one is PASS:
                assert both == other
            elif one is None:
                assert both is None
            else:
                padded = [*entries(both), *[None] * 3]
                assert all(
                    padded[dim] == entry
                    for dim, entry in enumerate(entries(one))
                    if entry is not None
                )
                assert len(set(names_in(both))) == len(names_in(both))

    @given(expressions())
    def test_every_answer_has_a_reason_and_a_form(self, a):
        assert all(a.why(leaf) for leaf in LEAVES)
        assert repr(a)

    def test_the_form_is_what_was_written(self):
        a, b, c = replicated(), batch("data"), fsdp("model", min_size=8)
        assert repr(a | b | c) == "replicated() | batch('data') | fsdp('model', min_size=8)"
        assert repr(a & b | c) == "replicated() & batch('data') | fsdp('model', min_size=8)"
        assert repr((a | b) & c) == "(replicated() | batch('data')) & fsdp('model', min_size=8)"
        assert repr(where_even(a)) == "where_even(replicated())"
        assert "by_path({'w': " in repr(by_path({"w": P()}, ordered=True))
        assert repr(by_axes({"a": "b"})) == "by_axes({'a': 'b'})"

    def test_and_does_not_shard_what_is_sharded(self):
        rule = by_path({"w": P("data")}) & fsdp("data", min_size=0)
        assert specs({"w": array(8, 64)}, rule) == {"['w']": P("data")}
        assert (by_path({"weight": P(P.UNCONSTRAINED)}) & fsdp("data", min_size=0))(
            leaf(8, 8)
        ) == P(P.UNCONSTRAINED, "data")

    def test_what_can_not_fill_is_an_error(self):
        tree = {"w": array(8, 8)}
        first = by_path({"w": P("data")})
        for second, told in [
            (lambda leaf: "model", "can't shard what another rule leaves unsharded"),
            (lambda leaf: NamedSharding(MESH, P(None, "model")), "can't shard what another"),
            (lambda leaf: P(None, None, "model"), "has 3 entries, for an array of rank 2"),
            (fsdp("dta"), "no axis 'dta'"),
        ]:
            assert told in fault(tree, first & second).reason
        assert specs(tree, first & nothing) == specs(tree, first & alone) == {"['w']": P("data")}

    def test_unreduced_axes_are_used(self):
        spec = P(None, unreduced={"data"})
        for second in (fsdp("data", min_size=0), batch("data"), last_dimension):
            assert (by_path({"weight": spec}) & second)(leaf(8)) == spec

    def test_and_leaves_other_answers_alone(self):
        device = jax.devices()[2]
        assert (by_path({"w": device}) & fsdp("data"))(leaf(64, 64, path="w")) is device
        assert (by_path({"w": None}) & fsdp("data"))(leaf(64, 64, path="w")) is None

    @pytest.mark.parametrize("other", [P("data"), None, jax.devices()[0], {"w": P()}, "data"])
    def test_with_what_is_no_rule(self, other):
        for combine in (
            lambda: replicated() | other,
            lambda: other | replicated(),
            lambda: replicated() & other,
            lambda: other & replicated(),
            lambda: (replicated() | batch("data")) | other,
        ):
            with pytest.raises(TypeError, match="unsupported operand"):
                combine()

    def test_faults_of_every_part_are_found(self):
        tree = {"w": array(64, 64), "b": array(8)}
        rule = by_path({"w": P(), "x": P()}) & by_axes({"y": "data"}) | by_path({"z": P()})
        with pytest.raises(mylib.PlacementError) as caught:
            mylib.resolve(tree, rule, mesh=ABSTRACT)
        requests = {fault.request for fault in caught.value.faults}
        assert requests >= {"by_path: 'x'", "by_path: 'z'", "by_axes: 'y' over 'data'"}

    @pytest.mark.parametrize(
        "combine",
        [
            lambda rule: (lambda leaf: rule) | replicated(),
            lambda rule: (lambda leaf: rule) & fsdp("data"),
            lambda rule: where_even(lambda leaf: rule),
            lambda rule: by_path({"**": lambda leaf: rule}),
            lambda rule: lambda leaf: rule,
        ],
    )
    def test_faults_of_a_rule_that_a_function_answers_with(self, combine):
        tree = {"w": array(8, 8), "b": array(8)}
        rule = by_path({"w": P("model"), "*": P(), "x": P()})
        with pytest.raises(mylib.PlacementError) as caught:
            mylib.resolve(tree, combine(rule), mesh=MESH)
        requests = sorted(fault.request for fault in caught.value.faults)
        assert len(requests) == 2 and requests[1] == "by_path: 'x'"

    @pytest.mark.parametrize("base", [object, Rule])
    def test_faults_of_a_rule_of_ones_own(self, base):
        class Mine(base):
            def __call__(self, leaf):
                return P()

            def faults(self, leaves):
                assert leaves
                return f"{len(leaves)} leaves are too many"

        tree = {"w": array(8), "b": array(8)}
        for rule in (Mine(), Mine() | replicated(), replicated() & Mine(), by_path({"*": Mine()})):
            assert fault(tree, rule).reason == "2 leaves are too many"
        assert specs(tree, replicated() | Mine())

    def test_a_rule_that_answers_with_itself(self):
        def one(leaf):
            return other

        def other(leaf):
            return one

        assert fault({"w": array(8)}, one).reason == "the rule returns itself"
        assert mylib.explain({"w": array(8)}, one, MESH).faults
        with pytest.raises(ValueError, match="returns itself"):
            mylib.resolve({"w": array(8)}, one | replicated(), mesh=MESH)

    def test_what_is_overruled_is_not_misspelt(self):
        tree = {"w": array(8), "b": array(8)}
        standard = by_path({"w": P("model"), "b": P("data"), "*": P("data")})
        # Nor do patterns contradict each other on a leaf that they don't decide about.
        assert specs(tree, by_path({"w": P("data")}) | standard) == {
            "['w']": P("data"),
            "['b']": P("data"),
        }
        found = fault(tree, by_path({"*": P("data")}) | by_path({"x": P()}) | replicated())
        assert found.request == "by_path: 'x'"


class TestEverywhere:
    """A rule wherever a placement may stand."""

    RULE = by_path({"w": P("model")}) & fsdp("data", min_size=0)

    def tree(self):
        return {"w": jnp.arange(64.0).reshape(8, 8), "b": jnp.arange(8.0)}

    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
    def test_eager_traced_and_abstract_agree(self, kind):
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
        tree = self.tree()
        abstract = mylib.filter_device_put(jax.eval_shape(lambda: tree), self.RULE, mesh=mesh)
        eager = mylib.filter_shard(tree, self.RULE, mesh=mesh)
        with jax.set_mesh(mesh):
            traced = jax.jit(lambda t: mylib.filter_shard(t, self.RULE))(eager)
        for name in tree:
            wanted = abstract[name].sharding
            assert wanted.spec == {"w": P("model", "data"), "b": P("data")}[name]
            for y in (eager[name], traced[name]):
                assert y.sharding.is_equivalent_to(wanted, y.ndim)
                assert jnp.array_equal(y, tree[name])

    def test_inside_a_prefix(self):
        tree = (self.tree(), {"w": jnp.ones((8, 8)), "b": jnp.ones(6)})
        found = specs(tree, (self.RULE, {"w": batch("data"), "b": replicated()}))
        assert list(found.values()) == [P("data"), P("model", "data"), P(), P("data")]

    def test_it_is_no_pytree(self):
        for rule in (*RULES, like({"w": jax.device_put(jnp.ones(1), jax.devices()[0])})):
            assert jtu.all_leaves([rule])

    def test_asking_touches_no_device(self):
        model = eqx.filter_eval_shape(lambda: models.Transformer(key=jax.random.key(0)))
        live = len(jax.live_arrays())
        with jax.transfer_guard("disallow"):
            for rule in itertools.islice(RULES, 4, None):
                mylib.explain(model, rule | replicated(), ABSTRACT)
        assert len(jax.live_arrays()) == live

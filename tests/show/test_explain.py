"""`explain`: the table, the totals, the reasons, and what a program reads of them."""

import functools
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

import mylib
from mylib.rules import by_axes, by_path, fsdp, like, replicated, where_even

MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
ABSTRACT = AbstractMesh((4, 2), ("data", "model"))
KEY = jax.random.key(0)


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def rows(explanation):
    return {row.leaf.name: row for row in explanation.rows}


class TestRows:
    def test_what_a_row_says(self):
        tree = {"w": array(64, 32, dtype=jnp.bfloat16), "b": array(6), "name": "x"}
        rule = by_path({"w": P("model")}) & fsdp("data", min_size=64) | replicated()
        found = rows(mylib.explain(tree, rule, ABSTRACT))
        assert list(found) == ["['b']", "['w']"]
        w, b = found["['w']"], found["['b']"]
        assert w.leaf.shape == (64, 32) and w.leaf.dtype == jnp.bfloat16
        assert w.target == NamedSharding(ABSTRACT, P("model", "data")) == w.place
        assert (w.spec, w.devices, w.bytes_per_device, w.wasted) == (
            "P('model', 'data')",
            8,
            512,
            0,
        )
        assert w.why == "pattern 'w', then fsdp('data', min_size=64): the largest free dimension"
        assert (b.spec, b.bytes_per_device, b.wasted) == ("P()", 24, 7 * 24)
        assert "fewer than 64 elements" in b.why

    @pytest.mark.parametrize(
        ("rule", "why"),
        [
            (P(), "given as such"),
            (replicated(), "replicated()"),
            (by_path({"w": P()}), "pattern 'w'"),
            (
                by_path({"w": fsdp("data")}),
                "pattern 'w': fsdp('data'): replicated, fewer than 4096 elements",
            ),
            (by_path({"v": P()}) | replicated(), "replicated()"),
            (by_axes({}) | replicated(), "replicated()"),
            (
                where_even(by_path({"w": P("data")})),
                "pattern 'w'; not sharded, as 4 does not divide 6",
            ),
            (lambda leaf: P(), "TestRows.<lambda>"),
            (lambda leaf: replicated(), "replicated()"),
        ],
    )
    def test_why(self, rule, why):
        (row,) = mylib.explain({"w": array(6)}, rule, ABSTRACT).rows
        assert row.why == why and row.spec == "P()"

    def test_a_rule_of_ones_own_may_tell_why(self):
        class ByRank:
            def __call__(self, leaf):
                return P("data") if leaf.ndim == 2 else P()

            def why(self, leaf):
                return f"rank {leaf.ndim}"

        (row,) = mylib.explain([array(8, 8)], ByRank() | replicated(), ABSTRACT).rows
        assert row.why == "rank 2"

    def test_places_of_every_kind(self):
        tree = {"a": array(8), "b": jnp.zeros(8), "c": array(8), "d": array(8, 8), "e": np.zeros(8)}
        host = NamedSharding(MESH, P("data"), memory_kind="pinned_host")
        device = jax.devices()[3]
        format = Format(Layout((1, 0)), NamedSharding(MESH, P("model")))
        explanation = mylib.explain(
            tree, {"a": device, "b": None, "c": host, "d": format, "e": None}
        )
        found = rows(explanation)
        assert found["['a']"].spec == "cpu 3"
        assert (found["['b']"].spec, found["['b']"].why, found["['b']"].devices) == (
            "left alone",
            "",
            1,
        )
        assert found["['c']"].spec == "P('data') in pinned_host" and found["['c']"].offloaded
        assert found["['d']"].spec == "P('model'), with a layout"
        assert (found["['e']"].spec, found["['e']"].devices) == ("left alone", 0)
        # What is left alone counts where it is, and other memory not at all.
        of_d = {d: 128 for d in jax.devices()}
        assert explanation.bytes_by_device == {**of_d, device: 160, jax.devices()[0]: 160}
        assert "32 B of the arrays in other memory than the devices'" in str(explanation)
        assert "160 B on the most loaded one" in str(explanation)

    def test_it_asks_what_would_be_not_what_can_be_done_here(self):
        # Concrete arrays and an abstract mesh can't be placed, but they can be explained.
        concrete = mylib.explain([jnp.zeros((8, 8))], P("data"), ABSTRACT)
        assert not concrete.faults and concrete.rows[0].bytes_per_device == 64

        @jax.jit
        def inside(x):
            (row,) = mylib.explain([x], fsdp("data", min_size=0), MESH).rows
            assert row.spec == "P('data')"
            return x

        inside(jnp.zeros((8, 8)))


class TestTotals:
    def test_of_several_meshes(self):
        pair = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
        tree = {"a": array(8), "b": array(16)}
        placement = {"a": NamedSharding(pair, P("data")), "b": NamedSharding(MESH, P("data"))}
        explanation = mylib.explain(tree, placement)
        assert explanation.nbytes == 96
        assert list(explanation.bytes_by_device.values()) == [32] * 2 + [16] * 6
        assert explanation.most_loaded == (jax.devices()[0], 32)

    def test_of_nothing(self):
        explanation = mylib.explain({"name": "x"}, P("data"), ABSTRACT)
        assert (explanation.nbytes, explanation.most_loaded) == (0, None)
        assert explanation.bytes_by_device == {} and "0 arrays, 0 B" in str(explanation)

    def test_an_abstract_mesh_has_numbers(self):
        explanation = mylib.explain([array(8, 8)], P("data"), ABSTRACT)
        assert explanation.bytes_by_device == dict.fromkeys(range(8), 64)
        assert "64 B on each of 8 devices" in str(explanation)

    def test_large_leaves_that_are_copied(self):
        tree = {"large": array(512, 512), "odd": array(512, 511), "split": array(512, 512)}
        rule = by_path({"split": P("data")}) | replicated()
        explanation = mylib.explain(tree, rule, ABSTRACT)
        (row,) = explanation.replicated
        assert row.leaf.name == "['large']" and row.wasted == 7 * 2**20
        told = "large and replicated: ['large']; 7 MiB more than one copy of each"
        assert told in str(explanation)
        # A copy of each part on every pair of devices is a waste, too, but no whole copy.
        assert rows(explanation)["['split']"].wasted == 2**20

    def test_nothing_is_wasted_on_one_device(self):
        explanation = mylib.explain([array(1024, 1024)], P(), AbstractMesh((1,), ("data",)))
        assert explanation.replicated == ()

    def test_a_traced_value_is_where_its_mesh_is(self):
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        w = mylib.filter_shard(jnp.ones((64, 64)), P("data"), mesh=mesh)
        rule = like({"w": w}) | replicated()
        seen = []

        @jax.jit
        def inside(tree):
            seen.append(mylib.explain(tree, rule))
            return tree

        with jax.set_mesh(mesh):
            inside({"w": w, "b": w})
        assert seen[0].bytes_by_device == dict.fromkeys(jax.devices(), 20 * 1024)

    @pytest.mark.parametrize("partly", [False, True])
    def test_inside_shard_map(self, partly):
        axes = {"axis_names": {"data"}} if partly else {}

        @jax.jit
        @functools.partial(
            jax.shard_map, mesh=MESH, in_specs=P("data"), out_specs=P("data"), **axes
        )
        def inside(x):
            assert "array" in str(mylib.explain({"x": x}, replicated()))
            return x

        inside(jnp.ones((8, 8)))

    def test_what_is_left_where_it_does_not_fit(self):
        uneven = jax.ShapeDtypeStruct((6,), jnp.float32, sharding=NamedSharding(MESH, P("data")))
        (row,) = mylib.explain(uneven, None).rows
        assert row.bytes_per_device == 8


class TestTable:
    def test_layers_that_differ_do_not(self):
        tree = [array(8), array(8), array(7), array(8)]
        rule = where_even(by_path({"3": P("model"), "*": P("data")}, ordered=True))
        lines = str(mylib.explain(tree, rule, ABSTRACT)).splitlines()[1:4]
        assert [line.split("  ")[0] for line in lines] == ["[*]", "[2]", "[3]"]

    def test_an_index_in_which_none_differ_stays(self):
        tree = ({"a": [array(8), array(8)]}, {"a": array(8)})
        lines = str(mylib.explain(tree, P(), ABSTRACT)).splitlines()[1:3]
        assert [line.split("  ")[0] for line in lines] == ["[0]['a'][*]", "[1]['a']"]

    def test_a_reason_of_several_lines_is_one_line(self):
        class Wordy:
            def __call__(self, leaf):
                return P()

            def why(self, leaf):
                return "this\n  and that"

        (row,) = mylib.explain(array(8), Wordy(), ABSTRACT).rows
        assert row.why == "this and that"

    def test_a_reason_that_raises_costs_no_row(self):
        class Careless:
            def __call__(self, leaf):
                return P("data")

            def why(self, leaf):
                return {"a": "the first"}[leaf.parts[0]]

        shown = mylib.explain({"a": array(8), "b": array(8)}, Careless() | replicated(), ABSTRACT)
        assert [(row.spec, row.why) for row in shown.rows] == [
            ("P('data')", "the first"),
            ("P('data')", "why() raises KeyError: 'b'"),
        ]
        assert not shown.faults

    def test_alternating_layers_are_told_apart(self):
        tree = {"layers": [array(8), array(4), array(8), array(4)]}
        lines = str(mylib.explain(tree, P(), ABSTRACT)).splitlines()[1:3]
        assert lines[0].startswith("['layers'][0] ... ['layers'][2]")
        assert lines[1].startswith("['layers'][1] ... ['layers'][3]")

    def test_integer_keys_are_indices(self):
        tree = {3: array(8), 4: array(8)}
        assert str(mylib.explain(tree, P(), ABSTRACT)).splitlines()[1].startswith("[*]")

    def test_a_single_array(self):
        assert str(mylib.explain(array(8), P(), ABSTRACT)).splitlines()[1].startswith("the array")

    @pytest.mark.parametrize(
        ("count", "text"),
        [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (2**40 * 5, "5.00 TiB")],
    )
    def test_bytes(self, count, text):
        explanation = mylib.explain(array(count, dtype=jnp.int8), P(), ABSTRACT)
        assert explanation.nbytes == count
        assert f"1 array, {text}; {text} on each of 8 devices" in str(explanation)


class TestFaults:
    def test_all_are_told_and_none_is_raised(self):
        tree = {"w": array(7, 8), "v": array(8), "u": array(8)}
        rule = by_path({"w": P("data"), "v": P("modle"), "x": P()})
        explanation = mylib.explain(tree, rule, ABSTRACT)
        with pytest.raises(mylib.PlacementError) as caught:
            mylib.resolve(tree, rule, mesh=ABSTRACT)
        assert explanation.faults == caught.value.faults and len(explanation.faults) == 4
        assert str(caught.value) in str(explanation)
        found = rows(explanation)
        assert all(row.faulty and row.spec == "can't be placed" for row in found.values())
        assert all(row.bytes_per_device == row.devices == 0 for row in found.values())

    def test_without_a_mesh(self):
        (fault,) = mylib.explain(array(8), P("data")).faults
        assert "a PartitionSpec needs a mesh" in fault.reason

    def test_a_prefix_that_does_not_fit(self):
        tree = {"a": [array(8), array(8)], "b": array(8)}
        explanation = mylib.explain(tree, {"a": [P()], "b": P()}, ABSTRACT)
        assert len(explanation.faults) == 1
        assert [row.faulty for row in explanation.rows] == [True, True, False]

    def test_of_an_array_by_itself(self):
        rule = by_path({"**": P("data"), "**.**": P()})
        (row,) = mylib.explain(array(8), rule, ABSTRACT).rows
        assert row.faulty

    def test_what_is_no_mesh_is_an_error(self):
        with pytest.raises(mylib.PlacementError, match="is not a mesh"):
            mylib.explain(array(8), P(), "data")


def llama_70b():
    """The shapes of a model of 70 billion parameters, with grouped queries and a gated MLP."""
    width, hidden, vocab, depth, kv = 8192, 28672, 32000, 80, 1024

    def linear(out, into):
        return {"weight": array(out, into, dtype=jnp.bfloat16)}

    def layer():
        return {
            "attention_norm": {"weight": array(width, dtype=jnp.bfloat16)},
            "q": linear(width, width),
            "k": linear(kv, width),
            "v": linear(kv, width),
            "o": linear(width, width),
            "mlp_norm": {"weight": array(width, dtype=jnp.bfloat16)},
            "gate": linear(hidden, width),
            "up": linear(hidden, width),
            "down": linear(width, hidden),
        }

    return {
        "embed": linear(vocab, width),
        "layers": [layer() for _ in range(depth)],
        "norm": {"weight": array(width, dtype=jnp.bfloat16)},
        "unembed": linear(vocab, width),
    }


class TestLarge:
    def test_70_billion_parameters_on_1024_devices(self):
        model = llama_70b()
        mesh = AbstractMesh((128, 8), ("data", "model"))
        columns = {f"{name}.weight": P("model") for name in ("q", "k", "v", "gate", "up", "embed")}
        rows = {f"{name}.weight": P(None, "model") for name in ("o", "down", "unembed")}
        rule = by_path({**columns, **rows}) & fsdp("data") | replicated()
        start = time.thread_time()
        explanation = mylib.explain(model, rule, mesh)
        table = str(explanation)
        assert time.thread_time() - start < 10
        assert 68e9 < explanation.nbytes / 2 < 70e9
        assert not explanation.faults and not explanation.replicated
        assert len(explanation.bytes_by_device) == 1024
        # Every device has a 1024th of the matrices, and of the norms a 128th.
        norms = 161 * 8192 * 2
        share = (explanation.nbytes - norms) // 1024 + norms // 128
        assert set(explanation.bytes_by_device.values()) == {share}
        assert len(table.splitlines()) < 20

    @pytest.mark.parametrize(
        "rule",
        [
            replicated(),
            fsdp("data", min_size=0),
            by_axes({"heads": "model", "out": "data"}) | fsdp("data"),
        ],
        ids=["replicated", "fsdp", "both"],
    )
    def test_bytes_are_those_of_the_compiled_program(self, rule):
        """A small model: what `explain` says of a device is what the compiler says."""
        model = eqx.filter_eval_shape(lambda: models.Transformer(key=KEY))
        explanation = mylib.explain(model, rule, MESH)
        arrays = eqx.filter(mylib.filter_device_put(model, rule, mesh=MESH), _is_abstract)
        memory = jax.jit(lambda m: m).lower(arrays).compile().memory_analysis()
        (per_device,) = set(explanation.bytes_by_device.values())
        assert per_device == memory.argument_size_in_bytes

    def test_a_state_like_its_model(self):
        model = mylib.filter_device_put({"w": array(64, 64)}, P("data"), mesh=ABSTRACT)
        (row,) = mylib.explain({"mu": {"w": array(64, 64)}}, like(model)).rows
        assert (row.spec, row.why) == ("P('data')", "like w")


def _is_abstract(x):
    return isinstance(x, jax.ShapeDtypeStruct)

"""What is said when a placement can't be had, word by word; and that nothing has happened then."""

import copy
import pickle
import textwrap

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compilations import compilations
from jax.experimental.layout import Format, Layout
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec as P,
    SingleDeviceSharding,
)

import mylib
from mylib import PlacementError
from mylib.rules import PASS

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
AXES = ("data", "model")
MESH = jax.make_mesh((4, 2), AXES, axis_types=(AUTO, AUTO))
TYPED = jax.make_mesh((4, 2), AXES, axis_types=(EXPLICIT, EXPLICIT))
MIXED = jax.make_mesh((4, 2), AXES, axis_types=(AUTO, EXPLICIT))
HALF = jax.make_mesh((2, 2), AXES, axis_types=(AUTO, AUTO), devices=jax.devices()[:4])
BACKWARDS = Mesh(MESH.devices[::-1], AXES, axis_types=(AUTO, AUTO))
PAPER = AbstractMesh((4, 2), AXES, axis_types=(AUTO, AUTO))
HERE = "mesh ('data': 4, 'model': 2)"
WHOLE = NamedSharding(MESH, P())


def ones(*shape):
    return jnp.ones(shape)


def error_of(call, *args, **kwargs):
    with pytest.raises(PlacementError) as caught:
        call(*args, **kwargs)
    return caught.value


def assert_says(error, text):
    assert str(error) == textwrap.dedent(text).strip()


def says(text, placement, *, tree=None, mesh=MESH, verb=mylib.filter_shard):
    assert_says(error_of(verb, ones(8, 4) if tree is None else tree, placement, mesh=mesh), text)


class TestWords:
    def test_an_unknown_axis_that_resembles_one(self):
        says(
            f"""
            can't place 1 leaf:
              the array (8, 4)
                asked for: P('dta') over {HERE}
                but {HERE} has no axis 'dta'
                instead: did you mean 'data'?
            """,
            P("dta"),
        )

    def test_an_unknown_axis_that_resembles_none(self):
        says(
            f"""
            can't place 1 leaf:
              the array (8, 4)
                asked for: {P(None, "zzz")} over {HERE}
                but {HERE} has no axis 'zzz'
                instead: use one of ('data', 'model')
            """,
            P(None, "zzz"),
        )

    def test_an_unknown_axis_among_others(self):
        error = error_of(mylib.resolve, ones(8, 4), P(("data", "modle")), mesh=MESH)
        assert [fault.fix for fault in error.faults] == ["did you mean 'model'?"]

    def test_two_unknown_axes_of_one_leaf(self):
        says(
            f"""
            can't place 1 leaf:
              the array (8, 4)
                asked for: {P("dta", "modle")} over {HERE}
                but {HERE} has no axis 'dta'
                instead: did you mean 'data'?
              the array (8, 4)
                asked for: {P("dta", "modle")} over {HERE}
                but {HERE} has no axis 'modle'
                instead: did you mean 'model'?
            """,
            P("dta", "modle"),
        )

    @pytest.mark.parametrize(
        ("spec", "text"),
        [
            (P("data", "data"), "P('data', 'data')"),
            (P(("data", "data")), "P(('data', 'data'))"),
            (P(None, ("data",) * 2), "P(None, ('data', 'data'))"),
        ],
    )
    def test_an_axis_used_twice(self, spec, text):
        says(
            f"""
            can't place 1 leaf:
              the array (8, 4)
                asked for: {text} over {HERE}
                but the axis 'data' is used 2 times
                instead: use each axis once
            """,
            spec,
        )

    def test_a_spec_longer_than_the_rank(self):
        says(
            f"""
            can't place 1 leaf:
              the array (8,)
                asked for: {P("data", None)} over {HERE}
                but the spec has 2 entries, for an array of rank 1
                instead: give at most 1; for a whole model, pass a rule (mylib.rules)
            """,
            P("data", None),
            tree=ones(8),
        )

    def test_a_sharding_longer_than_the_rank(self):
        error = error_of(mylib.resolve, np.float32(1), NamedSharding(MESH, P("data")))
        assert error.faults[0].reason == "the spec has 1 entry, for an array of rank 0"

    def test_a_dimension_that_does_not_divide(self):
        says(
            f"""
            can't place 1 leaf:
              the array (8, 17)
                asked for: {P(None, ("data", "model"))} over {HERE}
                but dimension 1 of size 17 does not divide into the 8 parts of ('data', 'model')
                instead: pad it to 24, shard another dimension, or write None for this one
            """,
            P(None, ("data", "model")),
            tree=ones(8, 17),
        )

    def test_two_dimensions_that_do_not_divide(self):
        error = error_of(mylib.resolve, ones(3, 5), P("data", "model"), mesh=MESH)
        assert [fault.reason for fault in error.faults] == [
            "dimension 0 of size 3 does not divide into the 4 parts of 'data'",
            "dimension 1 of size 5 does not divide into the 2 parts of 'model'",
        ]

    def test_no_mesh(self):
        says(
            """
            can't place 1 leaf:
              the array (8, 4)
                asked for: P('data')
                but a PartitionSpec needs a mesh, and there is none here
                instead: pass `mesh=`, or call this under `jax.set_mesh(mesh)`
            """,
            P("data"),
            mesh=None,
        )

    def test_a_device_outside_of_the_mesh(self):
        says(
            f"""
            can't place 1 leaf:
              the array (8, 4)
                asked for: {jax.devices()[7]!r}
                but that device is not in mesh ('data': 2, 'model': 2)
                instead: leave out `mesh=`
            """,
            jax.devices()[7],
            mesh=HALF,
        )

    def test_a_mesh_without_devices(self):
        says(
            f"""
            can't place 1 leaf:
              the array (8, 4)
                asked for: P('data') over {HERE}
                but an abstract mesh has no devices to put an array on
                instead: pass a `jax.sharding.Mesh`, or give abstract leaves (`jax.ShapeDtypeStruct`)
            """,  # noqa: E501
            P("data"),
            mesh=PAPER,
        )

    def test_a_mesh_without_devices_is_enough_for_arrays_on_paper(self):
        tree = [jax.ShapeDtypeStruct((8,), jnp.float32), ones(8)]
        for pair in (tree, tree[::-1]):
            error = error_of(mylib.filter_shard, pair, P("data"), mesh=PAPER)
            (fault,) = error.faults
            assert fault.path == ("[1]" if pair is tree else "[0]")

    def test_free_dimensions_that_nobody_chooses_for(self):
        says(
            f"""
            can't place 1 leaf:
              the array (8, 4)
                asked for: {P(P.UNCONSTRAINED, "model")} over {HERE}
                but {HERE} has no Auto axis, so the compiler chooses for no dimension
                instead: write the axes, or None, in place of UNCONSTRAINED
            """,
            P(P.UNCONSTRAINED, "model"),
            mesh=TYPED,
        )

    def test_a_format_without_a_sharding(self):
        says(
            f"""
            can't place 1 leaf:
              the array (8, 4)
                asked for: {Format()!r}
                but the format has no sharding
                instead: write Format(layout, sharding)
            """,
            Format(),
        )

    @pytest.mark.parametrize(
        ("order", "shape"), [((0,), (8, 4)), ((1, 0), (8,)), ((0, 0), (8, 4)), ((1, 2), (8, 4))]
    )
    def test_a_layout_of_other_dimensions(self, order, shape):
        format = Format(Layout(order), NamedSharding(MESH, P("data")))
        says(
            f"""
            can't place 1 leaf:
              the array {shape}
                asked for: {format!r}
                but the layout orders the dimensions {order} and the array has {tuple(range(len(shape)))}
                instead: name each dimension once, from the major to the minor one
            """,  # noqa: E501
            format,
            tree=ones(*shape),
        )

    @pytest.mark.parametrize("x", [ones(8, 4), jax.ShapeDtypeStruct((8, 4), jnp.float32)], ids=type)
    def test_a_layout_that_nobody_chooses(self, x):
        format = Format(Layout.AUTO, NamedSharding(MESH, P("data")))
        says(
            f"""
            can't place 1 leaf:
              the array (8, 4)
                asked for: {format!r}
                but the layout is AUTO, and the compiler has nothing here to choose by
                instead: write a Layout, or give the sharding alone
            """,
            format,
            tree=x,
        )

    def test_a_layout_of_keys(self):
        format = Format(Layout((0,)), NamedSharding(MESH, P("data")))
        tree = [ones(8), jax.random.split(jax.random.key(0), 8)]
        says(
            f"""
            can't place 1 leaf:
              [1] (8,)
                asked for: {format!r}
                but the layout of typed keys can't be chosen
                instead: give the sharding alone
            """,
            format,
            tree=tree,
        )

    def test_the_name_of_an_axis(self):
        says(
            """
            can't place 1 leaf:
              the array (8, 4)
                asked for: 'data'
                but an axis name is not a placement
                instead: write P('data')
            """,
            "data",
        )

    def test_a_class(self):
        says(
            f"""
            can't place 1 leaf:
              the array (8, 4)
                asked for: {P!r}
                but the class {P.__name__} is not a placement
                instead: make one: {P.__name__}(...)
            """,
            P,
        )

    @pytest.mark.parametrize("mesh", [MESH, TYPED, PAPER], ids=["auto", "explicit", "abstract"])
    def test_a_mesh(self, mesh):
        says(
            f"""
            can't place 1 leaf:
              the array (8, 4)
                asked for: {mesh!r}
                but a mesh is not a placement
                instead: pass it as `mesh=`, with a PartitionSpec
            """,
            mesh,
        )

    @pytest.mark.parametrize("placement", [3, True, object(), np.float32(1), Ellipsis])
    def test_anything_else(self, placement):
        says(
            f"""
            can't place 1 leaf:
              the array (8, 4)
                asked for: {placement!r}
                but an object of type {type(placement).__name__} is not a placement
                instead: give a device, a Sharding, a Format, a PartitionSpec, None or a rule
            """,
            placement,
        )

    @pytest.mark.parametrize("placement", [PASS, lambda leaf: PASS], ids=["itself", "of a rule"])
    def test_no_opinion(self, placement):
        says(
            """
            can't place 1 leaf:
              the array (8, 4)
                asked for: PASS
                but the rule returns PASS for this leaf, and no other rule follows it
                instead: end the rule with `| replicated()`, or return None to leave the leaf alone
            """,
            placement,
        )

    def test_a_rule_that_returns_a_tree(self):
        error = error_of(mylib.resolve, ones(8), lambda leaf: [P("data")], mesh=MESH)
        assert error.faults[0].reason == "an object of type list is not a placement"

    def test_a_rule_with_complaints(self):
        class Demanding:
            def __call__(self, leaf):
                return P()

            def __repr__(self):
                return "Demanding()"

            def faults(self, leaves):
                return ["no leaf is called weight"]

        says(
            """
            can't place the tree:
                asked for: Demanding()
                but no leaf is called weight
                instead: fix the rule, or drop that part of it
            """,
            Demanding(),
        )

    def test_a_memory_kind_is_part_of_the_request(self):
        host = NamedSharding(MESH, P("data"), memory_kind="pinned_host")
        error = error_of(mylib.resolve, ones(3), host)
        assert error.faults[0].request == f"P('data') over {HERE} in pinned_host memory"

    def test_an_array_that_is_gone(self):
        alive, gone, key = ones(8), ones(8), jax.random.key(0)
        gone.delete()
        error = error_of(mylib.filter_shard, [ones(8), gone, key], WHOLE)
        assert_says(
            error,
            f"""
            can't place 1 leaf:
              [1] (8,)
                asked for: {WHOLE}
                but the array has been deleted
                instead: if it was donated to a function, use that function's result instead
            """,
        )
        error = error_of(mylib.filter_device_put, [alive, gone], WHOLE, donate=True)
        assert [fault.path for fault in error.faults] == ["[1]"] and not alive.is_deleted()
        assert mylib.filter_shard([gone], None)[0] is gone

    def test_a_layout_under_vmap(self):
        format = Format(Layout((0,)), WHOLE)
        error = error_of(jax.vmap(lambda x: mylib.filter_shard(x, format)), ones(8, 4))
        assert_says(
            error,
            f"""
            can't place 1 leaf:
              an array under vmap (8, 4)
                asked for: {format!r}
                but a layout does not include the dimension that vmap adds
                instead: give the layout outside of vmap, or a sharding alone
            """,
        )

    def test_options_of_the_wrong_kind(self):
        x = {"a": jnp.arange(8.0), "b": jnp.arange(8.0)}
        with pytest.raises(mylib.PlacementError) as caught:
            mylib.filter_device_put(x, P("data"), mesh=MESH, donate={"a": 1, "b": False}, src="dev")
        assert_says(
            caught.value,
            """
            can't place 2 leaves; the first: ['a'] (8,): these are flags
              ['a'] (8,)
                asked for: donate=1, may_alias=None
                but these are flags
                instead: write True or False, or a prefix of them
              ['a'] (8,)
              ['b'] (8,)
                asked for: src='dev'
                but src is the device or sharding of the source
                instead: give a device or a Sharding
            """,
        )

    def test_donating_what_is_shared(self):
        tree = {"a": ones(8), "b": np.ones(8), "c": 3}
        error = error_of(
            mylib.filter_device_put,
            tree,
            P("data"),
            mesh=MESH,
            donate={"a": True, "b": True, "c": True},
            may_alias=True,
        )
        assert_says(
            error,
            """
            can't place 2 leaves: a donated array can't share its memory: it is deleted
                asked for: donate=True, may_alias=True
                instead: give one of the two
              ['a'] (8,)
              ['b'] (8,)
            """,
        )


class TestPrefixes:
    fix = "give one placement for the whole subtree, or a prefix of the tree's own structure"

    def says(self, text, tree, prefix):
        assert_says(error_of(mylib.resolve, tree, prefix, mesh=MESH), text)

    def test_several_places_where_it_does_not_fit(self):
        self.says(
            f"""
            can't place 3 leaves; the first: ['a']: the tree has a list of 2
              ['a']
                asked for: a prefix that has a list of 1 here
                but the tree has a list of 2
                instead: {self.fix}
              ['b'][1]
                asked for: a prefix that has a tuple of 2 here
                but the tree has an array of shape (8,)
                instead: {self.fix}
              ['c']
                asked for: a prefix that has a dict with keys ['x'] here
                but the tree has a dict with keys ['x', 'y']
                instead: {self.fix}
            """,
            {"a": [ones(8)] * 2, "b": (ones(8), ones(8)), "c": {"x": ones(8), "y": ones(8)}},
            {"a": [P()], "b": (P(), (P(), P())), "c": {"x": P()}},
        )

    def test_at_the_top(self):
        self.says(
            f"""
            can't place 1 leaf:
              the tree
                asked for: a prefix that has a tuple of 2 here
                but the tree has a list of 2
                instead: {self.fix}
            """,
            [ones(8), ones(8)],
            (P(), P()),
        )

    def test_a_module_of_placements_as_a_rule(self):
        class Rule(eqx.Module):
            spec: P

            def __call__(self, leaf):
                return self.spec

        error = error_of(mylib.resolve, [ones(8)], Rule(P("data")), mesh=MESH)
        assert "keeps its placements and arrays in static fields" in error.faults[0].fix

    def test_where_the_tree_has_none(self):
        error = error_of(mylib.resolve, [ones(8), None], [P(), [P()]], mesh=MESH)
        (fault,) = error.faults
        assert fault.path == "[1]"
        assert fault.request == "a prefix that has a list of 1 here"
        assert fault.reason == "the tree has None"

    def test_modules(self):
        model = eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(0))
        prefix = eqx.tree_at(lambda m: m.layers[1], model, eqx.nn.LayerNorm(2))
        error = error_of(mylib.resolve, model, jax.tree.map(lambda x: None, prefix), mesh=MESH)
        (fault,) = error.faults
        assert fault.path == ".layers[1]"
        assert fault.request == "a prefix that has a leaf or node of type LayerNorm here"
        assert fault.reason == "the tree has a leaf or node of type Linear"

    def test_modules_that_differ_in_what_is_static(self):
        layer = eqx.nn.Linear(2, 3, key=jax.random.key(0))
        other = eqx.nn.Linear(3, 2, key=jax.random.key(0))
        prefix = jax.tree.map(lambda x: P(), other)
        self.says(
            f"""
            can't place 1 leaf:
              [0]
                asked for: a prefix that has a leaf or node of type Linear here
                but its in_features is 3, and the tree's is 2
                instead: {self.fix}
            """,
            [layer],
            [prefix],
        )

    def test_states_of_optimisers(self):
        params = {"w": ones(8)}
        sgd, adam = (make(1e-3).init(params) for make in (optax.sgd, optax.adam))
        prefix = jax.tree.map(lambda x: P(), adam)
        error = error_of(mylib.resolve, {"opt": sgd}, {"opt": prefix}, mesh=MESH)
        (fault,) = error.faults
        assert fault.path == "['opt'][0]"
        assert "ScaleByAdamState" in fault.request and "EmptyState" in fault.reason

    def test_they_come_with_all_other_faults(self):
        tree = {"a": [ones(8)] * 2, "b": ones(8), "c": ones(3)}
        placement = {"a": [P()], "b": P("dta"), "c": P("data")}
        error = error_of(mylib.resolve, tree, placement, mesh=MESH)
        assert [fault.path for fault in error.faults] == ["['a']", "['b']", "['c']"]

    @pytest.mark.parametrize("flag", ["donate", "may_alias", "src"])
    def test_of_the_other_arguments(self, flag):
        x = ones(8)
        prefix = {flag: [None, None, None]}
        error = error_of(mylib.filter_device_put, [x, x], P("data"), mesh=MESH, **prefix)
        assert error.faults[0].request == "a prefix that has a list of 3 here"


def staged_says(text, f, *args):
    for stage in (jax.jit, lambda f: lambda *args: jax.eval_shape(f, *args), jax.make_jaxpr):
        assert_says(error_of(stage(f), *args), text)


class TestStagedWords:
    """Requests that would be right elsewhere."""

    def test_an_axis_that_shard_map_has_taken(self):
        def f(x):
            return mylib.filter_shard(x, P(None, "data"), mesh=MESH)

        specs = dict(mesh=MESH, in_specs=P("data"), out_specs=P("data"))
        text = f"""
            can't place 1 leaf:
              the array (2, 4)
                asked for: {P(None, "data")} over {HERE}
                but inside shard_map the axis 'data' is Manual: arrays are already split over it
                instead: leave it out of the spec; shard over it by `in_specs` and `out_specs`
            """
        staged_says(text, jax.shard_map(f, **specs), ones(8, 4))
        staged_says(text, jax.shard_map(f, **specs, axis_names={"data"}), ones(8, 4))
        assert_says(error_of(jax.shard_map(f, **specs), ones(8, 4)), text)

    def test_a_device_inside_shard_map(self):
        def f(x):
            return mylib.filter_shard(x, jax.devices()[0])

        mapped = jax.shard_map(f, mesh=MESH, in_specs=P("data"), out_specs=P("data"))
        staged_says(
            f"""
            can't place 1 leaf:
              the array (2, 4)
                asked for: {jax.devices()[0]!r}
                but a placement without mesh axes can't be used inside a program over 8 devices
                instead: move the array before or after the transformed function, or name mesh axes
            """,
            mapped,
            ones(8, 4),
        )

    @pytest.mark.parametrize(
        "placement", [jax.devices()[0], SingleDeviceSharding(jax.devices()[0])]
    )
    def test_a_device_in_a_program_on_eight(self, placement):
        text = f"""
            can't place 1 leaf:
              the array (8, 4)
                asked for: {placement!r}
                but a placement without mesh axes can't be used inside a program over 8 devices
                instead: move the array before or after the transformed function, or name mesh axes
            """

        def f(x):
            return mylib.filter_shard(x, placement)

        with jax.set_mesh(MESH):
            staged_says(text, f, ones(8, 4))
        staged_says(text, f, mylib.filter_shard(ones(8, 4), P("data"), mesh=TYPED))

    def test_a_memory_kind(self):
        staged_says(
            f"""
            can't place 1 leaf:
              the array (8, 4)
                asked for: P('data') over {HERE} in pinned_host memory
                but filter_shard can't move an array to pinned_host memory inside a transformed function
                instead: use mylib.filter_device_put there
            """,  # noqa: E501
            lambda x: mylib.filter_shard(
                x, NamedSharding(MESH, P("data"), memory_kind="pinned_host")
            ),
            ones(8, 4),
        )

    def test_a_memory_kind_that_no_program_writes_to(self):
        staged_says(
            f"""
            can't place 1 leaf:
              the array (8, 4)
                asked for: P('data') over {HERE} in unpinned_host memory
                but a compiled program can't put a value in unpinned_host memory: JAX ignores it there
                instead: write memory_kind='pinned_host', or move the array outside of the function
            """,  # noqa: E501
            lambda x: mylib.filter_device_put(
                x, NamedSharding(MESH, P("data"), memory_kind="unpinned_host")
            ),
            ones(8, 4),
        )

    def test_an_explicit_axis_inside_of_an_auto_one(self):
        spec = P(None, ("data", "model"))
        staged_says(
            f"""
            can't place 1 leaf:
              the array (8, 16)
                asked for: {spec} over {HERE}
                but ('data', 'model') nests an Explicit axis inside an Auto one
                instead: put the Explicit axes first in that dimension
            """,
            lambda x: mylib.filter_shard(x, spec, mesh=MIXED),
            ones(8, 16),
        )

    def test_an_explicit_axis_around_an_auto_one_is_fine(self):
        spec = P(("model", "data"))
        y = jax.jit(lambda x: mylib.filter_shard(x, spec, mesh=MIXED))(ones(8, 4))
        assert y.sharding.is_equivalent_to(NamedSharding(MIXED, spec), 2)

    def test_a_mesh_of_another_size_than_the_one_in_force(self):
        with jax.set_mesh(MESH):
            staged_says(
                """
                can't place 1 leaf:
                  the array (8, 4)
                    asked for: P('data') over mesh ('data': 2, 'model': 2)
                    but this code runs on 8 devices and mesh ('data': 2, 'model': 2) has 4
                    instead: constrain to the mesh of the computation, or move the array outside of it
                """,  # noqa: E501
                lambda x: mylib.filter_shard(x, P("data"), mesh=HALF),
                ones(8, 4),
            )

    def test_a_mesh_over_other_devices_than_the_one_in_force(self):
        first = Mesh(jax.devices()[:4], "data", axis_types=(AUTO,))
        last = Mesh(jax.devices()[4:], "data", axis_types=(AUTO,))
        for here, there in ((MESH, BACKWARDS), (first, last)):
            shape = ", ".join(f"{name!r}: {size}" for name, size in here.shape.items())
            with jax.set_mesh(here):
                staged_says(
                    f"""
                    can't place 1 leaf:
                      the array (8, 4)
                        asked for: P('data') over mesh ({shape})
                        but mesh ({shape}) is over other devices, or in another order, than the mesh in force here
                        instead: constrain to the mesh of `jax.set_mesh`, or move the array outside of this function
                    """,  # noqa: E501
                    lambda x, there=there: mylib.filter_shard(x, P("data"), mesh=there),
                    ones(8, 4),
                )

    def test_auto_axes_of_another_mesh_than_the_explicit_one_in_force(self):
        flat = jax.make_mesh((8,), ("all",), axis_types=(AUTO,))
        with jax.set_mesh(TYPED):
            staged_says(
                f"""
                can't place 1 leaf:
                  the array (8, 4)
                    asked for: P('all') over mesh ('all': 8)
                    but mesh ('all': 8) has Auto axes, and the mesh in force here has only Explicit ones
                    instead: constrain to {HERE}, which is in force
                """,  # noqa: E501
                lambda x: mylib.filter_shard(x, P("all"), mesh=flat),
                ones(8, 4),
            )

    def test_uneven_dimensions_which_jax_would_replicate(self):
        staged_says(
            f"""
            can't place 1 leaf:
              the array (17, 4)
                asked for: P('data') over {HERE}
                but dimension 0 of size 17 does not divide into the 4 parts of 'data'
                instead: pad it to 20 (a batch: mylib.data.prefetch(..., tail='pad')), shard another dimension, or write None for this one
            """,  # noqa: E501
            lambda x: mylib.filter_shard(x, P("data"), mesh=MESH),
            ones(17, 4),
        )


WORLDS = {
    "jit": jax.jit,
    "nested jit": lambda f: jax.jit(jax.jit(f)),
    "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "grad of jit": lambda f: jax.grad(jax.jit(lambda x: f(x).sum())),
    "jit of grad": lambda f: jax.jit(jax.grad(lambda x: f(x).sum())),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None]),
    "jit of vmap": lambda f: lambda x: jax.jit(jax.vmap(f))(x[None]),
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda x: jax.lax.scan(lambda carry, _: (f(carry), None), x, length=2),
    "while_loop": lambda f: lambda x: jax.lax.while_loop(lambda x: True, f, x),
    "cond": lambda f: lambda x: jax.lax.cond(True, f, lambda x: x, x),
    "eval_shape": lambda f: lambda x: jax.eval_shape(f, x),
    "make_jaxpr": jax.make_jaxpr,
    "filter_jit": eqx.filter_jit,
}

FAULTS = {
    "unknown axis": (P("dta"), MESH),
    "axis used twice": (P("data", "data"), MESH),
    "too long": (P(None, None, None), MESH),
    "uneven": (P(None, "data"), MESH),
    "uneven, explicit": (P(None, "data"), TYPED),
    "uneven sharding": (NamedSharding(MESH, P(None, "data")), None),
    "no mesh": (P("data"), None),
    "device": (jax.devices()[7], HALF),
    "unconstrained": (P(P.UNCONSTRAINED), TYPED),
    "layout": (Format(Layout((0,)), NamedSharding(MESH, P())), None),
    "layout of nobody": (Format(Layout.AUTO, NamedSharding(MESH, P())), None),
    "axis name": ("data", MESH),
    "mesh": (MESH, MESH),
    "nothing": (PASS, MESH),
    "prefix": ([P()], MESH),
    "rule": (lambda leaf: P("data", "model", "more"), MESH),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("verb", [mylib.filter_shard, mylib.filter_device_put])
def test_the_same_fault_is_the_same_error_everywhere(verb, fault):
    placement, mesh = FAULTS[fault]
    x = ones(8, 6)

    def f(x):
        return verb({"w": x}, {"w": placement}, mesh=mesh)["w"]

    eager = error_of(f, x)
    assert eager.faults == error_of(mylib.resolve, {"w": x}, {"w": placement}, mesh=mesh).faults
    for world, transform in WORLDS.items():
        staged = error_of(transform(f), x)
        assert staged.faults == eager.faults, world
        assert str(staged) == str(eager), world


def test_a_mesh_that_is_set_gives_the_same_errors():
    def f(x):
        return mylib.filter_shard(x, P("dta"))

    with jax.set_mesh(MESH):
        errors = [error_of(f, ones(8)), error_of(jax.jit(f), ones(8))]
    errors += [error_of(mylib.filter_shard, ones(8), P("dta"), mesh=MESH)]
    assert len({str(error) for error in errors}) == 1


def test_compilations_are_noticed():
    with compilations() as seen:
        jax.jit(lambda x: x * 3 + 1)(np.ones(3))
    assert seen


class TestOneErrorForAll:
    def faulty(self):
        return {
            "long": ones(8),
            "typo": ones(8, 4),
            "uneven": ones(17, 3),
            "fine": ones(16, 5),
            "key": jax.random.split(jax.random.key(0), 8),
        }

    placement = {
        "long": P("data", "model"),
        "typo": P("dta"),
        "uneven": P("data"),
        "fine": P("data"),
        "key": P("data"),
    }

    reason = "the spec has 2 entries, for an array of rank 1"

    def test_it_names_every_faulty_leaf(self):
        assert_says(
            error_of(mylib.filter_shard, self.faulty(), self.placement, mesh=MESH),
            f"""
            can't place 3 leaves; the first: ['long'] (8,): {self.reason}
              ['long'] (8,)
                asked for: {P("data", "model")} over {HERE}
                but the spec has 2 entries, for an array of rank 1
                instead: give at most 1; for a whole model, pass a rule (mylib.rules)
              ['typo'] (8, 4)
                asked for: P('dta') over {HERE}
                but {HERE} has no axis 'dta'
                instead: did you mean 'data'?
              ['uneven'] (17, 3)
                asked for: P('data') over {HERE}
                but dimension 0 of size 17 does not divide into the 4 parts of 'data'
                instead: pad it to 20 (a batch: mylib.data.prefetch(..., tail='pad')), shard another dimension, or write None for this one
            """,  # noqa: E501
        )

    def test_leaves_with_the_same_fault_share_its_explanation(self):
        tree = {"a": ones(17), "b": [ones(17), ones(17, 2)], "c": ones(16)}
        assert_says(
            error_of(mylib.filter_shard, tree, P("data"), mesh=MESH),
            f"""
            can't place 3 leaves: dimension 0 of size 17 does not divide into the 4 parts of 'data'
                asked for: P('data') over {HERE}
                instead: pad it to 20 (a batch: mylib.data.prefetch(..., tail='pad')), shard another dimension, or write None for this one
              ['a'] (17,)
              ['b'][0] (17,)
              ['b'][1] (17, 2)
            """,  # noqa: E501
        )

    def test_each_leaf_is_named_with_what_was_asked_of_it(self):
        # Answers that are gone when the next leaf is asked about, and numbers take the place in
        # memory of those that have gone.
        error = error_of(mylib.resolve, [ones(8)] * 100, lambda leaf: leaf.path[0].idx + 0.5)
        assert [fault.request for fault in error.faults] == [f"{i}.5" for i in range(100)]

    @pytest.mark.parametrize("flags", [{}, {"donate": True}, {"may_alias": True}], ids=str)
    def test_nothing_has_moved_been_donated_or_been_compiled(self, flags):
        tree = self.faulty()
        before = {name: x.sharding for name, x in tree.items()}
        verb = mylib.filter_device_put
        with compilations() as compiled, jax.transfer_guard("disallow_explicit"):
            error = error_of(verb, tree, self.placement, mesh=MESH, **flags)
        assert [fault.path for fault in error.faults] == ["['long']", "['typo']", "['uneven']"]
        assert compiled == []
        assert not any(x.is_deleted() for x in tree.values())
        assert {name: x.sharding for name, x in tree.items()} == before

    def test_the_guard_would_have_noticed_a_transfer(self):
        with jax.transfer_guard("disallow_explicit"), pytest.raises(RuntimeError, match="transfer"):
            mylib.filter_device_put({"fine": ones(16, 5)}, P("data"), mesh=MESH)

    def test_faults_of_flags_come_before_anything_too(self):
        tree = {"a": ones(8), "b": ones(8)}
        with jax.transfer_guard("disallow_explicit"):
            error_of(
                mylib.filter_device_put,
                tree,
                P("data"),
                mesh=MESH,
                donate=True,
                may_alias={"a": None, "b": True},
            )
        assert not tree["a"].is_deleted() and not tree["b"].is_deleted()

    def test_a_broken_rule_leaves_everything_as_it_was(self):
        tree = self.faulty()

        def rule(leaf):
            if leaf.name == "['uneven']":
                raise RuntimeError("broken")
            return P()

        with jax.transfer_guard("disallow_explicit"), pytest.raises(RuntimeError, match="broken"):
            mylib.filter_device_put(tree, rule, mesh=MESH, donate=True)
        assert not any(x.is_deleted() for x in tree.values())


class TestTheError:
    def error(self):
        tree = {"w": ones(17), "b": ones(8)}
        return error_of(mylib.filter_shard, tree, {"w": P("data"), "b": P("dta")}, mesh=MESH)

    def test_has_faults(self):
        b, w = self.error().faults
        assert b == mylib.errors.Fault(
            path="['b']",
            shape=(8,),
            request=f"P('dta') over {HERE}",
            reason=f"{HERE} has no axis 'dta'",
            fix="did you mean 'data'?",
        )
        assert (w.path, w.shape) == ("['w']", (17,))

    @pytest.mark.parametrize(
        "again", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy]
    )
    def test_can_be_sent_elsewhere(self, again):
        error = self.error()
        other = again(error)
        assert type(other) is PlacementError
        assert other.faults == error.faults
        assert str(other) == str(error)

    def test_points_at_the_call_and_not_into_a_chain_of_errors(self):
        error = self.error()
        assert error.__cause__ is None
        assert error.__context__ is None


class TestBeginners:
    """What beginners write, and are told."""

    def test_a_number_in_a_batch(self):
        batch = {"x": np.zeros((8, 3)), "lr": np.float32(1)}
        with pytest.raises(PlacementError, match=r"pass rules.batch\('data'\), which copies them"):
            mylib.filter_shard(batch, P("data"), mesh=MESH)
        mylib.filter_shard(batch, mylib.rules.batch("data"), mesh=MESH)

    def test_a_mesh_by_position(self):
        x = np.zeros((8, 3))
        assert mylib.resolve(x, P("data"), MESH).mesh == MESH
        for verb in (mylib.filter_shard, mylib.filter_device_put):
            assert verb(x, P("data"), MESH).sharding.mesh == MESH

    def test_a_mesh_as_in_jax(self):
        with pytest.raises(TypeError, match=r"write make_mesh\(data=4, model=2\), not"):
            mylib.make_mesh((4, 2), ("data", "model"))  # pyright: ignore[reportArgumentType]


def test_errors_have_a_common_base():
    errors = {
        mylib.errors.AuditError: ValueError,
        mylib.PlacementError: ValueError,
        mylib.errors.PlanError: ValueError,
        mylib.errors.ReplicaError: ValueError,
        mylib.errors.SavedProgramError: ValueError,
        mylib.machines.CompilerError: ImportError,
        mylib.machines.NotHereError: RuntimeError,
        mylib.machines.OutOfMemoryError: RuntimeError,
        mylib.mpmd.TransferError: RuntimeError,
    }
    for error, base in errors.items():
        assert issubclass(error, mylib.MylibError) and issubclass(error, base)
    assert not issubclass(mylib.errors.ReplicaError, mylib.PlacementError)

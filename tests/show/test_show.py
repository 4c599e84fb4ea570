"""`show`: the table of a tree, what it says of leaves of every kind, and what has moved."""

import gc
import io
import re
import sys
import time
import weakref
from textwrap import dedent

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float
from notebook_pages import of_ones
from terminals import terminal

import mylib
from mylib._core.show.text import columns, wrapped
from mylib.rules import fsdp

MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
EXPLICIT = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)


def put(shape, spec, mesh=MESH, **options):
    return jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh, spec, **options))


def abstract(shape, *sharding, dtype=jnp.float32):
    place = NamedSharding(*sharding) if sharding else None
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)


def says(shown, text):
    """Whether something prints as this text, from the first letter to the last."""
    assert str(shown) == repr(shown) == dedent(text).strip("\n")
    return True


def row_of(x):
    (row,) = mylib.show(x).rows
    return row


class TestTable:
    def test_a_model(self):
        layers = [of_ones(lambda: eqx.nn.Linear(8, 8, key=jax.random.key(0)))] * 3
        sharded = mylib.filter_shard(layers, fsdp("data", min_size=0), mesh=MESH)
        tree = {"host": np.ones(3), "layers": sharded, "scale": jnp.ones(8), "f": jax.nn.relu}
        assert says(
            mylib.show(tree),
            """
            array                 shape   dtype    spec         state        bytes      per device
            ['host']              (3,)    float64  host memory  NumPy        24 B
            ['layers'][*].weight  (8, 8)  float32  P('data')    committed    3 x 256 B  3 x 64 B
            ['layers'][*].bias    (8,)    float32  P('data')    committed    3 x 32 B   3 x 8 B
            ['scale']             (8,)    float32  cpu 0        uncommitted  32 B       32 B

            8 arrays, 920 B; on 8 devices, 248 B on the most loaded one (cpu 0) and 216 B on the least
            mesh ('data': 4, 'model': 2), Auto axes: cpu 0-7
            not arrays: ['f'] (custom_jvp)
            """,  # noqa: E501
        )

    def test_several_meshes_have_numbers(self):
        tree = {"a": put(8, P("data")), "b": put(8, P("data"), EXPLICIT)}
        assert says(
            mylib.show(tree),
            """
            array  spec                 bytes  per device
            ['a']  P('data') on mesh 1  32 B   8 B
            ['b']  P('data') on mesh 2  32 B   8 B

            2 arrays, 64 B; 16 B on each of 8 devices
            mesh 1 ('data': 4, 'model': 2), Auto axes: cpu 0-7
            mesh 2 ('data': 4, 'model': 2), Explicit axes: cpu 0-7
            all of them: shape (8,), dtype float32, state committed
            """,
        )

    def test_layers_on_other_meshes_do_not_share_a_line(self):
        lines = str(mylib.show([put(8, P("data")), put(8, P("data"), EXPLICIT)])).splitlines()
        assert [line.split("  ")[0] for line in lines[1:3]] == ["[0]", "[1]"]

    def test_columns_in_which_all_are_alike_are_one_line(self):
        tree = [put(8, P("data")), put(4, P("data")), put(4, P("data"))]
        assert says(
            mylib.show(tree),
            """
            array  shape  bytes     per device
            [0]    (8,)   32 B      8 B
            [*]    (4,)   2 x 16 B  2 x 4 B

            3 arrays, 64 B; 16 B on each of 8 devices
            mesh ('data': 4, 'model': 2), Auto axes: cpu 0-7
            all of them: dtype float32, spec P('data'), state committed
            """,
        )

    def test_a_thousand_devices(self):
        mesh = AbstractMesh((128, 8), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        tree = [abstract((1024, 1024), mesh, P("data", "model"))] * 100
        assert says(
            mylib.show(tree),
            """
            array  shape         dtype    spec                state     bytes        per device
            [*]    (1024, 1024)  float32  P('data', 'model')  abstract  100 x 4 MiB  100 x 4 KiB

            100 arrays, 400 MiB; 400 KiB on each of 1024 devices
            mesh ('data': 128, 'model': 8), Auto axes: device 0-1023
            """,
        )

    def test_axes_of_several_types(self):
        mixed = mylib.make_mesh(data=4, model=2, explicit="model")
        told = str(mylib.show([abstract((8,), mixed, P("data"))]))
        assert "mesh ('data': 4, 'model': 2), 'data' Auto, 'model' Explicit: cpu 0-7" in told

    @pytest.mark.parametrize("tree", [{}, None, ()])
    def test_nothing(self, tree):
        assert says(mylib.show(tree), "0 arrays, 0 B")

    def test_nothing_but_static_leaves(self):
        assert says(
            mylib.show([len, "text", 3, np.array(["a"])]),
            """
            0 arrays, 0 B
            not arrays: [0] (builtin_function_or_method), [1] (str), [2] (int), [3] (ndarray)
            """,
        )
        assert says(mylib.show("text"), "0 arrays, 0 B\nnot arrays: the tree (str)")
        assert mylib.show({"a": 1, "b": jnp.ones(2)}).static == {"['a']": "int"}

    def test_many_static_leaves_are_shortened(self):
        told = str(mylib.show([["text", 1]] * 8 + [{str(i): 2.0 for i in range(8)}]))
        assert "not arrays: [0..7][0] (str), [0..7][1] (int), [8]['0'] (float)" in told
        assert told.endswith("and 5 more")

    def test_what_programs_read(self):
        overview = mylib.show({"a": put((8, 4), P("data")), "b": np.ones(2, np.float32)})
        assert overview.nbytes == 136
        assert overview.bytes_by_device == dict.fromkeys(jax.devices(), 32)
        assert overview.most_loaded == (jax.devices()[0], 32)
        row = overview.rows[0]
        assert row.target == row.place == NamedSharding(MESH, P("data"))
        assert (row.spec, row.state, row.why, row.faulty) == (
            "P('data')",
            "committed",
            "committed",
            False,
        )

    def test_explain_without_a_placement_is_show(self):
        tree = {"a": put((8, 4), P("data")), "b": np.ones(2, np.float32), "c": "static"}
        explained, shown = mylib.explain(tree), mylib.show(tree)
        assert type(explained) is mylib.results.Overview and explained == shown


class TestLeaves:
    @pytest.mark.parametrize(
        ("x", "spec", "state", "nbytes", "per_device"),
        [
            (np.ones(3), "host memory", "NumPy", 24, 0),
            (np.float32(1), "host memory", "NumPy", 4, 0),
            (jnp.ones(3), "cpu 0", "uncommitted", 12, 12),
            (jax.device_put(jnp.ones(3), jax.devices()[2]), "cpu 2", "committed", 12, 12),
            (put((8, 4), P(None, "model")), "P(None, 'model')", "committed", 128, 64),
            (put((0, 4), P("data")), "P('data')", "committed", 0, 0),
            (put((8,), P("data"), memory_kind="pinned_host"), "P('data') in pinned_host",
             "committed", 32, 8),
            (jax.random.key(0), "cpu 0", "uncommitted", 8, 8),
            (jax.device_put(jax.random.split(jax.random.key(0), 8), NamedSharding(MESH, P("data"))),
             "P('data')", "committed", 64, 16),
            (abstract((3, 4), dtype=jnp.int8), "no sharding", "abstract", 12, 0),
            (abstract((6,), MESH, P("data")), "P('data')", "abstract", 24, 8),
            # As `jax.typeof(x).sharding` is on Auto axes.
            (abstract((6,), AbstractMesh((), ()), P()), "no sharding", "abstract", 24, 0),
            (abstract(jax.export.symbolic_shape("b, 4")), "no sharding", "abstract", 0, 0),
        ],
    )  # fmt: skip
    def test_kinds(self, x, spec, state, nbytes, per_device):
        row = row_of({"x": x})
        assert (row.spec, row.state) == (spec, state)
        assert (row.nbytes, row.bytes_per_device) == (nbytes, per_device)
        assert spec in str(mylib.show(x)) and state in str(mylib.show([x]))

    def test_a_deleted_array_takes_no_memory(self):
        x = put(8, P("data"))
        x.delete()
        assert says(
            mylib.show([x]),
            """
            array  shape  dtype    spec       state    bytes  per device
            [0]    (8,)   float32  P('data')  deleted  0 B    0 B

            1 array, 0 B
            mesh ('data': 4, 'model': 2), Auto axes: cpu 0-7
            """,
        )

    def test_unreduced(self):
        spec = P(None, unreduced={"data"})
        ones = put((4, 8), P(None, "data"), EXPLICIT)
        with jax.set_mesh(EXPLICIT):
            x = jax.jit(lambda x, y: jnp.einsum("ij,j->i", x, y, out_sharding=spec))(
                ones, put(8, P("data"), EXPLICIT)
            )
        told = str(mylib.show(x))
        assert "P(None, unreduced={'data'" in told
        assert "partial sums: the values are the sums of the copies over 'data'" in told

    def test_a_ref(self):
        assert mylib.show({"r": jax.new_ref(jnp.ones(3))}).static == {"['r']": "Ref"}

    @pytest.mark.parametrize("mesh", [MESH, EXPLICIT])
    def test_traced(self, mesh):
        seen = []

        @jax.jit
        def inside(x):
            seen.append(mylib.show({"x": x}))
            return x

        jax.eval_shape(inside, put((8, 4), P("data"), mesh))
        (row,) = seen[0].rows
        typed, spec, held = {
            MESH: ("float32[8,4]", "by its type", 0),
            EXPLICIT: ("float32[8@data,4]", "P('data', None)", 32),
        }[mesh]
        assert (row.state, row.why) == ("traced", f"traced as {typed}")
        assert (row.spec, row.bytes_per_device, row.nbytes) == (spec, held, 128)

    def test_inside_shard_map(self):
        def inside(x):
            row = row_of(x)
            assert (row.why, row.place) == ("traced as float32[2,4]{V:data}", None)
            return x

        mapped = jax.shard_map(inside, mesh=MESH, in_specs=P("data"), out_specs=P("data"))
        jax.eval_shape(mapped, abstract((8, 4)))

    def test_under_eager_transformations(self):
        def told(x):
            assert row_of(x).why == "traced as float32[4]"
            return x.sum()

        jax.grad(told)(jnp.ones(4))
        jax.vmap(told)(jnp.ones((2, 4)))


@pytest.mark.parametrize(
    "show",
    [
        mylib.show,
        lambda tree: mylib.show(tree, mylib.filter_shard(tree, P(), mesh=MESH)),
        mylib.explain,
        lambda tree: mylib.explain(tree, fsdp("data"), MESH),
        lambda tree: mylib.explain(tree, P("data", "data"), MESH),
    ],
    ids=["show", "changes", "explain", "explain a rule", "faults"],
)
def test_results_keep_no_arrays_alive(show):
    tree = {"layer": Named(jnp.ones((8, 8))), "x": np.ones(8)}
    arrays = [weakref.ref(tree["layer"].weight), weakref.ref(tree["x"])]
    result = show(tree)
    texts = str(result), result._repr_html_()
    del tree
    gc.collect()
    assert [x() for x in arrays] == [None, None]
    assert (str(result), result._repr_html_()) == texts
    leaf = result.rows[0].leaf
    assert leaf.axes == ("out", "in") and leaf.owners == ((Named, ("weight",)),)


class Named(eqx.Module):
    weight: Float[Array, "out in"]


class TestMoves:
    def test_what_has_moved(self):
        before = {"b": jnp.ones(8), "host": np.ones(4, np.float32), "same": put(8, P())}
        before |= {"mesh": put(8, P("data")), "old": jnp.ones(2), "size": jnp.ones(8)}
        before |= {"w": put((8, 8), P("data"))}
        after = {"b": put(8, P()), "host": put(4, P("data")), "same": before["same"]}
        after |= {"mesh": put(8, P("data"), EXPLICIT), "new": jnp.ones(2), "size": jnp.ones(4)}
        after |= {"w": put((8, 8), P("model", "data"))}
        assert says(
            mylib.show(before, after),
            """
            array     shape   before               after                         what              received
            ['b']     (8,)    cpu 0                P() on mesh 1                 moved             224 B
            ['host']  (4,)    host memory          P('data') on mesh 1           moved             32 B
            ['mesh']  (8,)    P('data') on mesh 1  P('data') on mesh 2           another sharding
            ['new']   (2,)                         cpu 0                         new
            ['same']  (8,)    P() on mesh 1        P() on mesh 1
            ['size']  (4,)    cpu 0                cpu 0                         was float32 (8,)
            ['w']     (8, 8)  P('data') on mesh 1  P('model', 'data') on mesh 1  moved             192 B
            ['old']   (2,)    cpu 0                                              gone

            3 of 8 arrays moved; 448 B received, at most 68 B by one (cpu 1)
            mesh 1 ('data': 4, 'model': 2), Auto axes: cpu 0-7
            mesh 2 ('data': 4, 'model': 2), Explicit axes: cpu 0-7
            all of them: dtype float32
            """,  # noqa: E501
        )

    @pytest.mark.parametrize(
        ("before", "after", "what", "received"),
        [
            (put(8, P("data")), put(8, P("data")), "", {}),
            (put(8, P("data")), put(8, P(("data",))), "", {}),
            (jnp.ones(2), jax.device_put(jnp.ones(2), jax.devices()[0]), "now committed", {}),
            (jnp.ones(2), jax.device_put(jnp.ones(2), jax.devices()[1]), "moved", {1: 8}),
            (put(8, P("data")), np.ones(8, np.float32), "moved", {"host memory": 32}),
            # JAX holds NumPy's float64 as float32.
            (np.ones(8), put(8, P("data")), "moved", dict.fromkeys(range(8), 8)),
            (put(8, P()), put(8, P(), memory_kind="pinned_host"), "moved",
             dict.fromkeys(range(8), 32)),
            (put((4, 2), P("data")), put((4, 2), P(None, "model")), "moved",
             dict.fromkeys(range(8), 12)),
            (abstract((8,)), put(8, P()), "unknown", None),
        ],
    )  # fmt: skip
    def test_what_is_received(self, before, after, what, received):
        (move,) = mylib.show({"x": before}, {"x": after}).moves
        assert move.what == what
        got = move.received
        assert received == (got and {getattr(d, "id", d): nbytes for d, nbytes in got.items()})
        assert move.nbytes == sum((received or {}).values())

    def test_donated(self):
        before = put(8, P("data"))
        after = put(8, P())
        before.delete()
        (move,) = mylib.show(before, after).moves
        assert (move.what, move.nbytes) == ("moved", 8 * 24)
        (move,) = mylib.show(after, before).moves
        assert (move.what, move.nbytes) == ("deleted", 0)

    def test_nothing(self):
        assert says(mylib.show({}, {}), "0 of 0 arrays moved")
        assert mylib.show({}, {}).bytes_by_device == {}

    def test_layers_share_a_line(self):
        before = [put((8, 8), P("data"))] * 3
        changes = mylib.show(before, [put((8, 8), P())] * 3)
        assert "[*]    (8, 8)  float32  P('data')  P()    moved  3 x 1.5 KiB" in str(changes)
        assert changes.bytes_by_device == dict.fromkeys(jax.devices(), 3 * 192)


class TestColour:
    @pytest.fixture
    def terminal(self, monkeypatch):
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.delenv("NO_COLOR", raising=False)

    def test_in_a_terminal(self, terminal):
        tree = {"a": put(8, P("data")), "b": jnp.ones(8)}
        for shown in (mylib.show(tree), mylib.show(tree["a"]), mylib.explain(tree, P(), MESH)):
            assert "\x1b[" in str(shown)

    @pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
    def test_where_it_is_not_wanted(self, terminal, monkeypatch, name, value):
        monkeypatch.setenv(name, value)
        assert "\x1b" not in str(mylib.show(jnp.ones(8)))

    def test_an_output_without_box_characters(self, monkeypatch):
        """As when the output goes into a file on Windows."""
        latin = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
        monkeypatch.setattr(sys, "stdout", latin)
        print(mylib.show(put(8, P("data"))))
        print(mylib.show({"a": put(8, P("data")), "b": jnp.ones(8)}))
        latin.flush()
        assert "| 0, 1 | 2, 3 |" in latin.buffer.getvalue().decode("cp1252")

    def test_elsewhere(self, monkeypatch):
        monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
        assert "\x1b" not in str(mylib.show(put(8, P("data"))))

    def test_the_text_is_the_same(self, terminal, monkeypatch):
        tree = {"a": put(8, P("data")), "b": jnp.ones(8)}
        shown = [mylib.show(tree), mylib.show(tree["a"]), mylib.show(tree, {})]
        coloured = [re.sub(r"\x1b\[[0-9;]*m", "", str(x)) for x in shown]
        monkeypatch.setenv("NO_COLOR", "1")
        trimmed = ["\n".join(map(str.rstrip, str(x).splitlines())) for x in shown]
        assert ["\n".join(map(str.rstrip, x.splitlines())) for x in coloured] == trimmed


class TestManyLeaves:
    """Whose names differ by more than indices."""

    def tree(self, count, kinds=1):
        places = [NamedSharding(MESH, P("data")), NamedSharding(MESH, P())]
        arrays = [
            jax.device_put(np.ones((8, 4 + i), np.float32), places[i % 2]) for i in range(kinds)
        ]
        return {f"name {chr(97 + i % 26)}{i:06}": arrays[i % kinds] for i in range(count)}

    def test_the_first_have_lines_and_the_others_are_counted(self):
        shown = mylib.show(self.tree(1000, 2))
        lines = str(shown).splitlines()
        assert lines[200].startswith("['name") and lines[201:203] == ["and 800 more", ""]
        assert "1000 arrays" in str(shown)
        assert len(shown.whole().splitlines()) > 1000
        assert len(mylib.explain(self.tree(1000, 2)).whole().splitlines()) > 1000
        changes = mylib.show(self.tree(1000, 2), self.tree(1000, 2))
        assert len(str(changes).splitlines()) < 210 < 1000 < len(changes.whole().splitlines())

    @pytest.mark.thorough
    def test_a_hundred_thousand(self):
        shown = mylib.show(self.tree(100_000))
        start = time.perf_counter()
        text, page = str(shown), shown._repr_html_()
        assert len(text.splitlines()) < 210 and len(page) < 500_000
        assert "and 99800 more" in text and "and 99800 more" in page
        assert time.perf_counter() - start < 30


class TestTerminals:
    def test_wide_characters_are_aligned(self):
        """They take two columns, and combining ones none."""
        x = put((8, 4), P("data"))
        tree = {"weight": x, "e\u0301": x, "\u91cd\u307f": put((4, 4), P("data"))}
        lines = str(mylib.show(tree)).splitlines()[1:4]
        before = [line[: line.index("(")] for line in lines]
        wide = [sum(c > "\u3000" for c in text) - text.count("\u0301") for text in before]
        assert sorted(wide) == [-1, 0, 2]
        assert len({len(text) + extra for text, extra in zip(before, wide, strict=True)}) == 1

    def test_a_narrow_one_has_the_table_of_a_transformer(self, monkeypatch):
        """Names that differ in one key share a line, and the bytes of whole arrays are left out."""
        matrix, vector = abstract((512, 512), MESH, P("data")), abstract((512,), MESH, P())
        heads = {f"{name}_proj": matrix for name in ("query", "key", "value")}
        block = {"attention": heads, "norm": {"weight": vector, "bias": vector}}
        with terminal(monkeypatch, 72):
            table = str(mylib.show({"blocks": [block] * 3})).partition("\n\n")[0]
        assert (
            table
            == dedent("""
            array                                 shape       spec       per device
            ['blocks'][*]['attention']['{key,     (512, 512)  P('data')  9 x 256 KiB
              query, value}_proj']
            ['blocks'][*]['norm']['{bias,         (512,)      P()        6 x 2 KiB
              weight}']
            """).strip()
        )

    def test_long_cells_and_notes_are_folded_between_words(self, monkeypatch):
        why = "as each of these dimensions is divided by what of the others is left"
        table = [("array", "times", "why"), ("first", "2", why), ("second.last", "3", "short")]
        with terminal(monkeypatch, 50):
            folded, notes = columns(table), wrapped([f"  {why}"])
        assert folded == [
            "array        times  why",
            "first        2      as each of these dimensions is",
            "                      divided by what of the",
            "                      others is left",
            "second.last  3      short",
        ]
        assert notes == [f"  {why[:46]}", f"    {why[47:]}"]

    def test_a_wide_one_has_the_table(self, monkeypatch):
        with terminal(monkeypatch, 200):
            assert str(mylib.show({"a": put((8, 4), P("data"))})).startswith("array")

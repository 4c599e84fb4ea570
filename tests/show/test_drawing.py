"""The drawing of an array: every part, with exactly the devices that hold it."""

import functools
import itertools
import re
from textwrap import dedent

import jax
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P

import mylib

SIZES = [(8,), (4, 2), (2, 4), (2, 2, 2), (2, 3), (1, 4), (1,), (2, 1, 2)]
NAMES = ("a", "b", "c")


@functools.cache
def mesh_of(sizes, order):
    """A mesh of these sizes, its devices turned by `order`."""
    devices = np.roll(np.array(jax.devices()), order)[: np.prod(sizes)].reshape(sizes)
    return Mesh(devices, NAMES[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))


@st.composite
def places(draw):
    """A shape, and a sharding of it."""
    mesh = mesh_of(draw(st.sampled_from(SIZES)), draw(st.sampled_from([0, 3])))
    rank = draw(st.integers(0, 5))
    entries = [[] for _ in range(rank)]
    for name in draw(st.permutations(mesh.axis_names)):
        where = draw(st.integers(-1, rank - 1))
        if where >= 0:
            entries[where].append(name)
    parts = [int(np.prod([mesh.shape[name] for name in entry])) for entry in entries]
    shape = tuple(n * draw(st.integers(1, 2)) for n in parts)
    return shape, NamedSharding(mesh, P(*(tuple(entry) or None for entry in entries)))


def held_by_device(shape, place):
    """What JAX says that each device holds: the start and stop in each dimension."""
    x = jax.device_put(np.zeros(shape, np.int8), place)
    return {
        shard.device.id: tuple(s.indices(n)[:2] for s, n in zip(shard.index, shape, strict=True))
        for shard in x.addressable_shards
    }


def numbers(text):
    """`0-2, 5` as numbers."""
    found = set()
    for run in text.split(", "):
        first, _, last = run.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def read_drawing(shape, text):
    """A drawing, read back: what each device holds."""
    whole = [(0, n) for n in shape]
    down = re.search(r"dimension (\d+) down", text)
    across = re.search(r"dimension (\d+) across", text)
    held, panel, heads = {}, {}, [None]
    for line in text.partition("which part: ")[2].splitlines()[1:]:
        if line.startswith("dimension"):
            panel = {
                int(d): span(where, None) for d, where in re.findall(r"(\d+) at (\S+\d)", line)
            }
        elif "│" in line:
            name, *cells = line.strip("│").split("│") if down is None else line.split("│")[:-1]
            if down is None:
                cells, name = [name, *cells], ""
            for head, cell in zip(heads, cells, strict=True):
                part = dict(enumerate(whole)) | panel
                part |= {int(down[1]): span(name)} if down else {}
                part |= {int(across[1]): span(head)} if across else {}
                for device in numbers(cell.strip()):
                    assert device not in held
                    held[device] = tuple(part[dim] for dim in range(len(shape)))
        elif across and ":" in line:
            heads = line.split()
    return held


def span(text):
    start, _, stop = text.strip().partition(":")
    return int(start), int(stop)


@given(places())
def test_every_part_is_drawn_with_the_devices_that_hold_it(given):
    shape, place = given
    x = jax.ShapeDtypeStruct(shape, np.int8, sharding=place)
    expected = held_by_device(shape, place)
    shown = mylib.show(x)
    assert read_drawing(shape, str(shown)) == expected
    drawing = str(shown).partition("which device")[2]
    assert drawing in shown._repr_html_().replace("&#x27;", "'")


@given(places())
def test_moves_are_counted_by_element(given):
    """What is received is what a device did not hold: counted on the numbers of the elements."""
    shape, place = given
    before = jax.device_put(np.zeros(shape, np.int8), jax.devices()[1])
    (move,) = mylib.show(before, jax.device_put(np.zeros(shape, np.int8), place)).moves
    elements = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    expected = {
        device: elements[tuple(slice(*s) for s in spans)].size
        for device, spans in held_by_device(shape, place).items()
        if device != 1
    }
    assert move.received is not None
    assert {device.id: nbytes for device, nbytes in move.received.items()} == expected


def drawn(shape, mesh, spec):
    place = NamedSharding(mesh, spec)
    text = str(mylib.show(jax.ShapeDtypeStruct(shape, np.float32, sharding=place)))
    return text.partition("\n\nwhich ")[2]


AUTO = (AxisType.Auto,)


@pytest.mark.parametrize(
    ("shape", "spec", "expected"),
    [
        ((8, 4), P("a", "b"), """
            device holds which part: dimension 0 down, dimension 1 across
                   0:2   2:4
                 ┌─────┬─────┐
             0:2 │  0  │  1  │
                 ├─────┼─────┤
             2:4 │  2  │  3  │
                 ├─────┼─────┤
             4:6 │  4  │  5  │
                 ├─────┼─────┤
             6:8 │  6  │  7  │
                 └─────┴─────┘
            """),
        ((8,), P("b"), """
            device holds which part: dimension 0 across
                 0:4          4:8
            ┌────────────┬────────────┐
            │ 0, 2, 4, 6 │ 1, 3, 5, 7 │
            └────────────┴────────────┘
            """),
        ((3, 8, 2), P(None, "b"), """
            device holds which part: dimension 1 down
                 ┌────────────┐
             0:4 │ 0, 2, 4, 6 │
                 ├────────────┤
             4:8 │ 1, 3, 5, 7 │
                 └────────────┘
            """),
        ((), P(), """
            device holds which part: each device has the whole array
            ┌─────┐
            │ 0-7 │
            └─────┘
            """),
    ],
)  # fmt: skip
def test_as_text(shape, spec, expected):
    assert drawn(shape, mesh_of((4, 2), 0), spec) == dedent(expected).strip("\n")


def test_four_dimensions():
    assert drawn((2, 4, 8, 3), mesh_of((2, 2, 2), 0), P("a", "b", "c")) == dedent("""
        device holds which part: dimension 1 down, dimension 2 across
        dimension 0 at 0:1
               0:4   4:8
             ┌─────┬─────┐
         0:2 │  0  │  1  │
             ├─────┼─────┤
         2:4 │  2  │  3  │
             └─────┴─────┘
        dimension 0 at 1:2
               0:4   4:8
             ┌─────┬─────┐
         0:2 │  4  │  5  │
             ├─────┼─────┤
         2:4 │  6  │  7  │
             └─────┴─────┘
        """).strip("\n")


def test_large_meshes_are_shortened():
    mesh = AbstractMesh((128, 64), ("a", "b"), axis_types=AUTO * 2)
    lines = drawn((1024, 1024), mesh, P("a", "b")).splitlines()
    assert len(lines) == 1 + 2 + 2 * 16 and max(map(len, lines)) < 100
    assert lines[-2].split("│")[1:-1] and "8191" in lines[-2] and "…" in lines[-4]

    narrow = drawn((1024,), AbstractMesh((64,), ("a",), axis_types=AUTO), P("a")).splitlines()
    assert narrow[0].endswith("dimension 0 down") and len(narrow) == 2 + 2 * 16

    copies = drawn((64,), mesh, P("b"))
    assert "0, 64, ..., 8128 (128 devices)" in copies

    deep = AbstractMesh((4, 4, 2, 2), ("a", "b", "c", "d"), axis_types=AUTO * 4)
    panels = drawn((4, 4, 2, 2), deep, P("a", "b", "c", "d")).splitlines()
    assert panels[-1] == "and 8 more grids"


def test_a_page_of_a_large_mesh_is_small():
    mesh = AbstractMesh((8, 16, 16), ("a", "b", "c"), axis_types=AUTO * 3)
    specs = [P(*axes) for axes in itertools.permutations(("a", "b", "c"))]
    tree = [
        jax.ShapeDtypeStruct((32, 32, 32), np.int8, sharding=NamedSharding(mesh, s)) for s in specs
    ]
    assert len(mylib.show(tree[0])._repr_html_()) < 1e6
    assert mylib.show(tree)._repr_html_().count('class="figure"') == 6

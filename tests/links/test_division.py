"""Which parts of an array go where: each part of the target once, from a shard that has it."""

import math

import jax
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from mylib._moving.links.cutting import cut, join
from mylib._moving.links.division import division_of

AXES = ("a", "b", "c")
GRIDS = [(1,), (2,), (3,), (4,), (8,), (2, 2), (2, 4), (2, 2, 2), (1, 6)]


@st.composite
def _shardings(draw, shape: tuple[int, ...]) -> NamedSharding:
    grid = draw(st.sampled_from(GRIDS))
    devices = draw(st.permutations(jax.devices()))[: math.prod(grid)]
    mesh = Mesh(np.array(devices).reshape(grid), AXES[: len(grid)])
    free = list(mesh.axis_names)
    entries: list[tuple[str, ...]] = []
    for size in shape:
        names = draw(st.lists(st.sampled_from(free), unique=True)) if free else []
        parts = math.prod(mesh.shape[name] for name in names)
        if size % parts:
            names = []
        free = [name for name in free if name not in names]
        entries.append(tuple(names))
    return NamedSharding(mesh, P(*entries))


@st.composite
def _moves(draw) -> tuple[tuple[int, ...], NamedSharding, NamedSharding]:
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 6, 12, 24]), max_size=3)))
    return shape, draw(_shardings(shape)), draw(_shardings(shape))


@given(_moves())
def test_the_pieces_make_the_target(move):
    shape, source, target = move
    value = np.arange(math.prod(shape)).reshape(shape)
    held = {d: value[index] for d, index in source.devices_indices_map(shape).items()}
    pieces, regions = division_of(shape, source, target)
    cut_out = [
        held[p.source][tuple(slice(a, a + n) for a, n in zip(p.start, p.shape, strict=True))]
        for p in pieces
    ]
    wanted = target.devices_indices_map(shape)
    assert {d for region in regions for d in region.devices} == set(wanted)
    for region in regions:
        whole = np.full(region.shape, -1)
        for i in region.pieces:
            assert pieces[i].target == region.devices[0]
            at = [
                slice(a - b, z - b)
                for (a, z), (b, _) in zip(pieces[i].bounds, region.bounds, strict=True)
            ]
            assert (whole[tuple(at)] == -1).all()  # nothing comes twice
            whole[tuple(at)] = cut_out[i]
        for device in region.devices:
            np.testing.assert_array_equal(whole, value[wanted[device]])


@given(_moves())
def test_one_copy_is_sent(move):
    """To one process: replicas on its devices are made there."""
    shape, source, target = move
    pieces, _ = division_of(shape, source, target)
    assert sum(math.prod(piece.shape) for piece in pieces) == math.prod(shape)


@given(_moves())
def test_what_a_device_has_stays_there(move):
    shape, source, target = move
    pieces, _ = division_of(shape, source, target)
    holders = source.devices_indices_map(shape)
    for piece in pieces:
        if piece.target in holders and holders[piece.target] == holders[piece.source]:
            assert piece.source == piece.target


def test_replicas_give_in_turn():
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    here = NamedSharding(Mesh(mesh.devices[:2, :], mesh.axis_names), P())
    there = NamedSharding(Mesh(mesh.devices[2:, :], mesh.axis_names), P(("a", "b")))
    givers = [piece.source for piece in division_of((8,), here, there).pieces]
    assert len(set(givers)) == 4


@pytest.mark.parametrize("shape", [(0,), (0, 4), (2, 0)], ids=str)
def test_arrays_without_elements(shape):
    everywhere = NamedSharding(jax.make_mesh((8,), ("a",)), P())
    pieces, regions = division_of(shape, everywhere, everywhere)
    assert not pieces and [region.shape for region in regions] == [shape]


def test_pieces_are_copies():
    """Also one that is a whole shard: it may be donated while the piece is on its way."""
    x = jax.device_put(np.arange(6.0).reshape(2, 3), jax.devices()[1])
    whole, part = cut((((0, 0), (2, 3)), ((0, 1), (2, 2))), x)
    assert whole.devices() == part.devices() == {jax.devices()[1]}
    assert whole.unsafe_buffer_pointer() != x.unsafe_buffer_pointer()
    value = np.asarray(x)
    x.delete()
    np.testing.assert_array_equal(whole, value)
    np.testing.assert_array_equal(part, value[:, 1:])
    again = join((2, 3), ((0, 0), (0, 1)), [whole, part])
    np.testing.assert_array_equal(again, value)

"""Random meshes, trees and placements for the property tests."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from hypothesis import assume, strategies as st
from jax.experimental.layout import Format
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

from mylib.rules import PASS

_MESH_SHAPES = ((8,), (4,), (2,), (1,), (2, 4), (4, 2), (3, 2), (1, 2), (2, 2, 2), (2, 1, 3))
_SHAPES = [(24,), (8, 12), (16, 8), (4, 6, 8), (8, 3), (1, 8, 2), (2,), (3, 5), (8, 0), (0,), ()]
_DTYPES = [*map(np.dtype, "float32 int32 uint8 bool complex64 float16 int64 float64".split())]
_DTYPES += [jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.int4)]
_AXIS_TYPES = [AxisType.Auto, AxisType.Explicit]
_STATICS = ["text", 3, 2.5, True, None, len, AxisType.Auto, np.int64]
_STATICS += [np.array(["a", "b"]), np.array(["2026-01-01"], "M8[D]"), np.array([{}, None])]


class Pair(NamedTuple):
    left: Any
    right: Any


class Box(eqx.Module):
    inside: Any
    beside: Any
    label: str = eqx.field(static=True)


@dataclass
class Case:
    """A tree, what is asked of it, and where each of its leaves should go (None: nowhere)."""

    tree: Any
    placement: Any
    targets: list[Any]
    mesh: Mesh


@st.composite
def meshes(draw, shapes=_MESH_SHAPES):
    shape = draw(st.sampled_from(shapes))
    devices = draw(st.permutations(jax.devices()) | st.just(jax.devices()))
    kinds = tuple(draw(st.sampled_from(_AXIS_TYPES)) for _ in shape)
    used = np.array(devices[: np.prod(shape)]).reshape(shape)
    return Mesh(used, ("x", "y", "z")[: len(shape)], axis_types=kinds)


@st.composite
def specs(draw, mesh, shape, mixed=True):
    """Specs that fit; if not `mixed`, no dimension is split over both Auto and Explicit axes."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    entries = [()] * len(shape)
    for name in draw(st.permutations(mesh.axis_names)):
        fitting = [
            dim
            for dim, names in enumerate(entries)
            if shape[dim] % math.prod(mesh.shape[n] for n in (*names, name)) == 0
            and (mixed or all(kinds[n] == kinds[name] for n in names))
        ]
        dim = draw(st.sampled_from([*fitting, None]))
        if dim is not None:
            entries[dim] = (*entries[dim], name)
    for dim, names in enumerate(entries):
        entries[dim] = draw(st.sampled_from(_spellings(names)))
    while entries and entries[-1] is None and draw(st.booleans()):
        entries.pop()
    return P(*entries)


def _spellings(names):
    match names:
        case ():
            return [None, ()]
        case (name,):
            return [name, names]
    return [names]


@st.composite
def host_arrays(draw):
    """NumPy arrays, any bits in them, contiguous, strided, read-only; and NumPy scalars."""
    shape, dtype = draw(st.sampled_from(_SHAPES)), draw(st.sampled_from(_DTYPES))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    layout = draw(st.sampled_from(["C", "F", "strided", "read-only", "scalar"]))
    if layout == "strided":
        shape = (*shape, 2)
    if dtype in (np.bool_, np.int64, np.float64, jnp.int4):
        x = rng.integers(-8, 8, shape).astype(dtype)
    else:
        x = np.frombuffer(rng.bytes(np.prod(shape, dtype=int) * dtype.itemsize), dtype)
        x = x.reshape(shape).copy()
    if layout == "scalar" and shape == ():
        return x[()]
    if layout == "strided":
        return x[..., 0]
    if layout == "F":
        return np.asfortranarray(x)
    x.flags.writeable = layout != "read-only"
    return x


@st.composite
def arrays(draw):
    """Arrays from everywhere: NumPy, uncommitted, on a device, on a mesh; typed keys."""
    source = draw(st.sampled_from(["numpy", "uncommitted", "weak", "device", "mesh", "key"]))
    if source == "weak":
        return jnp.asarray(2.5)
    x = draw(host_arrays())
    if source == "numpy":
        return x
    if source == "key":
        x = jax.random.key(draw(st.integers(0, 9)))
        x = jax.random.wrap_key_data(
            np.broadcast_to(jax.random.key_data(x), (*draw(st.sampled_from(_SHAPES)), 2)).copy()
        )
    else:
        x = jnp.array(x)
    if source == "device":
        return jax.device_put(x, draw(st.sampled_from(jax.devices())))
    if source == "mesh" and x.size:
        mesh = draw(meshes())
        return jax.device_put(x, NamedSharding(mesh, draw(specs(mesh, x.shape))))
    return x


def _nodes(children):
    return (
        st.lists(children, max_size=2)
        | st.tuples(children, children)
        | st.fixed_dictionaries({"b": children, "a": children})
        | st.builds(Pair, children, children)
        | st.builds(Box, children, children, st.sampled_from(["here", "there"]))
    )


@st.composite
def trees(draw, leaves=None):
    """Trees in which the same array may be in several places."""
    pool = draw(st.lists(arrays() if leaves is None else leaves, min_size=3, max_size=5))
    leaf = st.sampled_from(pool) | st.sampled_from(pool) | st.sampled_from(_STATICS)
    node = st.recursive(leaf, _nodes, max_leaves=4)
    return draw(st.tuples(node, node, node) | st.builds(Box, node, node, st.just("root")) | node)


def is_placed(x):
    """Whether a leaf is an array that JAX can hold."""
    return eqx.is_array(x) and getattr(x.dtype, "kind", "key") not in "USOM"


@st.composite
def placements(draw, tree, mesh, wanted):
    """What may be asked of a tree, and the target of each of its leaves.

    `wanted(x)` is a strategy for one array leaf.
    """
    leaves = jtu.tree_leaves(tree)
    if jtu.all_leaves([tree]):
        if not is_placed(tree):
            return draw(st.sampled_from([None, P(), P("no such axis")])), [None]
        entry, target = draw(wanted(tree))
        return entry, [target]
    if draw(st.integers(0, 4)) == 4:
        entry, target_of = draw(_common(mesh))
        return entry, [target_of(x) if is_placed(x) else None for x in leaves]
    children, treedef = jtu.tree_flatten(tree, is_leaf=lambda x: x is not tree)
    pairs = [draw(placements(child, mesh, wanted)) for child in children]
    entries = [entry for entry, _ in pairs]
    return treedef.unflatten(entries), [t for _, targets in pairs for t in targets]


def _common(mesh):
    whole = NamedSharding(mesh, P())

    def rows(x):
        return P("x") if x.ndim and x.shape[0] % mesh.shape["x"] == 0 else P()

    return st.sampled_from(
        [
            (None, lambda x: None),
            (P(), lambda x: whole),
            (whole, lambda x: whole),
            (rows, lambda x: NamedSharding(mesh, rows(x))),
        ]
    )


@st.composite
def anywhere(draw, mesh, x):
    """Any placement of one array, outside of `jit`."""
    kind = draw(st.sampled_from(["spec", "sharding", "other mesh", "device", "single", "none"]))
    match kind:
        case "device":
            device = draw(st.sampled_from(mesh.devices.flatten().tolist()))
            return device, SingleDeviceSharding(device)
        case "single":
            single = SingleDeviceSharding(draw(st.sampled_from(jax.devices())))
            return single, single
        case "none":
            return None, None
        case "other mesh":
            mesh = draw(meshes())
    spec = draw(specs(mesh, x.shape))
    target = NamedSharding(mesh, spec)
    return (spec, target) if kind == "spec" else (target, target)


@st.composite
def on_the_mesh(draw, mesh, x):
    """Any placement of one array that what a program on `mesh` returns can have.

    JAX leaves it to the compiler how a result lies over Auto axes, but not in a dimension that
    Explicit axes split.
    """
    spec = draw(specs(mesh, x.shape, mixed=False))
    target = NamedSharding(mesh, spec)
    return draw(st.sampled_from([(spec, target), (target, target), (None, None)]))


@st.composite
def cases(draw, leaves=None, wanted=anywhere, mesh=None):
    mesh = draw(meshes() if mesh is None else mesh)
    tree = draw(trees(leaves))
    placement, targets = draw(placements(tree, mesh, lambda x: wanted(mesh, x)))
    return Case(tree, placement, targets, mesh)


def impossible(mesh, x):
    """A strategy for what can't be had of one array."""
    sharding = partial(NamedSharding, mesh)
    too_long = P(*[None] * (x.ndim + 1))
    uneven = [
        P(*[None] * dim, name)
        for dim, size in enumerate(x.shape)
        for name in mesh.axis_names
        if size % mesh.shape[name]
    ]
    requests = [P("nowhere"), P(("x", "nowhere")), P(("x", "x")), P("x", "x"), P(3), too_long]
    requests += [sharding(too_long), *uneven, *map(sharding, uneven)]
    requests += [device for device in jax.devices() if device not in mesh.devices]
    requests += ["x", 3, mesh, object(), Format(), PASS]
    if AxisType.Auto not in mesh.axis_types:
        requests += [P(*[P.UNCONSTRAINED] * x.ndim)] if x.ndim else []
    misfits = [[], ["x"], {"x": P()}, (P(), P())]
    plain = st.sampled_from(requests)
    returned = st.sampled_from([*requests, *misfits])
    return plain | returned.map(lambda request: lambda leaf: request) | st.sampled_from(misfits)


@st.composite
def impossible_cases(draw, leaves=None, mesh=None):
    """A tree, a placement of it, its mesh, and the names of the leaves that can't be placed so."""
    mesh = draw(meshes() if mesh is None else mesh)
    with_paths, treedef = jtu.tree_flatten_with_path(draw(trees(leaves)))
    arrays = {jtu.keystr(path): x for path, x in with_paths if is_placed(x)}
    assume(arrays)
    faulty = draw(st.sets(st.sampled_from(list(arrays)), min_size=1))
    entries = []
    for path, x in with_paths:
        if jtu.keystr(path) in faulty:
            entries.append(draw(impossible(mesh, x)))
        elif is_placed(x):
            entries.append(draw(on_the_mesh(mesh, x))[0])
        else:
            entries.append(None)
    placement = treedef.unflatten(entries)
    return treedef.unflatten([x for _, x in with_paths]), placement, mesh, faulty

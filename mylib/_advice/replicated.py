"""Warns of programs whose products are not divided: all devices compute the same."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from .._errors import ReplicatedWarning, warn
from .._placement import current_world
from .._products import Products, products_in
from .._text import some
from .._tree import Arrays
from .compilation import Compilation

# Fewer products than these, about as many as a device computes while a small message is sent, are
# not worth dividing; nor are those of programs that compute as much otherwise.
_FEW = 5 * 10**7
_TIMES_OTHERS = 8
# The part of the traced program's products, at least, that each device computes.
_ALL = 0.9
# XLA unrolls a loop on GPUs and TPUs so often at most; its analysis then counts the turns.
_UNROLLED = 4


def about_replicated(
    compilation: Compilation, count: int, program: Callable[[], tuple[Any, jax.stages.Lowered]]
) -> bool:
    """Warns that all devices compute the same. The first `count` arrays are arguments, and
    `program` returns the program traced and lowered. Returns whether it did.
    """
    arrays = compilation.arrays
    devices = max(map(devices_of, (*arrays, *compilation.returned)), default=1)
    if devices == 1:
        return False
    positions = _whole(arrays[:count], devices)
    if not positions:
        return False
    traced, lowered = program()
    flops = (lowered.compile().cost_analysis() or {}).get("flops", 0)
    # Counting takes longest, and most programs need not be counted to their end.
    at_most = flops / (2 * _ALL)
    if at_most < _FEW:
        return False
    work = products_in(traced.jaxpr, each_turn=False, at_most=at_most)
    if work is None or not _are_worth_dividing(work, devices):
        return False
    leaves = [compilation.names[i] for i in positions]
    parameter = re.split(r"[.\[]", leaves[0])[0]
    first = arrays[positions[0]]
    axis = _axis_for(arrays, first.shape[0])
    rule = f"mylib.rules.batch({axis!r})"
    warn(
        f"{compilation.name}: all {devices} devices compute the same, as {some(leaves)} "
        f"{_state(first)}. Write "
        f"in_shardings={{{parameter!r}: {rule}}}, or place the batch before the call, by "
        f"mylib.filter_shard(batch, {rule}, mesh=mesh)",
        ReplicatedWarning,
    )
    return True


def _are_worth_dividing(work: Products, devices: int) -> bool:
    if work.products < max(_FEW, _TIMES_OTHERS * work.others):
        return False
    return not work.looped or devices > _UNROLLED or jax.default_backend() == "cpu"


def devices_of(x: Any) -> int:
    if isinstance(x, Tracer) or not isinstance(x, jax.Array):
        return 1
    return x.sharding.num_devices


def _whole(arrays: Sequence[Any], devices: int) -> list[int]:
    """The arguments that are not split, and could be: those that are not placed at all, if there
    are any, which are more likely to be a batch.
    """
    could_split = [
        i
        for i, x in enumerate(arrays)
        if any(n and n % devices == 0 for n in x.shape)
        and (not _is_placed(x) or x.sharding.is_fully_replicated)
    ]
    return [i for i in could_split if not _is_placed(arrays[i])] or could_split


def _is_placed(x: Any) -> bool:
    return isinstance(x, jax.Array) and x.committed


def _state(x: Any) -> str:
    if isinstance(x, jax.Array):
        return "is whole on each device" if x.committed else "is not placed"
    return "is a NumPy array, which is not placed"


def _axis_for(arrays: Arrays, rows: int) -> str:
    """An axis of the mesh that divides a number of rows."""
    meshes: list[Mesh | AbstractMesh] = [
        x.sharding.mesh
        for x in arrays
        if isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding)
    ]
    for mesh in (*meshes, current_world().mesh):
        for axis, size in mesh.shape.items():
            if size > 1 and rows % size == 0:
                return str(axis)
    return "data"

"""Warns of programs whose products are not divided: all devices compute the same."""

import re
from collections.abc import Callable, Sequence

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from ..._core.errors import ReplicatedWarning, warn
from ..._core.placement import current_world
from ..._core.products import Products, products_in
from ..._core.text import some
from ..._core.tree import Arrays

# Fewer products than these, about as many as a device computes while a small message is sent, are
# not worth dividing; nor are those of programs that compute as much otherwise.
_FEW = 5 * 10**7
_TIMES_OTHERS = 8
# The part of the traced program's products, at least, that each device computes.
_ALL = 0.9
# XLA unrolls a loop on GPUs and TPUs so often at most; its analysis then counts the turns.
_UNROLLED = 4


def about_replicated(
    name: str,
    arrays: Arrays,
    count: int,
    returned: Arrays,
    find_names: Callable[[], Sequence[str]],
    find_program: Callable[[], tuple[jax.stages.Traced, jax.stages.Lowered]],
) -> bool:
    """Warns that all devices compute the same, in a program that a call of the function `name` has
    compiled. The first `count` of its arrays are arguments. Returns whether it did.
    """
    devices = max(map(devices_of, (*arrays, *returned)), default=1)
    if devices == 1:
        return False
    whole = _whole(arrays[:count], devices)
    if not whole:
        return False
    traced, lowered = find_program()
    flops = (lowered.compile().cost_analysis() or {}).get("flops", 0)
    # Counting takes longest, and most programs need not be counted to their end.
    at_most = flops / (2 * _ALL)
    if at_most < _FEW:
        return False
    work = products_in(traced.jaxpr, each_turn=False, at_most=at_most)
    if work is None or not _are_worth_dividing(work, devices):
        return False
    names, first = find_names(), arrays[whole[0]]
    parameter = re.split(r"[.\[]", names[whole[0]])[0]
    rule = f"mylib.rules.batch({_axis_for(arrays, first.shape[0])!r})"
    warn(
        f"{name}: all {devices} devices compute the same, as "
        f"{some([names[i] for i in whole])} {_state(first)}. Write "
        f"in_shardings={{{parameter!r}: {rule}}}, or place the batch before the call, by "
        f"mylib.filter_shard(batch, {rule}, mesh=mesh)",
        ReplicatedWarning,
    )
    return True


def _are_worth_dividing(work: Products, devices: int) -> bool:
    if work.products < max(_FEW, _TIMES_OTHERS * work.others):
        return False
    return not work.looped or devices > _UNROLLED or jax.default_backend() == "cpu"


def devices_of(value: object) -> int:
    if isinstance(value, Tracer) or not isinstance(value, jax.Array):
        return 1
    return value.sharding.num_devices


def _whole(arrays: Arrays, devices: int) -> list[int]:
    """The arguments that are not split, and could be: those that are not placed at all, if there
    are any, which are more likely to be a batch.
    """
    could_split = [
        i
        for i, array in enumerate(arrays)
        if any(n and n % devices == 0 for n in array.shape)
        and (not _is_placed(array) or array.sharding.is_fully_replicated)
    ]
    return [i for i in could_split if not _is_placed(arrays[i])] or could_split


def _is_placed(array: object) -> bool:
    return isinstance(array, jax.Array) and array.committed


def _state(array: object) -> str:
    if isinstance(array, jax.Array):
        return "is replicated on all devices" if array.committed else "is not placed"
    return "is a NumPy array, which is not placed"


def _axis_for(arrays: Arrays, rows: int) -> str:
    """An axis of the mesh that divides a number of rows."""
    meshes: list[Mesh | AbstractMesh] = [
        array.sharding.mesh
        for array in arrays
        if isinstance(array, jax.Array) and isinstance(array.sharding, NamedSharding)
    ]
    for mesh in (*meshes, current_world().mesh):
        for axis, size in mesh.shape.items():
            if size > 1 and rows % size == 0:
                return str(axis)
    return "data"

"""Warns of programs whose products are not divided: all devices compute the same."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from .._compat import names
from .._errors import ReplicatedWarning, warn
from .._placement import current_world
from .._products import Products, products_in
from .._programs import all_equations, line_of, scan_of
from .._text import some
from .._tree import Arrays

# Fewer products than these, about as many as a device computes while a small message is sent, are
# not worth dividing; nor are those of programs that compute as much otherwise.
_FEW = 5 * 10**7
_TIMES_OTHERS = 8
# The part of the traced program's products, at least, that each device computes.
_ALL = 0.9
# With a loop over sharded rows it is known why, so less is enough: its forward pass alone, in turns
# that compute less.
_LOOPED = 0.4
_TIMES_OTHERS_LOOPED = 2
# XLA unrolls a loop on GPUs and TPUs so often at most; its analysis then counts the turns.
_UNROLLED = 4


@dataclass(frozen=True)
class NewProgram:
    """A program that a call of the function `name` has compiled: the arrays that it was given, the
    first `count` of which are arguments, and those that it has returned.
    """

    name: str
    arrays: Arrays
    returned: Arrays
    find_names: Callable[[], Sequence[str]]
    count: int
    # Traced and lowered.
    find: Callable[[], tuple[Any, jax.stages.Lowered]]


def about_replicated(new: NewProgram) -> bool:
    """Warns that all devices compute the same. Returns whether it did."""
    arrays = new.arrays
    devices = max(map(devices_of, (*arrays, *new.returned)), default=1)
    if devices == 1:
        return False
    whole = _whole(arrays[: new.count], devices)
    rows = {x.shape[0]: i for i, x in enumerate(arrays[: new.count]) if _has_split_rows(x)}
    if not whole and not rows:
        return False
    traced, lowered = new.find()
    loop = _loop_over(traced.jaxpr, rows) if rows else None
    if loop is None and not whole:
        return False
    flops = (lowered.compile().cost_analysis() or {}).get("flops", 0)
    # Counting takes longest, and most programs need not be counted to their end.
    part = _ALL if loop is None else max(_LOOPED, min(_ALL, 2 / devices))
    at_most = flops / (2 * part)
    if at_most < _FEW:
        return False
    work = products_in(traced.jaxpr, each_turn=False, at_most=at_most)
    times = _TIMES_OTHERS if loop is None else _TIMES_OTHERS_LOOPED
    if work is None or not _are_worth_dividing(work, devices, times):
        return False
    names = new.find_names()
    if loop is None:
        text = _of_whole(arrays, [names[i] for i in whole], whole[0], devices)
    else:
        line, position = loop
        text = _of_loop(arrays[position], names[position], line, devices)
    warn(f"{new.name}: {text}", ReplicatedWarning)
    return True


def _of_whole(arrays: Arrays, leaves: Sequence[str], position: int, devices: int) -> str:
    parameter = re.split(r"[.\[]", leaves[0])[0]
    first = arrays[position]
    axis = _axis_for(arrays, first.shape[0])
    rule = f"mylib.rules.batch({axis!r})"
    return (
        f"all {devices} devices compute the same, as {some(leaves)} {_state(first)}. Write "
        f"in_shardings={{{parameter!r}: {rule}}}, or place the batch before the call, by "
        f"mylib.filter_shard(batch, {rule}, mesh=mesh)"
    )


def _of_loop(x: Any, name: str, line: str, devices: int) -> str:
    rows = f"P({_axis_for([x], 0)!r})"
    return (
        f"all {devices} devices run all iterations of the loop at {line}, as it goes over the "
        f"sharded rows of {name}, which XLA gathers first. Let each device "
        f"go over its own rows: call the loop (lax.map, lax.scan) in mylib.filter_shard_map(fun, "
        f"in_specs={rows}, out_specs={rows}), with P() for what isn't split by rows, or use "
        f"jax.vmap"
    )


def _has_split_rows(x: Any) -> bool:
    """Whether devices have different rows of an array."""
    if not isinstance(x, jax.Array) or not x.ndim or x.sharding.is_fully_replicated:
        return False
    return x.sharding.shard_shape(x.shape)[0] < x.shape[0]


def _loop_over(program: Any, rows: dict[int, int]) -> tuple[str, int] | None:
    """The line of a loop with products over as many rows as an argument has, one at a time or some
    (`batch_size` of `lax.map`), and the value in `rows` for that argument.
    """
    for eqn in all_equations(program):
        if eqn.primitive.name != names.SCAN:
            continue
        loop = scan_of(eqn, eqn.invars)
        shapes = [x.aval.shape for x in loop.slices]
        over = next((n for n in rows if any(_has_rows(shape, n) for shape in shapes)), None)
        if over is None:
            continue
        work = products_in(loop.body, each_turn=False)
        if work is not None and work.products:
            return line_of(eqn), rows[over]
    return None


def _has_rows(shape: Sequence[int], count: int) -> bool:
    # What is left over of a batch size is called after the loop.
    return shape[0] == count or (len(shape) > 1 and shape[0] == count // max(1, shape[1]))


def _are_worth_dividing(work: Products, devices: int, times: int) -> bool:
    if work.products < max(_FEW, times * work.others):
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
        return "is replicated on all devices" if x.committed else "is not placed"
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

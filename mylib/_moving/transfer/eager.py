"""Moves concrete arrays, each in one of the ways of `_WAYS`."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from ..._core.compat import Uncommitted, label_of, weakly_typed
from ..._core.placement import (
    Target,
    fill_free,
    has_partial_sums,
    memory_kind,
    sharding_of,
    without_partial_sums,
)
from ..._core.tree import Kind, canonical_dtype, is_of_keys
from .. import several
from . import thresholds
from .already_placed import wants_layout
from .host import (
    allow_transfers,
    as_keys,
    host_copy,
    on_host,
    over_key_data,
    worth_sharing,
)
from .relocation import Relocation, set_values


def move(rows: Sequence[Relocation], *, counted: bool = True) -> None:
    """Moves the arrays: the value of each row becomes the one at its target. `counted` is whether
    processes compare that they all move those that one program of several moves.
    """
    # Those of 64 bits, made under `jax.enable_x64`, while JAX makes only arrays of 32: without 64
    # bits, JAX moves the shards of such an array as 32 bits, but not its dtype.
    wide, others = [], []
    for row in rows:
        (wide if _is_wider_than_now(row) else others).append(row)
    if wide:
        with jax.enable_x64(True):
            _move(wide, counted)
    if others:
        _move(others, counted)


def _is_wider_than_now(row: Relocation) -> bool:
    return row.kind is Kind.DEVICE and canonical_dtype(row.value) != row.value.dtype


# Moves arrays that travel alike, all at once.
_Travel = Callable[[Sequence[Relocation]], None]


def _move(rows: Sequence[Relocation], counted: bool) -> None:
    by_way: dict[_Travel, list[Relocation]] = {way: [] for way in _WAYS}
    # What must be done to an array once it is on its devices.
    last: list[tuple[Relocation, Callable[[jax.Array], jax.Array]]] = []
    several_processes = jax.process_count() > 1
    for row in rows:
        array, target = row.value, row.target
        if isinstance(target, Uncommitted):
            if getattr(array, "is_fully_addressable", True):
                row.value = on_host(array, bool(row.alias))
                by_way[_put_by_default].append(row)
            continue
        row.known_as = array
        if row.kind is Kind.DEVICE and is_of_keys(array):
            row.value, row.target = jax.random.key_data(array), over_key_data(target, array.ndim)
            last.append((row, partial(_as_keys, like=array)))
        elif row.kind is Kind.DEVICE and has_partial_sums(array.sharding):
            row.value = _resharded(array, to=without_partial_sums(array.sharding))
        sharding = sharding_of(target)
        if isinstance(sharding, NamedSharding) and has_partial_sums(sharding):
            # Only programs make partial sums, or sum them up. `reshard` runs one for each leaf.
            row.target = without_partial_sums(sharding)
            last.append((row, partial(_resharded, to=sharding)))
        way = _way_between_processes(row) if several_processes else None
        way = way or _way_within_process(row)
        by_way[way].append(row)
        if isinstance(row.value, np.ndarray) and getattr(array, "weak_type", False):
            last.append((row, weakly_typed))  # NumPy has no weak types
        if way not in (_stay, _run_program) and wants_layout(row.target):
            by_way[_set_layouts].append(row)
    if counted and several_processes:
        several.count_moves(_crossings([*by_way[_put_one_by_one], *by_way[_run_program]]))
    for way, travellers in by_way.items():
        if travellers:
            if way is _set_layouts:
                jax.block_until_ready([row.value for row in rows])
            way(travellers)
    for row, step in last:
        row.value = step(row.value)


def _resharded(x: jax.Array, to: Sharding) -> jax.Array:
    return jax.block_until_ready(jax.sharding.reshard(x, to))


def _as_keys(data: jax.Array, like: jax.Array) -> jax.Array:
    """Keys with the label of their data."""
    keys, origin = as_keys(data, like), label_of(data)
    if origin:
        several.set_origin([keys], origin)
    return keys


def _way_between_processes(row: Relocation) -> _Travel | None:
    """None if its way is within this process, or a program of all its processes moves it."""
    array, destination = row.value, sharding_of(row.target)
    if row.kind is not Kind.DEVICE:
        return None
    if several.crosses(array, destination, always=row.across):
        row.target, row.alias = fill_free(row.target, array.sharding, array.ndim), False
        return _send
    if several.is_nowhere_here(array.sharding, destination):
        row.value = several.handle(array, fill_free(destination, None, array.ndim))
        return _stay
    return None


def _way_within_process(row: Relocation) -> _Travel:
    array, on_devices = row.value, row.kind is Kind.DEVICE
    row.target = fill_free(row.target, array.sharding if on_devices else None, array.ndim)
    destination = sharding_of(row.target)
    if not on_devices:
        row.value = host_copy(array, bool(row.alias) and worth_sharing(array, destination))
    elif _worth_staying(array, array.sharding, destination):
        same_order = _device_order(array.sharding) == _device_order(destination)
        return _run_program if same_order else _put_one_by_one
    elif array.is_fully_addressable and destination.is_fully_addressable:
        row.value = _private(row, array.sharding, destination)
    else:
        row.value = on_host(array, row.donate or bool(row.alias))
    is_here = destination.num_devices == 1 and destination.is_fully_addressable
    in_pieces = isinstance(row.value, np.ndarray) and not is_here
    return _put_in_pieces if in_pieces else _put_all


def _stay(rows: Sequence[Relocation]) -> None:
    """Neither its place nor its target is in this process."""


def _put_by_default(rows: Sequence[Relocation]) -> None:
    """Uncommitted, to JAX's default device."""
    set_values(rows, jax.device_put([row.value for row in rows]))


def _put_all(rows: Sequence[Relocation]) -> None:
    """A copy of each, by one call of `jax.device_put`."""
    where: Any = [sharding_of(row.target) for row in rows]
    if all(destination is where[0] for destination in where):
        # One sharding for all arrays costs less than a list of equal ones.
        where = where[0]
    set_values(rows, jax.device_put([row.value for row in rows], where))


def _put_in_pieces(rows: Sequence[Relocation]) -> None:
    """NumPy arrays, cut up for several devices (with several processes, for those of this one).
    `jax.make_array_from_callback` is cheaper than `device_put` here.
    """
    with allow_transfers():
        for row in rows:
            x, destination = row.value, sharding_of(row.target)
            row.value = jax.make_array_from_callback(x.shape, destination, x.__getitem__, x.dtype)


def _send(rows: Sequence[Relocation]) -> None:
    """Processes that hold them send them to those that are to hold them."""
    set_values(rows, several.move_across(_crossings(rows)))


def _crossings(rows: Sequence[Relocation]) -> list["several.Crossing"]:
    return [several.Crossing(row.value, sharding_of(row.target), row.known_as) for row in rows]


def _put_one_by_one(rows: Sequence[Relocation]) -> None:
    """To the same devices in another order: `jax.device_put` runs a program for each."""
    for row in rows:
        moved = jax.device_put(row.value, sharding_of(row.target), donate=row.donate)
        row.value = jax.block_until_ready(moved)


def _run_program(rows: Sequence[Relocation]) -> None:
    """A program for each group of arrays that are on the same devices and meshes, so that their
    shards don't pass through the host.
    """
    groups: dict[object, list[Relocation]] = {}
    for row in rows:
        array, source, destination = row.value, row.value.sharding, sharding_of(row.target)
        # Memory can be reused if both shards have the same shape.
        fits = source.shard_shape(array.shape) == destination.shard_shape(array.shape)
        row.donate = row.donate and fits and memory_kind(source) == memory_kind(destination)
        key = _device_order(source), _mesh_of(source), _mesh_of(destination)
        groups.setdefault(key, []).append(row)
    before: list[jax.Array] = []
    for group in groups.values():
        jax.block_until_ready(before)
        # Donated ones first.
        group.sort(key=lambda row: not row.donate)
        arrays, count = [row.value for row in group], sum(row.donate for row in group)
        program = _identity(tuple(row.target for row in group))
        before = program(arrays[:count], arrays[count:])
        set_values(group, before)


def _set_layouts(rows: Sequence[Relocation]) -> None:
    """After one of the others: only a program can set the layout of what is on its devices."""
    for row in rows:
        row.donate = not row.alias
    _run_program(rows)


# In this order, as only one program of a tree runs at a time: simulated devices can deadlock on
# several.
_WAYS = (
    _stay,
    _put_by_default,
    _put_all,
    _put_in_pieces,
    _send,
    _put_one_by_one,
    _run_program,
    _set_layouts,
)


def _device_order(sharding: Sharding) -> object:
    """The devices in the order of a program's device numbers."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return tuple(sharding.mesh.devices.flat)
    return frozenset(sharding.device_set)


def _mesh_of(sharding: Sharding) -> object:
    return sharding.mesh if isinstance(sharding, NamedSharding) else None


def _on_cpu(sharding: Sharding) -> bool:
    return all(device.platform == "cpu" for device in sharding.device_set)


def _worth_staying(array: jax.Array, source: Sharding, destination: Sharding) -> bool:
    """Whether a program should exchange the shards, rather than copies through the host."""
    if source.device_set != destination.device_set:
        return False
    if not source.is_fully_addressable:
        return True
    if source.num_devices == 1 or source.is_equivalent_to(destination, array.ndim):
        # If input and output have the same layout, a program may return the input's memory.
        return False
    if _on_cpu(source):
        return source.is_fully_replicated and array.nbytes >= thresholds.WORTH_CUTTING
    return array.nbytes >= thresholds.WORTH_COMPILING


def _private(row: Relocation, source: Sharding, destination: Sharding) -> jax.Array | np.ndarray:
    """A copy of the array whose memory `jax.device_put` may share; itself if sharing is allowed."""
    array = row.value
    one_to_many = source.num_devices == 1 and destination.num_devices > 1
    if _on_cpu(source) or (one_to_many and array.nbytes < thresholds.WORTH_COMPILING):
        return on_host(array, row.donate or bool(row.alias))
    if row.alias or not _may_share(array, source, destination):
        return array
    return jax.device_put(array, source, may_alias=False)


def _may_share(array: jax.Array, source: Sharding, destination: Sharding) -> bool:
    """Whether `jax.device_put` may reuse the memory: a device's shard stays the same."""
    return (
        not source.device_set.isdisjoint(destination.device_set)
        and source.shard_shape(array.shape) == destination.shard_shape(array.shape)
        and memory_kind(source) == memory_kind(destination)
    )


@lru_cache(maxsize=256)
def _identity(targets: tuple[Target, ...]) -> Any:
    def reshard(donated: list[jax.Array], lent: list[jax.Array]) -> list[jax.Array]:
        return [*donated, *lent]

    return jax.jit(reshard, out_shardings=list(targets), donate_argnums=0)

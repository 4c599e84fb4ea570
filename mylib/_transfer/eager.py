"""Moves concrete arrays in one of four ways:

- *put*: copies the arrays, then calls `jax.device_put` once for the whole tree.
- *pieces*: cuts up a NumPy array for several devices (with several processes, for those of this
    one). `jax.make_array_from_callback` is cheaper than `device_put` here.
- *reshard*: compiles one identity for the whole tree, for shards that should not pass through the
    host.
- *across*: processes that hold an array send it to those that are to hold it.

Only one program of a tree runs at a time: simulated devices can deadlock on several.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from .._compat import Uncommitted, weakly_typed
from .._links import (
    Crossing,
    count_moves,
    crosses,
    handle,
    is_nowhere_here,
    move_across,
    origin_of,
    set_origin,
)
from .._placement import (
    Target,
    fill_free,
    has_partial_sums,
    memory_kind,
    sharding_of,
    without_partial_sums,
)
from .._tree import Kind, canonical_dtype, is_of_keys
from . import thresholds
from .host import (
    allow_transfers,
    as_keys,
    from_host,
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
    # Those of 64 bits, made under `jax.enable_x64`, while JAX makes only arrays of 32.
    wide = [row for row in rows if _is_wider_than_now(row)]
    if not wide:
        _move(rows, counted)
        return
    # Without 64 bits, JAX moves the shards of such an array as 32 bits, but not its dtype.
    with jax.enable_x64(True):
        _move(wide, counted)
    of_64_bits = set(map(id, wide))
    _move([row for row in rows if id(row) not in of_64_bits], counted)


def _is_wider_than_now(row: Relocation) -> bool:
    return row.kind is Kind.DEVICE and canonical_dtype(row.value) != row.value.dtype


def _move(rows: Sequence[Relocation], counted: bool) -> None:
    work = _Journeys()
    # What must be done to an array once it is on its devices.
    last: list[tuple[Relocation, Callable[[Any], Any]]] = []
    several_processes = jax.process_count() > 1
    for row in rows:
        x, target = row.value, row.target
        if isinstance(target, Uncommitted):
            work.add_default(row)
            continue
        if row.kind is Kind.DEVICE and is_of_keys(x):
            row.value, row.target = jax.random.key_data(x), over_key_data(target, x.ndim)
            last.append((row, partial(_as_keys, like=x)))
        elif row.kind is Kind.DEVICE and has_partial_sums(x.sharding):
            row.value = _resharded(x, to=without_partial_sums(x.sharding))
        sharding = sharding_of(target)
        if isinstance(sharding, NamedSharding) and has_partial_sums(sharding):
            # Only programs make partial sums, or sum them up. `reshard` runs one for each leaf.
            row.target = without_partial_sums(sharding)
            last.append((row, partial(_resharded, to=sharding)))
        if several_processes and row.kind is Kind.DEVICE:
            work.add_of_several_processes(row, x, counted)
        else:
            work.add(row)
    work.carry_out(rows)
    for row, step in last:
        row.value = step(row.value)


def _resharded(x: jax.Array, to: Sharding) -> jax.Array:
    return jax.block_until_ready(jax.sharding.reshard(x, to))


def _as_keys(data: jax.Array, like: jax.Array) -> jax.Array:
    keys, origin = as_keys(data, like), origin_of(data)
    if origin:
        set_origin([keys], origin)
    return keys


class _Journeys:
    """The rows of one tree by the way they travel, so that each kind of work is done once."""

    def __init__(self) -> None:
        self.defaults: list[Relocation] = []
        self.puts: list[Relocation] = []
        self.pieces: list[Relocation] = []
        self.crossings: list[tuple[Relocation, Any]] = []
        self.one_by_one: list[Relocation] = []
        self.reshards: list[Relocation] = []
        self.layouts: list[Relocation] = []
        self.weak: list[Relocation] = []
        self.counted: list[Crossing] = []
        self.simple: dict[int, tuple[bool, Target]] = {}

    def add_default(self, row: Relocation) -> None:
        # An array that no process has as a whole stays where it is.
        if getattr(row.value, "is_fully_addressable", True):
            row.value = on_host(row.value, bool(row.alias))
            self.defaults.append(row)

    def add_of_several_processes(self, row: Relocation, known_as: Any, counted: bool) -> None:
        x, destination = row.value, sharding_of(row.target)
        if crosses(x, destination, always=row.across):
            row.target, row.alias = fill_free(row.target, x.sharding, x.ndim), False
            self.crossings.append((row, known_as))
            if _has_layout(row.target):
                self.layouts.append(row)
        elif is_nowhere_here(x.sharding, destination):
            row.value = handle(x, fill_free(destination, None, x.ndim))
        else:
            if counted and x.sharding.device_set == destination.device_set:
                filled = fill_free(destination, None, x.ndim)
                self.counted.append(Crossing(x, filled, known_as))
            self.add(row)

    def add(self, row: Relocation) -> None:
        x = row.value
        if row.kind is Kind.HOST:
            if self.is_simple(row.target):
                row.value = host_copy(x, bool(row.alias) and worth_sharing(x, row.target))
                self.add_put(row, row.target)
                return
            source, row.donate = None, False
        else:
            source = x.sharding
        row.target = fill_free(row.target, source, x.ndim)
        destination = sharding_of(row.target)
        if _has_layout(row.target):
            # A program sets the layout, once the array is on its devices.
            self.layouts.append(row)
        if source is None or not _worth_staying(x, source, destination):
            if destination.is_fully_addressable:
                row.value = _private(row, source, destination)
                self.add_put(row, destination)
            else:
                row.value = on_host(x, row.donate or bool(row.alias))
                self.pieces.append(row)
                if source is not None and x.weak_type:
                    self.weak.append(row)
        elif _device_order(source) == _device_order(destination):
            self.reshards.append(row)
        else:
            self.one_by_one.append(row)

    def is_simple(self, target: Target) -> bool:
        """Whether `jax.device_put` can take a target unchanged."""
        known = self.simple.get(id(target))
        if known is None:
            sharding = sharding_of(target)
            whole = not isinstance(target, Format) and fill_free(sharding, None, 0) is sharding
            # Keeps the target alive, because its id is the key.
            known = self.simple[id(target)] = whole and sharding.is_fully_addressable, target
        return known[0]

    def add_put(self, row: Relocation, destination: Sharding) -> None:
        in_pieces = isinstance(row.value, np.ndarray) and destination.num_devices > 1
        (self.pieces if in_pieces else self.puts).append(row)

    def carry_out(self, rows: Sequence[Relocation]) -> None:
        count_moves(self.counted)
        if self.defaults:
            set_values(self.defaults, jax.device_put([row.value for row in self.defaults]))
        if self.puts:
            where: Any = [sharding_of(row.target) for row in self.puts]
            if all(destination is where[0] for destination in where):
                # One sharding for all arrays costs less than a list of equal ones.
                where = where[0]
            set_values(self.puts, jax.device_put([row.value for row in self.puts], where))
        with allow_transfers():
            for row in self.pieces:
                x, destination = row.value, sharding_of(row.target)
                row.value = from_host(x.__getitem__, x.shape, destination, x.dtype)
        for row in self.weak:
            row.value = weakly_typed(row.value)
        if self.crossings:
            crossings = [
                Crossing(row.value, sharding_of(row.target), known_as)
                for row, known_as in self.crossings
            ]
            set_values([row for row, _ in self.crossings], move_across(crossings))
        for row in self.one_by_one:
            # `jax.device_put` runs a program for each.
            moved = jax.device_put(row.value, sharding_of(row.target), donate=row.donate)
            row.value = jax.block_until_ready(moved)
        _reshard(self.reshards, sharding_of)
        if self.layouts:
            jax.block_until_ready([row.value for row in rows])
            for row in self.layouts:
                row.donate = not row.alias
            _reshard(self.layouts, lambda target: target)


def _has_layout(target: Target) -> bool:
    return isinstance(target, Format) and target.layout is not None


def _reshard(rows: Sequence[Relocation], target_of: Callable[[Target], Target]) -> None:
    """Runs a program for each group of arrays with the same devices and meshes, of which a program
    has only one.
    """
    groups: dict[Any, list[Relocation]] = {}
    for row in rows:
        x, source, destination = row.value, row.value.sharding, sharding_of(row.target)
        # Memory can be reused if both shards have the same shape.
        fits = source.shard_shape(x.shape) == destination.shard_shape(x.shape)
        row.donate = row.donate and fits and memory_kind(source) == memory_kind(destination)
        key = _device_order(source), _mesh_of(source), _mesh_of(destination)
        groups.setdefault(key, []).append(row)
    before: list[jax.Array] = []
    for group in groups.values():
        jax.block_until_ready(before)
        # Donated ones first.
        group.sort(key=lambda row: not row.donate)
        arrays, count = [row.value for row in group], sum(row.donate for row in group)
        program = _identity(tuple(target_of(row.target) for row in group))
        before = program(arrays[:count], arrays[count:])
        set_values(group, before)


def _device_order(sharding: Sharding) -> Any:
    """The devices in the order of a program's device numbers."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return tuple(sharding.mesh.devices.flat)
    return frozenset(sharding.device_set)


def _mesh_of(sharding: Sharding) -> Any:
    return sharding.mesh if isinstance(sharding, NamedSharding) else None


def _on_cpu(sharding: Sharding) -> bool:
    return all(device.platform == "cpu" for device in sharding.device_set)


def _worth_staying(x: jax.Array, source: Sharding, destination: Sharding) -> bool:
    """Whether a program should exchange the shards, rather than copies through the host."""
    if source.device_set != destination.device_set:
        return False
    if not source.is_fully_addressable:
        return True
    if source.num_devices == 1 or source.is_equivalent_to(destination, x.ndim):
        # If input and output have the same layout, a program may return the input's memory.
        return False
    if _on_cpu(source):
        return source.is_fully_replicated and x.nbytes >= thresholds.WORTH_CUTTING
    return x.nbytes >= thresholds.WORTH_COMPILING


def _private(row: Relocation, source: Sharding | None, destination: Sharding) -> Any:
    """A copy of the array whose memory `jax.device_put` may share; itself if sharing is allowed."""
    x, shares = row.value, row.donate or bool(row.alias)
    if source is None or not source.is_fully_addressable:
        return on_host(x, shares)
    one_to_many = source.num_devices == 1 and destination.num_devices > 1
    if x.weak_type:
        # NumPy has no weak types. Copies the whole array to all devices first, since cutting it up
        # on one device compiles for its shape.
        if one_to_many and isinstance(destination, NamedSharding):
            copy = jax.device_put(x, source, may_alias=False)
            return jax.device_put(copy, NamedSharding(destination.mesh, PartitionSpec()))
    elif _on_cpu(source) or (one_to_many and x.nbytes < thresholds.WORTH_COMPILING):
        return on_host(x, shares)
    if row.alias or not _may_share(x, source, destination):
        return x
    return jax.device_put(x, source, may_alias=False)


def _may_share(x: jax.Array, source: Sharding, destination: Sharding) -> bool:
    """Whether `jax.device_put` may reuse the memory of `x`, because a device's shard stays the
    same.
    """
    return (
        not source.device_set.isdisjoint(destination.device_set)
        and source.shard_shape(x.shape) == destination.shard_shape(x.shape)
        and memory_kind(source) == memory_kind(destination)
    )


@lru_cache(maxsize=256)
def _identity(targets: tuple[Target, ...]) -> Any:
    def reshard(donated: list[jax.Array], lent: list[jax.Array]) -> list[jax.Array]:
        return [*donated, *lent]

    return jax.jit(reshard, out_shardings=list(targets), donate_argnums=0)

"""Moves concrete arrays in one of four ways:

- *put*: copies the arrays, then calls `jax.device_put` once for the whole tree.
- *pieces*: cuts up a NumPy array for several devices (with several processes, for those of this
    one). `jax.make_array_from_callback` is cheaper than `device_put` here.
- *reshard*: compiles one identity for the whole tree, for shards that should not pass through the
    host.
- *across*: processes that hold an array send it to those that are to hold it.

Only one program of a tree runs at a time: simulated devices can deadlock on several.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from .._compat import weakly_typed
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
    host_copy,
    on_host,
    over_key_data,
    put_pieces,
    worth_sharing,
)


class Relocation(NamedTuple):
    """One concrete array that is not at its target. If it is donated, its memory is reused if
    possible; the caller deletes it otherwise.
    """

    x: Any
    kind: Kind
    target: Target
    donate: bool = False
    may_alias: bool | None = None
    across: bool = False
    """Whether processes send and receive it, even if each could place a value of its own."""
    counted: bool = True
    """Whether processes compare that they all move it, if one program of several does so."""


def move(moves: Sequence[Relocation]) -> list[jax.Array]:
    """Moves the arrays to their targets."""
    on_devices = [i for i, m in enumerate(moves) if m.kind is Kind.DEVICE]
    # Those of 64 bits, made under `jax.enable_x64`, while JAX makes only arrays of 32.
    wide = {i for i in on_devices if canonical_dtype(moves[i].x) != moves[i].x.dtype}
    if not wide:
        return _move(moves)
    # Without 64 bits, JAX moves the shards of such an array as 32 bits, but not its dtype.
    with jax.enable_x64(True):
        of_64_bits = iter(_move([moves[i] for i in sorted(wide)]))
    of_32_bits = iter(_move([m for i, m in enumerate(moves) if i not in wide]))
    return [next(of_64_bits if i in wide else of_32_bits) for i in range(len(moves))]


def _move(moves: Sequence[Relocation]) -> list[jax.Array]:
    moved: list[Any] = [None] * len(moves)
    keys: list[int] = []
    partial: list[tuple[int, NamedSharding]] = []
    work = _Relocations()
    several_processes = jax.process_count() > 1
    for i, (x, kind, target, donate, may_alias, across, counted) in enumerate(moves):
        sharding = sharding_of(target)
        whole = x
        if kind is Kind.DEVICE and is_of_keys(x):
            keys.append(i)
            x, target = jax.random.key_data(x), over_key_data(target, x.ndim)
        elif kind is Kind.DEVICE and has_partial_sums(x.sharding):
            x = jax.block_until_ready(jax.sharding.reshard(x, without_partial_sums(x.sharding)))
        if isinstance(sharding, NamedSharding) and has_partial_sums(sharding):
            partial.append((i, sharding))
            target = without_partial_sums(sharding)
        destination = sharding_of(target)
        if not several_processes or kind is not Kind.DEVICE:
            work.add(i, x, kind, target, donate, bool(may_alias))
        elif across or crosses(x, destination):
            work.add_crossing(i, x, target, whole)
        elif is_nowhere_here(x.sharding, destination):
            work.elsewhere.append((i, handle(x, fill_free(destination, None, x.ndim))))
        else:
            if counted and x.sharding.device_set == destination.device_set:
                work.counted.append(Crossing(x, fill_free(destination, None, x.ndim), whole))
            work.add(i, x, kind, target, donate, bool(may_alias))
    for i, y in work.carry_out():
        moved[i] = y
    for i in keys:
        origin = origin_of(moved[i])
        moved[i] = as_keys(moved[i], moves[i].x)
        if origin:
            set_origin([moved[i]], origin)
    for i, sharding in partial:
        # Only programs make partial sums, or sum them up. `reshard` runs one for each leaf.
        moved[i] = jax.block_until_ready(jax.sharding.reshard(moved[i], sharding))
    return moved


class _Relocations:
    """The moves of one tree, grouped so that each kind of work is done once."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, np.ndarray, Sharding, bool]] = []
        self.puts: list[tuple[int, Any, Sharding]] = []
        self.targets: dict[int, tuple[Sharding, bool, Target]] = {}
        self.one_by_one: list[tuple[int, Any, Sharding, bool]] = []
        self.layouts: list[tuple[int, Format, bool]] = []
        self.reshards: _Groups = {}
        self.crossings: list[tuple[int, Crossing]] = []
        self.elsewhere: list[tuple[int, jax.Array]] = []
        self.counted: list[Crossing] = []

    def add_crossing(self, i: int, x: jax.Array, target: Target, known_as: Any) -> None:
        target = fill_free(target, x.sharding, x.ndim)
        self.crossings.append((i, Crossing(x, sharding_of(target), known_as)))
        if isinstance(target, Format) and target.layout is not None:
            self.layouts.append((i, target, True))

    def add(self, i: int, x: Any, kind: Kind, target: Target, donate: bool, alias: bool) -> None:
        destination, simple = self.read(target)
        if kind is Kind.HOST:
            if simple:
                self.add_put(i, host_copy(x, alias and worth_sharing(x, destination)), destination)
                return
            source, donate = None, False
        else:
            source = x.sharding
        target = fill_free(target, source, x.ndim)
        destination = sharding_of(target)
        if isinstance(target, Format) and target.layout is not None:
            # A program sets the layout, once the array is on its devices.
            self.layouts.append((i, target, not alias))
        if source is None or not _worth_staying(x, source, destination):
            if destination.is_fully_addressable:
                self.add_put(i, _private(x, source, destination, donate, alias), destination)
            else:
                weak = source is not None and x.weak_type
                self.pieces.append((i, on_host(x, donate or alias), destination, weak))
        elif _device_order(source) == _device_order(destination):
            _add_reshard(self.reshards, i, x, destination, donate)
        else:
            self.one_by_one.append((i, x, destination, donate))

    def read(self, target: Target) -> tuple[Sharding, bool]:
        """The sharding of a target, and whether `jax.device_put` can take it unchanged."""
        resolved = self.targets.get(id(target))
        if resolved is None:
            sharding = sharding_of(target)
            whole = not isinstance(target, Format) and fill_free(sharding, None, 0) is sharding
            # Keeps the target alive, because its id is the key.
            resolved = sharding, whole and sharding.is_fully_addressable, target
            self.targets[id(target)] = resolved
        return resolved[:2]

    def add_put(self, i: int, private: Any, destination: Sharding) -> None:
        if isinstance(private, np.ndarray) and destination.num_devices > 1:
            self.pieces.append((i, private, destination, False))
        else:
            self.puts.append((i, private, destination))

    def carry_out(self) -> list[tuple[int, jax.Array]]:
        count_moves(self.counted)
        done = list(self.elsewhere)
        if self.puts:
            index, private, where = map(list, zip(*self.puts, strict=True))
            if all(destination is where[0] for destination in where):
                # One sharding for all arrays costs less than a list of equal ones.
                where = where[0]
            done += zip(index, jax.device_put(private, where), strict=True)
        with allow_transfers():
            for i, private, destination, weak in self.pieces:
                y = put_pieces(private.__getitem__, private.shape, destination, private.dtype)
                done.append((i, weakly_typed(y) if weak else y))
        if self.crossings:
            index, crossings = zip(*self.crossings, strict=True)
            done += zip(index, move_across(crossings), strict=True)
        for i, x, destination, donate in self.one_by_one:
            # `jax.device_put` runs a program for each.
            done.append((i, jax.block_until_ready(jax.device_put(x, destination, donate=donate))))
        done += _reshard_groups(self.reshards)
        if self.layouts:
            arrays = dict(done)
            jax.block_until_ready(list(arrays.values()))
            groups: _Groups = {}
            for i, target, ours in self.layouts:
                _add_reshard(groups, i, arrays[i], target, ours)
            done += _reshard_groups(groups)
        return done


# Grouped by devices and mesh: a program has only one of each.
_Groups = dict[Any, list[tuple[int, jax.Array, Target, bool]]]


def _add_reshard(groups: _Groups, i: int, x: jax.Array, target: Target, donate: bool) -> None:
    source, destination = x.sharding, sharding_of(target)
    key = _device_order(source), _mesh_of(source), _mesh_of(destination)
    # Memory can be reused if both shards have the same shape.
    fits = source.shard_shape(x.shape) == destination.shard_shape(x.shape)
    fits = fits and memory_kind(source) == memory_kind(destination)
    groups.setdefault(key, []).append((i, x, target, donate and fits))


def _reshard_groups(groups: _Groups) -> list[tuple[int, jax.Array]]:
    done: list[tuple[int, jax.Array]] = []
    for leaves in groups.values():
        jax.block_until_ready([y for _, y in done])
        # Donated ones first.
        ordered = sorted(leaves, key=lambda leaf: not leaf[3])
        index, arrays, targets, donate = zip(*ordered, strict=True)
        count = sum(map(bool, donate))
        moved = _identity(targets)(list(arrays[:count]), list(arrays[count:]))
        done += zip(index, moved, strict=True)
    return done


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


def _private(
    x: Any, source: Sharding | None, destination: Sharding, donate: bool, alias: bool
) -> Any:
    """A copy of `x` whose memory `jax.device_put` may share; `x` itself if sharing is allowed."""
    if source is None or not source.is_fully_addressable:
        return on_host(x, donate or alias)
    one_to_many = source.num_devices == 1 and destination.num_devices > 1
    if x.weak_type:
        # NumPy has no weak types. Copies the whole array to all devices first, since cutting it up
        # on one device compiles for its shape.
        if one_to_many and isinstance(destination, NamedSharding):
            copy = jax.device_put(x, source, may_alias=False)
            return jax.device_put(copy, NamedSharding(destination.mesh, PartitionSpec()))
    elif _on_cpu(source) or (one_to_many and x.nbytes < thresholds.WORTH_COMPILING):
        return on_host(x, donate or alias)
    if alias or not _may_share(x, source, destination):
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

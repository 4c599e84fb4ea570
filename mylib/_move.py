"""The eager transports: keep, put, reshard, and put across processes.

Which one a leaf takes was chosen by measuring on CPU (`benchmarks/placement.py`,
docs/benchmarks.md); the thresholds for accelerators are estimates:

- *keep*: the leaf is already there; the same object comes back.
- *put*: a private copy of the leaf, then one batched `jax.device_put` for the whole tree. From CPU
  memory the copy is a NumPy one, which compiles nothing: `device_put` itself compiles a slice for
  every distinct shape that it takes from one device to a mesh, and shares memory with what it is
  given, so that donating its result can delete its source.
- *pieces*: a NumPy array cut up for several devices, those of this process if there are others.
  `jax.make_array_from_callback` does it for less than `device_put`.
- *reshard*: one compiled identity for the whole tree, for shards that should not visit the host.

Never more than one program of a tree is in flight: simulated devices can deadlock on several.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
)

from ._leaves import Kind, canonical_dtype, kind_of
from ._target import (
    Target,
    axis_names,
    entries_of,
    fill_free,
    memory_kind,
    sharding_of,
    spec_over,
    with_entries,
)

# A buffer that starts on such a boundary is taken over by XLA's CPU client without a second copy.
_ALIGNMENT = 64
# Below this, XLA takes longer over memory that is not on such a boundary than a copy onto one does.
_WORTH_SHARING = 32 * 1024
# Below this, arrays on accelerators go through the host, where no shape compiles anything.
_WORTH_COMPILING = 1024 * 1024
# Above this, CPU devices that have a whole copy each cut their shards out of it by a program.
_WORTH_CUTTING = 16 * 1024 * 1024


def not_there(
    arrays: Sequence[Any], kinds: Sequence[Kind], targets: Sequence[Any], index: Sequence[int]
) -> list[int]:
    """Which of the arrays at `index` have to be moved to be at their targets."""
    # For the length of this call, which pairs of shardings agree: leaves mostly share a few. The
    # shardings are kept beside the answers, so that no other can come to have their identity.
    known: dict[tuple[int, int, int], tuple[bool, Any]] = {}
    moving: list[int] = []
    for i in index:
        x, target = arrays[i], targets[i]
        if kinds[i] is Kind.DEVICE and x.committed:
            here = x.sharding
            key = id(here), id(target), len(x.shape)
            answer = known.get(key)
            if answer is None:
                answer = known[key] = _agree(here, sharding_of(target), x.ndim), here
            if answer[0] and _has_layout(x, target):
                continue
        moving.append(i)
    return moving


def move(
    arrays: Sequence[Any],
    kinds: Sequence[Kind],
    targets: Sequence[Target],
    donate: Sequence[bool],
    may_alias: Sequence[bool | None],
) -> list[jax.Array]:
    """Concrete arrays that are not at their targets, brought there. Those to donate are used up
    where that saves memory; it is for the caller to delete what is left of them.
    """
    moved: list[Any] = list(arrays)
    keys: list[int] = []
    plan = _Plan()
    for i, (x, target) in enumerate(zip(arrays, targets, strict=True)):
        if kinds[i] is Kind.DEVICE and is_of_keys(x):
            keys.append(i)
            x, target = jax.random.key_data(x), _over_key_data(target, x.ndim)
        plan.add(i, x, kinds[i], target, donate[i], bool(may_alias[i]))
    for i, y in plan.carry_out():
        moved[i] = y
    for i in keys:
        moved[i] = _as_keys(moved[i], arrays[i])
    return moved


def _as_keys(data: jax.Array, like: jax.Array) -> jax.Array:
    keys = jax.random.wrap_key_data(data, impl=jax.random.key_impl(like))
    here = keys.sharding
    if isinstance(here, NamedSharding) and len(here.spec) > keys.ndim:
        # On a mesh of one device, jax 0.10 leaves the keys with the spec of their data.
        spec = with_entries(here.spec, entries_of(here.spec)[: keys.ndim])
        keys = jax.device_put(keys, here.update(spec=spec))
    return keys


def to_default_device(arrays: Sequence[Any], may_alias: Sequence[bool | None]) -> list[Any]:
    """NumPy arrays on JAX's default device, uncommitted; all others as they are."""
    placed = list(arrays)
    hosts = [i for i, x in enumerate(arrays) if kind_of(x) is Kind.HOST]
    own = [_on_host(arrays[i], bool(may_alias[i])) for i in hosts]
    for i, y in zip(hosts, jax.device_put(own), strict=True):
        placed[i] = y
    return placed


def uncommitted(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The same values on the default device, for JAX to move as it likes; where they are, if no
    process has them whole.
    """
    whole = [x for x in arrays if x.is_fully_addressable]
    own = iter(jax.device_put([_on_host(x, share=False) for x in whole]))
    return [next(own) if x.is_fully_addressable else x for x in arrays]


def _has_layout(x: Any, target: Target) -> bool:
    if not isinstance(target, Format) or not isinstance(target.layout, Layout):
        return True
    here, wanted = x.format.layout, target.layout
    if here is None or here.major_to_minor != wanted.major_to_minor:
        return False
    return wanted.tiling is None or here.tiling == wanted.tiling


def _agree(here: Sharding, wanted: Sharding, ndim: int) -> bool:
    if isinstance(here, NamedSharding) or isinstance(wanted, NamedSharding):
        # Equivalence forgets names and types of axes, and arrays that differ in them don't mix.
        if not (isinstance(here, NamedSharding) and isinstance(wanted, NamedSharding)):
            return False
        if here.mesh != wanted.mesh:
            return False
        wanted = fill_free(wanted, here, ndim)
        if AxisType.Explicit in wanted.mesh.axis_types and not _same_type(here, wanted, ndim):
            return False
    return memory_kind(here) == memory_kind(wanted) and here.is_equivalent_to(wanted, ndim)


def _same_type(here: NamedSharding, wanted: NamedSharding, ndim: int) -> bool:
    # Explicit axes are part of an array's type, also those of size 1, which split nothing.
    def signature(sharding: NamedSharding) -> Any:
        spec = sharding.spec
        entries = map(axis_names, spec_over(wanted.mesh, sharding, ndim))
        return list(entries), spec.unreduced, spec.reduced

    return signature(here) == signature(wanted)


def _over_key_data(target: Target, ndim: int) -> Target:
    """A target for keys, spelt for the integers that they are made of, whose extra dimension stays
    whole.
    """
    if isinstance(target, Format):
        return _over_key_data(sharding_of(target), ndim)
    if not isinstance(target, NamedSharding):
        return target
    entries = [*entries_of(target.spec), *[None] * (ndim + 1 - len(target.spec))]
    return target.update(spec=with_entries(target.spec, entries))


class _Plan:
    """What is to be done for the leaves of one tree, gathered so that each kind of work is done
    once for all of them.
    """

    def __init__(self) -> None:
        self.pieces: list[tuple[int, np.ndarray, Sharding]] = []
        self.put_index: list[int] = []
        self.put_own: list[Any] = []
        self.put_where: list[Sharding] = []
        self.targets: dict[int, tuple[Sharding, bool, Target]] = {}
        self.one_by_one: list[tuple[int, Any, Sharding, bool]] = []
        self.layouts: list[tuple[int, Format, bool]] = []
        self.reshards: _Groups = {}

    def add(self, i: int, x: Any, kind: Kind, target: Target, donate: bool, alias: bool) -> None:
        wanted, simple = self.read(target)
        if kind is Kind.HOST:
            if simple:
                self.add_put(i, _host_copy(x, alias and _worth_sharing(x, wanted)), wanted)
                return
            here, donate = None, False
        else:
            here = x.sharding
        target = fill_free(target, here, x.ndim)
        wanted = sharding_of(target)
        if isinstance(target, Format) and target.layout is not None:
            # A layout is given by a program, to what is on its devices already.
            self.layouts.append((i, target, not alias))
        if _has_partial_sums(here) or _has_partial_sums(wanted):
            self.one_by_one.append((i, x, wanted, False))
        elif here is None or not _worth_staying(x, here, wanted):
            if wanted.is_fully_addressable:
                self.add_put(i, _private(x, here, wanted, donate, alias), wanted)
            else:
                self.pieces.append((i, _on_host(x, donate or alias), wanted))
        elif _device_order(here) == _device_order(wanted):
            _add_reshard(self.reshards, i, x, wanted, donate)
        else:
            self.one_by_one.append((i, x, wanted, donate))

    def read(self, target: Target) -> tuple[Sharding, bool]:
        """The sharding of a target, and whether `jax.device_put` serves it as it stands."""
        known = self.targets.get(id(target))
        if known is None:
            wanted = sharding_of(target)
            whole = not isinstance(target, Format) and fill_free(wanted, None, 0) is wanted
            # With the target itself, so that no other can come to have its identity.
            known = wanted, whole and wanted.is_fully_addressable, target
            self.targets[id(target)] = known
        return known[:2]

    def add_put(self, i: int, own: Any, wanted: Sharding) -> None:
        if isinstance(own, np.ndarray) and wanted.num_devices > 1:
            self.pieces.append((i, own, wanted))
            return
        self.put_index.append(i)
        self.put_own.append(own)
        self.put_where.append(wanted)

    def carry_out(self) -> list[tuple[int, jax.Array]]:
        done: list[tuple[int, jax.Array]] = []
        if self.put_own:
            # One sharding for all costs less than the same one for each.
            first = self.put_where[0]
            where = first if all(w is first for w in self.put_where) else self.put_where
            done += zip(self.put_index, jax.device_put(self.put_own, where), strict=True)
        with _explicitly():
            for i, own, wanted in self.pieces:
                done.append((i, _put_pieces(own.__getitem__, own.shape, wanted, own.dtype)))
        for i, x, wanted, donate in self.one_by_one:
            # `jax.device_put` launches a program for each.
            done.append((i, jax.block_until_ready(jax.device_put(x, wanted, donate=donate))))
        done += _reshard_groups(self.reshards)
        if self.layouts:
            arrays = dict(done)
            jax.block_until_ready(list(arrays.values()))
            groups: _Groups = {}
            for i, target, ours in self.layouts:
                _add_reshard(groups, i, arrays[i], target, ours)
            done += _reshard_groups(groups)
        return done


# One program runs on one set of devices, and knows one mesh.
_Groups = dict[Any, list[tuple[int, jax.Array, Target, bool]]]


def _add_reshard(groups: _Groups, i: int, x: jax.Array, target: Target, donate: bool) -> None:
    here, wanted = x.sharding, sharding_of(target)
    key = _device_order(here), _mesh_of(here), _mesh_of(wanted)
    # Memory can be used again by what has the same share of it.
    fits = here.shard_shape(x.shape) == wanted.shard_shape(x.shape)
    fits = fits and memory_kind(here) == memory_kind(wanted)
    groups.setdefault(key, []).append((i, x, target, donate and fits))


def _reshard_groups(groups: _Groups) -> list[tuple[int, jax.Array]]:
    done: list[tuple[int, jax.Array]] = []
    for leaves in groups.values():
        jax.block_until_ready([y for _, y in done])
        done += _reshard(leaves)
    return done


def _has_partial_sums(sharding: Sharding | None) -> bool:
    if not isinstance(sharding, NamedSharding):
        return False
    return bool(sharding.spec.unreduced or sharding.spec.reduced)


def _device_order(sharding: Sharding) -> Any:
    """The devices in the order in which a program numbers them."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return tuple(sharding.mesh.devices.flat)
    return frozenset(sharding.device_set)


def _mesh_of(sharding: Sharding) -> Any:
    return sharding.mesh if isinstance(sharding, NamedSharding) else None


def _on_cpu(sharding: Sharding) -> bool:
    return all(device.platform == "cpu" for device in sharding.device_set)


def _worth_staying(x: jax.Array, here: Sharding, wanted: Sharding) -> bool:
    """Whether shards are better exchanged by a program than by way of the host."""
    if here.device_set != wanted.device_set:
        return False
    if not here.is_fully_addressable:
        return True
    if here.num_devices == 1 or here.is_equivalent_to(wanted, x.ndim):
        # A program whose output lies as its input does may hand the input's own memory back.
        return False
    if _on_cpu(here):
        return here.is_fully_replicated and x.nbytes >= _WORTH_CUTTING
    return x.nbytes >= _WORTH_COMPILING


def _private(x: Any, here: Sharding | None, wanted: Sharding, donate: bool, alias: bool) -> Any:
    """`x` as something that `jax.device_put` may share memory with, since nobody else has it;
    `x` itself if it may be shared with.
    """
    if here is None or not here.is_fully_addressable:
        return _on_host(x, donate or alias)
    one_to_many = here.num_devices == 1 and wanted.num_devices > 1
    if x.weak_type or canonical_dtype(x) != x.dtype:
        # NumPy has no weak types, and would take 64 bits for a mistake. Whole copies on all devices
        # first, since cutting up the array where it is compiles for its shape.
        if one_to_many and isinstance(wanted, NamedSharding):
            return _replicas(x, wanted.mesh)
    elif _on_cpu(here) or (one_to_many and x.nbytes < _WORTH_COMPILING):
        return _on_host(x, donate or alias)
    if alias or not _may_share(x, here, wanted):
        return x
    return jax.device_put(x, here, may_alias=False)


def _replicas(x: jax.Array, mesh: Any) -> jax.Array:
    own = jax.device_put(x, x.sharding, may_alias=False)
    return jax.device_put(own, NamedSharding(mesh, PartitionSpec()))


def _may_share(x: jax.Array, here: Sharding, wanted: Sharding) -> bool:
    """Whether `jax.device_put` may hand memory of `x` on, a device's share being what it was."""
    return (
        not here.device_set.isdisjoint(wanted.device_set)
        and here.shard_shape(x.shape) == wanted.shard_shape(x.shape)
        and memory_kind(here) == memory_kind(wanted)
    )


def _worth_sharing(x: Any, wanted: Sharding) -> bool:
    if x.nbytes < _WORTH_SHARING:
        return False
    # On a boundary all replicas share one buffer. Off it XLA makes a copy for each.
    replicas = wanted.is_fully_replicated and wanted.num_devices > 1
    return not replicas or x.ctypes.data % _ALIGNMENT == 0


def _on_host(x: Any, share: bool) -> np.ndarray:
    """The whole of `x` in host memory: a copy that is ours alone, or, if sharing is allowed, the
    memory that it is in.
    """
    if isinstance(x, jax.Array):
        shards = x.addressable_shards
        if x.is_fully_replicated:
            shards = shards[:1]
        if len(shards) > 1:
            return _assemble(x, shards)
        x = jax.device_get(shards[0].data)
    return _host_copy(x, share)


def _host_copy(x: Any, share: bool) -> np.ndarray:
    if share and isinstance(x, np.ndarray):
        return x
    copy = _empty(x.shape, canonical_dtype(x))
    copy[...] = x
    return copy


def _assemble(x: jax.Array, shards: Sequence[Any]) -> np.ndarray:
    whole = _empty(x.shape, np.dtype(x.dtype))
    first = [shard for shard in shards if shard.replica_id == 0]
    for shard, part in zip(first, jax.device_get([shard.data for shard in first]), strict=True):
        whole[shard.index] = part
    return whole


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    memory = np.empty(math.prod(shape) * dtype.itemsize + _ALIGNMENT, np.uint8)
    start = -memory.__array_interface__["data"][0] % _ALIGNMENT
    return np.ndarray(shape, dtype, memory, start)


class Part(NamedTuple):
    """What this process has of an array of a certain shape, and what of that is at an index of the
    whole.
    """

    own: Any
    shape: tuple[int, ...]
    wanted: Sharding
    within: Callable[[Any], Any]


def assemble(parts: Sequence[Part], may_alias: bool) -> list[jax.Array]:
    """Arrays that may reach beyond this process, from the part of each that this process has."""
    with _explicitly():
        return [_assemble_part(*part, may_alias) for part in parts]


def _assemble_part(
    own: Any,
    shape: tuple[int, ...],
    wanted: Sharding,
    within: Callable[[Any], Any],
    may_alias: bool,
) -> jax.Array:
    numbers = own
    if is_of_keys(own):
        numbers = jax.random.key_data(own)
        wanted = sharding_of(_over_key_data(wanted, len(shape)))
        shape += numbers.shape[len(shape) :]
    numbers = _on_host(numbers, may_alias)
    y = _put_pieces(lambda index: numbers[within(index)], shape, wanted, numbers.dtype)
    return _as_keys(y, own) if is_of_keys(own) else y


def is_of_keys(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _explicitly() -> AbstractContextManager[None]:
    """For transfers that were asked for, as those of `jax.device_put` are: `jax.transfer_guard` may
    forbid only what happens by the way.
    """
    guard = jax.config.jax_transfer_guard_host_to_device  # pyright: ignore[reportAttributeAccessIssue]
    by_the_way_only = guard in ("disallow", "log")
    return jax.transfer_guard_host_to_device("allow") if by_the_way_only else nullcontext()


def _put_pieces(
    piece: Callable[[Any], Any], shape: tuple[int, ...], wanted: Sharding, dtype: Any
) -> jax.Array:
    """An array on several devices, perhaps of several processes, from NumPy arrays.

    Every process puts the shards of its own devices; none asks another anything, so nothing here
    finds out whether the values agree.
    """
    # A process that has no device of the target can't tell the dtype by its shards.
    return jax.make_array_from_callback(shape, wanted, piece, dtype=dtype)


def _reshard(
    leaves: Sequence[tuple[int, jax.Array, Target, bool]],
) -> list[tuple[int, jax.Array]]:
    index, arrays, targets, donate = zip(*leaves, strict=True)
    given = [x for x, gone in zip(arrays, donate, strict=True) if gone]
    lent = [x for x, gone in zip(arrays, donate, strict=True) if not gone]
    order = [i for i, gone in zip(index, donate, strict=True) if gone]
    order += [i for i, gone in zip(index, donate, strict=True) if not gone]
    wanted = dict(zip(index, targets, strict=True))
    program = _identity(tuple(wanted[i] for i in order))
    return list(zip(order, program(given, lent), strict=True))


@lru_cache(maxsize=256)
def _identity(targets: tuple[Target, ...]) -> Any:
    def reshard(given: list[jax.Array], lent: list[jax.Array]) -> list[jax.Array]:
        return [*given, *lent]

    return jax.jit(reshard, out_shardings=list(targets), donate_argnums=0)

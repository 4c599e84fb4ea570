"""`check_replicas`: whether copies that should be equal are."""

import functools
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import PyTree

from .._compat import data_of_shards
from .._errors import Fault, ReplicaError
from .._placement import entries_of, memory_space
from .._tree import Kind, Leaves, name_of, split
from .agreement import described, owners
from .meeting import Facts, Processes, all_agree, gather, meeting, named

# Parts of up to this many bytes are read by the host. The program that computes checksums on
# devices is compiled once for each shape, and small arrays have many shapes, large ones few.
_SMALL = 2**16

_MEND = "make it from the same numbers in every process, or place the values of one of them again"
_MEND_TREE = "give all processes the same tree, with its arrays at the same places"

# The ids of this process's devices that hold copies of a part, by the copies' checksums.
Held = dict[str, list[int]]


def check_replicas(tree: PyTree[Any], /) -> None:
    """Raises unless all copies of all arrays are equal, to the bit.

    An array that is replicated, or sharded over some axes of a mesh only, has copies on several
    devices. Nothing in JAX keeps them equal if several processes made them, or under
    `check_vma=False`: it believes what it is told. Here each process compares the copies on its own
    devices, and then the processes compare checksums on the host. No program with a collective is
    run.

    **Arguments:**

    - `tree`: any PyTree. What isn't an array on devices, or has no copies, is passed over. Arrays
        in host memory are checked, too. An array that is unreduced over a mesh axis has no copies
        along that axis, but terms of a sum; its copies along other axes are compared. Where several
        processes have devices of its arrays, all must call this.

    **Returns:**

    Nothing.

    **Raises:**

    [`mylib.ReplicaError`][], on every process, naming every array whose copies differ, and which
    devices and processes hold which; and every array over several processes that one of them does
    not have, or has with another shape, dtype or sharding. `TimeoutError`, if a process does not
    come to compare.

    !!! Example

        ```python
        mesh = jax.make_mesh((8,), ("data",))
        model = eqx.nn.MLP(4, 2, 32, 1, key=jax.random.key(0))
        mylib.check_replicas(mylib.filter_shard(model, P(), mesh=mesh))
        ```
    """
    found = _found(split(tree))
    differ = any(len(held) > 1 for x in found.values() for held in x.held.values())
    groups = [x.owners for x in found.values() if len(x.owners) > 1]
    everybody = tuple(sorted({index for group in groups for index in group}))
    if not everybody:
        if differ:
            raise ReplicaError(list(_faults({jax.process_index(): found})))
        return
    if all_agree(meeting("check_replicas", everybody), differ, _facts(found)):
        return
    said = gather("check_replicas", {name: x.as_json() for name, x in found.items()}, everybody)
    everything = [{name: _Found.of(x) for name, x in one.items()} for one in said]
    raise ReplicaError(list(_faults(dict(zip(everybody, everything, strict=True)))))


@dataclass
class _Found:
    """What one process knows of an array: its parts that have copies, by number."""

    dtype: str
    shape: tuple[int, ...]
    request: str
    place: str
    owners: Processes
    held: dict[int, Held]
    # The processes that hold each part.
    holders: Mapping[int, Processes]

    @property
    def what(self) -> str:
        return f"{self.dtype}{list(self.shape)} as {self.place}"

    def as_json(self) -> list[Any]:
        held = list(self.held.items())
        return [self.dtype, self.shape, self.request, self.place, self.owners, held]

    @classmethod
    def of(cls, said: list[Any]) -> "_Found":
        dtype, shape, request, place, owners, held = said
        return cls(dtype, tuple(shape), request, place, tuple(owners), dict(held), {})


def _found(leaves: Leaves) -> dict[str, _Found]:
    """The arrays of which this process has a part, by name."""
    arrays = dict(_arrays(leaves))
    copies = {name: _copies(x.sharding, tuple(x.shape)) for name, x in arrays.items()}
    # All transfers are started before the first is waited for.
    to_read = {name: _to_read(x) for name, x in arrays.items() if copies[name].part_on}
    found: dict[str, _Found] = {}
    devices: dict[Sharding, list[int]] = {}
    for name, x in arrays.items():
        by_part: dict[int, list[tuple[int, jax.Array]]] = {}
        for device, data in _shards(to_read[name], devices) if name in to_read else ():
            part = copies[name].part_on.get(device)
            if part is not None:
                by_part.setdefault(part, []).append((device, data))
        found[name] = _Found(
            dtype=_dtype_name(x.dtype),
            shape=tuple(x.shape),
            request=_request(x.sharding),
            place=described(x.sharding),
            owners=owners(x.sharding),
            held={part: _compared(data) for part, data in by_part.items()},
            holders=copies[name].holders,
        )
    return found


def _shards(x: jax.Array, devices: dict[Sharding, list[int]]) -> Iterator[tuple[int, jax.Array]]:
    """What each device holds of an array, by the device's id. `devices` are known from others."""
    if x.sharding not in devices:
        devices[x.sharding] = [shard.device.id for shard in x.addressable_shards]
    return zip(devices[x.sharding], data_of_shards(x), strict=True)


def _arrays(leaves: Leaves) -> Iterator[tuple[str, jax.Array]]:
    times: Counter[str] = Counter()
    for x, kind, path in zip(leaves.arrays, leaves.kinds, leaves.paths, strict=True):
        if kind is Kind.TRACED:
            raise TypeError(
                f"check_replicas: {name_of(path)} is traced. Values can be compared "
                "when they are there: call it outside of jax.jit"
            )
        if kind is Kind.DEVICE and jax.process_index() in owners(x.sharding):
            # Keys of different types can have the same text.
            name = name_of(path)
            times[name] += 1
            yield name if times[name] == 1 else f"{name} ({times[name]})", x


@dataclass(frozen=True)
class _Copies:
    """The parts of an array that several devices hold, by number: which of them each of this
    process's devices holds, and the processes that hold them.
    """

    part_on: Mapping[int, int]
    holders: Mapping[int, Processes]


@functools.lru_cache(maxsize=4096)
def _copies(sharding: Sharding, shape: tuple[int, ...]) -> _Copies:
    parts: dict[Any, list[Any]] = {}
    # Numbered in the same way in all processes.
    for device, part in sorted(_parts(sharding, shape).items(), key=lambda item: item[0].id):
        parts.setdefault(part, []).append(device)
    part_on: dict[int, int] = {}
    holders: dict[int, Processes] = {}
    for number, devices in enumerate(parts.values()):
        own = [device.id for device in devices if device.process_index == jax.process_index()]
        if len(devices) > 1 and own:
            part_on |= dict.fromkeys(own, number)
            holders[number] = tuple(sorted({device.process_index for device in devices}))
    return _Copies(part_on, holders)


def _parts(sharding: Sharding, shape: tuple[int, ...]) -> dict[Any, Any]:
    """For each device what it holds of an array; equal for those that hold copies."""
    terms: dict[Any, Any] = {}
    if isinstance(sharding, NamedSharding) and sharding.spec.unreduced:
        # Along an unreduced axis each device holds another term of the sum, at the same indices.
        mesh, spec = sharding.mesh, sharding.spec
        along = [i for i, name in enumerate(mesh.axis_names) if name in spec.unreduced]
        for position, device in np.ndenumerate(mesh.devices):
            terms[device] = tuple(position[i] for i in along)
        sharding = sharding.update(spec=PartitionSpec(*entries_of(spec)))
    where = sharding.devices_indices_map(shape)
    return {
        device: (terms.get(device), *((s.start, s.stop) for s in index or ()))
        for device, index in where.items()
    }


@functools.lru_cache(maxsize=1024)
def _request(sharding: Sharding) -> str:
    return str(sharding.spec) if isinstance(sharding, NamedSharding) else str(sharding)


# NumPy takes as long for a name as a comparison of small arrays takes.
_dtype_name = functools.lru_cache(maxsize=64)(str)


@functools.lru_cache(maxsize=1024)
def _on_host(sharding: Sharding) -> bool:
    in_host_memory = memory_space(sharding) == jax.memory.Space.Host
    return in_host_memory or next(iter(sharding.device_set)).platform == "cpu"


def _to_read(x: jax.Array) -> jax.Array:
    """What the host reads to compare the copies of an array: the array, or the checksums of large
    parts in the devices' own memory.
    """
    x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    if not _on_host(x.sharding):
        x = checksums(x) if x.addressable_data(0).nbytes > _SMALL else x
        for shard in x.addressable_shards:
            shard.data.copy_to_host_async()
    return x


def _compared(copies: Iterable[tuple[int, jax.Array]]) -> Held:
    """Copies by their checksums. One is computed for all copies that are equal."""
    different: list[tuple[bytes | np.ndarray, list[int]]] = []
    for device, data in copies:
        bits = _bits(data)
        for other, ids in different:
            if bits == other if isinstance(bits, bytes) else np.array_equal(bits, other):
                ids.append(device)
                break
        else:
            different.append((bits, [device]))
    return {_digest(bits): ids for bits, ids in different}


def _digest(bits: bytes | np.ndarray) -> str:
    data = bits if isinstance(bits, bytes) else bits.data
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _bits(data: jax.Array) -> bytes | np.ndarray:
    # Not the numbers, so that NaN is equal to itself, and -0.0 isn't 0.0.
    numbers = np.asarray(data)
    if numbers.nbytes <= _SMALL:
        # This is a copy, but NumPy takes longer to compare a few numbers than to copy them.
        return numbers.tobytes()
    return np.ascontiguousarray(numbers).reshape(-1).view(np.uint8)


def checksums(x: jax.Array) -> jax.Array:
    """Two numbers for what each device of this process has of an array, computed there."""
    shards = x.addressable_shards
    # Of this process alone: others may have another tree, and so run other programs.
    mesh = Mesh(np.array([s.device for s in shards]), ("device",), axis_types=(AxisType.Auto,))
    first, *rest = shards[0].data.shape
    side_by_side = jax.make_array_from_single_device_arrays(
        (first * mesh.size, *rest),
        NamedSharding(mesh, PartitionSpec("device")),
        [s.data for s in shards],
    )
    with jax.set_mesh(mesh):
        return _program(mesh)(side_by_side)


@functools.lru_cache(maxsize=64)
def _program(mesh: Mesh) -> Any:
    spec = PartitionSpec("device")
    return jax.jit(jax.shard_map(_checksum, mesh=mesh, in_specs=spec, out_specs=spec))


def _checksum(x: jax.Array) -> jax.Array:
    words = _words(x).reshape(-1).astype(jnp.uint32)
    position = jax.lax.iota(jnp.uint32, words.size)
    # The finaliser of MurmurHash3, which spreads each bit over all.
    mixed = words ^ (position * jnp.uint32(0x9E3779B9))
    mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
    mixed = mixed ^ (mixed >> 16)
    weighted = mixed * (2 * position + 1)
    return jnp.stack([jnp.sum(mixed, dtype=jnp.uint32), jnp.sum(weighted, dtype=jnp.uint32)])[None]


def _words(x: jax.Array) -> jax.Array:
    """The bits of an array, as unsigned integers of at most 32 bits."""
    if x.dtype == jnp.bool_:
        return x
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([_words(x.real), _words(x.imag)])
    info = jnp.finfo if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo
    bits = min(info(x.dtype).bits, 32)
    return jax.lax.bitcast_convert_type(x, f"uint{bits}")


def _facts(found: Mapping[str, _Found]) -> Facts:
    """What processes have to agree on: which arrays they have, and the copies of each part."""
    facts: dict[Processes, dict[str, str]] = {}
    for name, x in found.items():
        facts.setdefault(x.owners, {})[name] = x.what
        for part, held in x.held.items():
            said = facts.setdefault(x.holders[part], {})
            said[name] = f"{said.get(name, '')} {part}: {', '.join(held)}"
    return {group: said for group, said in facts.items() if len(group) > 1}


def _faults(said: Mapping[int, Mapping[str, _Found]]) -> Iterator[Fault]:
    """What is wrong, from what each process has found."""
    for name in dict.fromkeys(name for found in said.values() for name in found):
        having = {index: found[name] for index, found in said.items() if name in found}
        # Groups of processes may each have an array of their own of that name.
        for group in dict.fromkeys(x.owners for x in having.values()):
            members = {i: having.get(i) for i in group if i in said}
            first = next(x for x in members.values() if x is not None)
            reason, mend = _different_arrays(members), _MEND_TREE
            if reason is None:
                held = {i: x.held for i, x in members.items() if x is not None}
                reason, mend = _different_copies(held), _MEND
            if reason is not None:
                yield Fault(name, first.shape, first.request, reason, mend)


def _different_arrays(members: Mapping[int, _Found | None]) -> str | None:
    by_text: dict[str, list[int]] = {}
    for index, x in members.items():
        text = "no array of that name" if x is None else x.what
        by_text.setdefault(text, []).append(index)
    if len(by_text) == 1:
        return None
    told = "; ".join(f"{named(indices)}: {text}" for text, indices in by_text.items())
    return f"it is not the same array in all processes: {told}"


def _different_copies(held: Mapping[int, Mapping[int, Held]]) -> str | None:
    # Of each part, for each value of it the processes and devices that have it.
    values: dict[int, dict[str, list[str]]] = {}
    for index, parts in held.items():
        for part, by_value in parts.items():
            for value, ids in by_value.items():
                told = values.setdefault(part, {}).setdefault(value, [])
                told.append(_told(index, ids))
    differing = [by_value for by_value in values.values() if len(by_value) > 1]
    if not differing:
        return None
    part, *others = differing
    told = "; ".join(" and ".join(holders) for holders in part.values())
    more = f" (and so for {len(others)} more of its parts)" if others else ""
    return f"there are {len(part)} values of it: {told}{more}"


def _told(index: int, ids: Sequence[int]) -> str:
    return f"process {index} on device{'s' * (len(ids) > 1)} {', '.join(map(str, sorted(ids)))}"

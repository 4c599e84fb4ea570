"""`check_replicas`: checks that copies are equal."""

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import PyTree

from ..._core.compat import array_like, data_of_shards
from ..._core.errors import Fault, ReplicaError
from ..._core.placement import memory_space, regions_of, without_partial_sums
from ..._core.text import show_spec
from ..._core.tree import Kind, Leaves, is_of_keys, name_of, split
from .agreement import checksum, described
from .calls import CommonCall
from .coordination import Processes
from .copies import FIX, Copies, Held, details, facts_of, faults_in
from .differences import compare, faults_in_full
from .groups import members
from .meeting import meeting, processes_at, processes_of

# The host reads shards of up to this many bytes. Checksums of larger ones are computed on devices,
# by a program that is compiled for each shape: small arrays have many shapes, large ones few.
_SMALL = 2**16


def check_replicas(tree: PyTree[Any], /) -> None:
    """Raises unless all copies of all arrays are equal, bit for bit.

    An array that is replicated, or sharded over only some axes of a mesh, has copies on several
    devices. JAX doesn't check that they are equal if several processes made them, or with
    `check_vma=False`. Here each process compares the copies on its own devices, and then the
    processes compare checksums on the host. No collective is run.

    **Arguments:**

    - `tree`: any PyTree. Leaves that are not `jax.Array`s, or have no copies, are skipped. Arrays
        in host memory kinds are checked, too. An array that is unreduced over a mesh axis has no
        copies along that axis, but terms of a sum; its copies along other axes are compared. If
        several processes have devices of its arrays, all of them must call this.

    **Returns:**

    Nothing.

    **Raises:**

    `mylib.errors.ReplicaError`, in every process, naming every array whose copies differ, with
    the devices and processes of each value; and every array over several processes that is missing
    in one of them, or has another shape, dtype or sharding there. `TimeoutError` if a process does
    not take part.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=8)
        model = eqx.nn.MLP(4, 2, 32, 1, key=jax.random.key(0))
        mylib.check_replicas(mylib.filter_shard(model, P(), mesh=mesh))
        ```
    """
    leaves = split(tree)
    with CommonCall(lambda: _everybody(leaves)) as call:
        copies, everybody = _copies_by_name(leaves), call.processes
        faults = _faults_between(copies, everybody) if everybody else _faults_here(copies)
    if faults:
        raise ReplicaError(faults)


def _everybody(leaves: Leaves) -> Processes:
    """The processes of the arrays that this one shares with others."""
    on_devices = zip(leaves.arrays, leaves.kinds, strict=True)
    groups = [processes_at(x.sharding) for x, kind in on_devices if kind is Kind.DEVICE]
    ours = [group for group in groups if len(group) > 1 and jax.process_index() in group]
    return tuple(sorted({index for group in ours for index in group}))


def _faults_between(copies: Mapping[str, Copies], everybody: Processes) -> list[Fault]:
    meet = meeting("check_replicas", everybody)
    difference = compare(meet, [], facts_of(copies, everybody))
    if difference is None:
        return []
    groups = [tuple(members(group)) for group in difference.versions]
    facts = {group: details(copies, everybody, group) for group in groups}
    return faults_in_full(meet, difference, [], facts, FIX, faults_in)


def _faults_here(copies: Mapping[str, Copies]) -> list[Fault]:
    odd = {name: x for name, x in copies.items() if x.odd}
    me = (jax.process_index(),)
    return list(faults_in(FIX, {me: {me: details(odd, me, me)}}))


def _copies_by_name(leaves: Leaves) -> dict[str, Copies]:
    """The arrays that have shards in this process, by name."""
    arrays = dict(_arrays(leaves))
    copies = {name: _copies(x.sharding, tuple(x.shape)) for name, x in arrays.items()}
    # All transfers start before the first one is read.
    to_read = {name: _to_read(x) for name, x in arrays.items() if copies[name][0]}
    by_name: dict[str, Copies] = {}
    devices: dict[Sharding, list[int]] = {}
    for name, x in arrays.items():
        number_on, holders = copies[name]
        by_number: dict[int, list[tuple[int, jax.Array]]] = {}
        if (data := to_read.get(name)) is not None:
            if data.sharding not in devices:
                devices[data.sharding] = [s.device.id for s in data.addressable_shards]
            for device, shard in zip(devices[data.sharding], data_of_shards(data), strict=True):
                if device in number_on:
                    by_number.setdefault(number_on[device], []).append((device, shard))
        by_name[name] = Copies(
            what=f"{_dtype_name(x.dtype)}{list(x.shape)} as {described(x.sharding)}",
            shape=tuple(x.shape),
            request=_request(x.sharding),
            processes=processes_at(x.sharding),
            held={number: _compared(data) for number, data in by_number.items()},
            holders=holders,
        )
    return by_name


def _arrays(leaves: Leaves) -> Iterator[tuple[str, jax.Array]]:
    times: Counter[str] = Counter()
    for x, kind, path in zip(leaves.arrays, leaves.kinds, leaves.paths, strict=True):
        if kind is Kind.TRACED:
            raise TypeError(
                f"check_replicas: {name_of(path)} is traced, so it has no values yet: call "
                "it outside of jax.jit"
            )
        if kind is Kind.DEVICE and jax.process_index() in processes_at(x.sharding):
            # Keys of different types can have the same text.
            name = name_of(path)
            times[name] += 1
            yield name if times[name] == 1 else f"{name} ({times[name]})", x


@functools.lru_cache(maxsize=4096)
def _copies(
    sharding: Sharding, shape: tuple[int, ...]
) -> tuple[Mapping[int, int], Mapping[int, Processes]]:
    """The shards of an array that several devices hold, by number: the shard on each device of this
    process, and the processes that hold each shard.
    """
    terms = _terms(sharding)
    if isinstance(sharding, NamedSharding) and terms:
        sharding = without_partial_sums(sharding)
    shards: dict[Any, list[Any]] = {}
    # The numbers are the same in all processes.
    for bounds, devices in regions_of(shape, sharding).items():
        for device in devices:
            shards.setdefault((bounds, terms.get(device)), []).append(device)
    number_on: dict[int, int] = {}
    holders: dict[int, Processes] = {}
    for number, devices in enumerate(shards.values()):
        ids = [device.id for device in devices if device.process_index == jax.process_index()]
        if len(devices) > 1 and ids:
            number_on |= dict.fromkeys(ids, number)
            holders[number] = processes_of(devices)
    return number_on, holders


def _terms(sharding: Sharding) -> dict[Any, Any]:
    """Where each device is along unreduced axes: there devices hold different terms of a sum, at
    the same indices.
    """
    if not isinstance(sharding, NamedSharding) or not sharding.spec.unreduced:
        return {}
    names = sharding.mesh.axis_names
    along = [i for i, name in enumerate(names) if name in sharding.spec.unreduced]
    places = np.ndenumerate(sharding.mesh.devices)
    return {device: tuple(position[i] for i in along) for position, device in places}


@functools.lru_cache(maxsize=1024)
def _request(sharding: Sharding) -> str:
    return show_spec(sharding.spec if isinstance(sharding, NamedSharding) else sharding)


# NumPy takes as long to name a dtype as to compare small arrays.
_dtype_name = functools.lru_cache(maxsize=64)(str)


@functools.lru_cache(maxsize=1024)
def _on_host(sharding: Sharding) -> bool:
    in_host_memory = memory_space(sharding) == jax.memory.Space.Host
    return in_host_memory or next(iter(sharding.device_set)).platform == "cpu"


def _to_read(x: jax.Array) -> jax.Array:
    """The data that the host reads to compare copies: the array, or checksums of large shards in
    device memory.
    """
    x = jax.random.key_data(x) if is_of_keys(x) else x
    if not _on_host(x.sharding):
        x = checksums(x) if x.addressable_data(0).nbytes > _SMALL else x
        for shard in x.addressable_shards:
            shard.data.copy_to_host_async()
    return x


def _compared(copies: Iterable[tuple[int, jax.Array]]) -> Held:
    """Groups copies by checksum."""
    held: Held = {}
    for device, data in copies:
        held.setdefault(checksum([np.asarray(data)], data.dtype), []).append(device)
    return held


def checksums(x: jax.Array) -> jax.Array:
    """Two numbers for each shard of this process, computed on its device."""
    shards = x.addressable_shards
    # A mesh of this process alone: others may have another tree, and so run other programs.
    mesh = Mesh(np.array([s.device for s in shards]), ("device",), axis_types=(AxisType.Auto,))
    first, *rest = shards[0].data.shape
    whole = jax.ShapeDtypeStruct((first * mesh.size, *rest), x.dtype)
    by_device = NamedSharding(mesh, PartitionSpec("device"))
    side_by_side = array_like(whole, by_device, [s.data for s in shards])
    with jax.set_mesh(mesh):
        return _program(mesh)(side_by_side)


@functools.lru_cache(maxsize=64)
def _program(mesh: Mesh) -> Any:
    spec = PartitionSpec("device")
    return jax.jit(jax.shard_map(_checksum, mesh=mesh, in_specs=spec, out_specs=spec))


def _checksum(x: jax.Array) -> jax.Array:
    words = _words(x).reshape(-1).astype(jnp.uint32)
    position = jax.lax.iota(jnp.uint32, words.size)
    # The finaliser of MurmurHash3, which mixes each bit into all others.
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

"""`check_replicas`: whether copies that should be equal are."""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import PyTree

from ._errors import Fault, ReplicaError
from ._exchange import Processes, everybodys_faults, meeting, processes_of
from ._leaves import Kind, Leaves, name_of, split

# Of `jax.Device`s, which type checkers take for no type.
Devices = tuple[Any, ...]
# Up to how many bytes arrays are copied together.
_SMALL = 2**16


def check_replicas(tree: PyTree[Any], /) -> None:
    """Raises unless all copies of all arrays are equal, to the bit.

    An array that is replicated, or sharded over some axes of a mesh only, has copies on several
    devices. Nothing in JAX keeps them equal that were made by several processes, or under
    `check_vma=False`: it believes what it is told. Here each device computes a checksum of its part
    of each array, and one collective for the whole tree compares them.

    **Arguments:**

    - `tree`: any PyTree. What isn't an array on devices, or has no copies, is passed over. Where
        several processes have devices of its arrays, all must call this.

    **Returns:**

    Nothing.

    **Raises:**

    [`mylib.ReplicaError`][], on every process, naming every array whose copies differ, and which
    devices and processes hold which.

    !!! Example

        ```python
        mesh = jax.make_mesh((8,), ("data",))
        model = eqx.nn.MLP(4, 2, 32, 1, key=jax.random.key(0))
        mylib.check_replicas(mylib.filter_shard(model, P(), mesh=mesh))
        ```
    """
    leaves = split(tree)
    faults: dict[int, Fault] = {}
    groups: set[Processes] = set()
    for devices, members in _by_devices(leaves).items():
        groups.add(processes_of(devices))
        if all(device.process_index != jax.process_index() for device in devices):
            continue
        sums = _checksums([leaves.arrays[i] for i in members], devices)
        for column, i in enumerate(members):
            x = leaves.arrays[i]
            held = [tuple(row) for row in sums[:, column].tolist()]
            parts = _parts(x.sharding, tuple(x.shape), devices)
            differing = [part for part in parts if len({held[n] for n in part}) > 1]
            if differing:
                faults[i] = _fault(leaves, i, differing, held, devices)
    told = [faults[i] for i in sorted(faults)]
    # Also to those who have no part of an array that differs.
    everybody = tuple(sorted({p for group in groups if len(group) > 1 for p in group}))
    if jax.process_index() in everybody:
        told = everybodys_faults(meeting("check_replicas", everybody), told, {})
    if told:
        raise ReplicaError(told)


def _by_devices(leaves: Leaves) -> dict[Devices, list[int]]:
    """Which arrays have copies, by the devices that they are on."""
    groups: dict[Devices, list[int]] = {}
    for i, x in enumerate(leaves.arrays):
        if leaves.kinds[i] is Kind.TRACED:
            raise TypeError(
                f"check_replicas: {name_of(leaves.paths[i])} is traced. Values can be compared "
                "when they are there: call it outside of jax.jit"
            )
        if leaves.kinds[i] is not Kind.DEVICE:
            continue
        devices = _in_order(x.sharding)
        if len(_parts(x.sharding, tuple(x.shape), devices)) < len(devices):
            groups.setdefault(devices, []).append(i)
    return groups


@functools.lru_cache(maxsize=1024)
def _in_order(sharding: Sharding) -> Devices:
    # The same on all processes.
    return tuple(sorted(sharding.device_set, key=lambda device: device.id))


@functools.lru_cache(maxsize=4096)
def _parts(sharding: Sharding, shape: tuple[int, ...], devices: Devices) -> list[list[int]]:
    """For each part of an array the devices, by number, that have it."""
    parts: dict[Any, list[int]] = {}
    where = sharding.devices_indices_map(shape)
    for n, device in enumerate(devices):
        bounds = tuple((s.start, s.stop) for s in where[device])
        parts.setdefault(bounds, []).append(n)
    return list(parts.values())


def _checksums(arrays: Sequence[jax.Array], devices: Devices) -> np.ndarray:
    """Two numbers for what each of the devices has of each array."""
    mesh = Mesh(np.array(devices), ("device",), axis_types=(AxisType.Auto,))
    parts = [_side_by_side(x, mesh) for x in arrays]
    # Those of one kind next to each other, for the program.
    order = sorted(range(len(parts)), key=lambda n: (str(parts[n].dtype), parts[n].shape))
    sums = np.asarray(_program(mesh)([parts[n] for n in order]))
    return sums[:, np.argsort(order)]


def _side_by_side(x: jax.Array, mesh: Mesh) -> jax.Array:
    """What the devices have of an array, as an array of their own."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    # Numbers get a dimension, along which they can lie side by side.
    parts = [shard.data if x.ndim else shard.data[None] for shard in x.addressable_shards]
    first, *rest = x.sharding.shard_shape(x.shape) or (1,)
    kind = x.sharding.memory_kind
    sharding = NamedSharding(mesh, PartitionSpec("device"), memory_kind=kind)
    shape = (first * mesh.size, *rest)
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


@functools.lru_cache(maxsize=64)
def _program(mesh: Mesh) -> Any:
    def on_each(parts: list[jax.Array]) -> jax.Array:
        return jax.lax.all_gather(jnp.concatenate(list(_sums(parts))), "device")

    apart, together = PartitionSpec("device"), PartitionSpec()
    mapped = jax.shard_map(on_each, mesh=mesh, in_specs=apart, out_specs=together, check_vma=False)
    return jax.jit(mapped)


def _sums(parts: list[jax.Array]) -> Iterator[jax.Array]:
    """Checksums in the order of the arrays. Of small ones that are alike as of one array: there are
    many of them, and a compiler takes as long for each as for a large one.
    """
    for (shape, dtype), group in itertools.groupby(parts, lambda x: (x.shape, x.dtype)):
        if math.prod(shape) * dtype.itemsize <= _SMALL:
            yield jax.vmap(_checksum)(jnp.stack(list(group)))
        else:
            yield jnp.stack([_checksum(x) for x in group])


def _checksum(x: jax.Array) -> jax.Array:
    """Of the bits, and of where they are: NaN is equal to itself, and -0.0 isn't 0.0."""
    words = _words(jax.device_put(x, jax.memory.Space.Device)).reshape(-1).astype(jnp.uint32)
    position = jax.lax.iota(jnp.uint32, words.size)
    # The finaliser of MurmurHash3, which spreads each bit over all.
    mixed = words ^ (position * jnp.uint32(0x9E3779B9))
    mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
    mixed = mixed ^ (mixed >> 16)
    weighted = mixed * (2 * position + 1)
    return jnp.stack([jnp.sum(mixed, dtype=jnp.uint32), jnp.sum(weighted, dtype=jnp.uint32)])


def _words(x: jax.Array) -> jax.Array:
    """The bits of an array, as unsigned integers of at most 32 bits."""
    if x.dtype == jnp.bool_:
        return x
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([_words(x.real), _words(x.imag)])
    info = jnp.finfo if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo
    bits = min(info(x.dtype).bits, 32)
    return jax.lax.bitcast_convert_type(x, f"uint{bits}")


def _fault(
    leaves: Leaves,
    i: int,
    differing: list[list[int]],
    held: list[tuple[int, ...]],
    devices: Devices,
) -> Fault:
    sharding = leaves.arrays[i].sharding
    request = str(sharding.spec) if isinstance(sharding, NamedSharding) else str(sharding)
    part, *others = differing
    by_value: dict[tuple[int, ...], list[Any]] = {}
    for n in part:
        by_value.setdefault(held[n], []).append(devices[n])
    told = "; ".join(_told(group) for group in by_value.values())
    more = f" (and so for {len(others)} more of its parts)" if others else ""
    return Fault(
        name_of(leaves.paths[i]),
        tuple(leaves.arrays[i].shape),
        request,
        f"there are {len(by_value)} values of it: {told}{more}",
        "make it from the same numbers in every process, or place the values of one of them again",
    )


def _told(devices: Sequence[Any]) -> str:
    processes = sorted({device.process_index for device in devices})
    return " and ".join(_told_of(process, devices) for process in processes)


def _told_of(process: int, devices: Sequence[Any]) -> str:
    ids = [str(device.id) for device in devices if device.process_index == process]
    return f"process {process} on device{'s' * (len(ids) > 1)} {', '.join(ids)}"

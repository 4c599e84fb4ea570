"""Moves arrays by one program on the devices of source and target together, where JAX has no
transfer server, or none is wanted.

Collectives match by order, so the processes compare first what they move, and wait for each other.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .._placement import Bounds, regions_of
from .._processes import AbsentError, TransferError, exchange, processes_of
from .leaf import Leaf, assembled, described_all, shards_of

_AXIS = "all"


class _Part(NamedTuple):
    """How the shards of one array become others, for the devices of the program in their order."""

    shape: tuple[int, ...]
    # A shard of the source, and the row that holds it.
    held: tuple[tuple[int, Bounds], ...]
    # The shard of the target of each row; None if its device gets none.
    wanted: tuple[Bounds | None, ...]
    size: tuple[int, ...]


def move_by_program(leaves: Sequence[Leaf]) -> list[jax.Array]:
    """Returns handles in processes without devices of the target."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, leaf in enumerate(leaves):
        both = leaf.x.sharding.device_set | leaf.target.device_set
        groups.setdefault(tuple(sorted(both, key=lambda d: d.id)), []).append(i)
    moved: dict[int, jax.Array] = {}
    for devices, index in groups.items():
        processes = processes_of(devices)
        if jax.process_index() in processes:
            _agree(processes, [leaves[i] for i in index])
            rows = _run(devices, [leaves[i] for i in index])
        else:
            rows = [{} for _ in index]
        for i, row in zip(index, rows, strict=True):
            moved[i] = assembled(leaves[i], row)
    return [moved[i] for i in range(len(leaves))]


def _agree(processes: tuple[int, ...], leaves: Sequence[Leaf]) -> None:
    purpose = f"transfer of {described_all(leaves)}"
    try:
        exchange(purpose, "", processes, lambda said: "", in_order=True)
    except AbsentError as error:
        raise TransferError(str(error)) from error


def _run(devices: tuple[Any, ...], leaves: Sequence[Leaf]) -> list[dict[Any, jax.Array]]:
    mesh = Mesh(np.array(devices), (_AXIS,), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec(_AXIS))
    found: list[dict[Any, jax.Array]] = [_without_elements(leaf) for leaf in leaves]
    full = [i for i, leaf in enumerate(leaves) if leaf.x.size]
    parts = tuple(_part(devices, leaves[i]) for i in full)
    stacked = _move(parts, rows, [_stacked(devices, leaves[i], rows) for i in full])
    for i, x in zip(full, stacked, strict=True):
        found[i] = {device: jnp.squeeze(shard, 0) for device, shard in shards_of(x).items()}
    return found


def _without_elements(leaf: Leaf) -> dict[Any, jax.Array]:
    if leaf.x.size:
        return {}
    empty = np.zeros(leaf.target.shard_shape(leaf.x.shape), leaf.x.dtype)
    return {device: jax.device_put(empty, device) for device in leaf.target.addressable_devices}


def _part(devices: Sequence[Any], leaf: Leaf) -> _Part:
    shape = leaf.x.shape
    rows = {device: i for i, device in enumerate(devices)}
    held = [
        (rows[owners[0]], bounds) for bounds, owners in regions_of(shape, leaf.x.sharding).items()
    ]
    wanted: list[Bounds | None] = [None] * len(devices)
    for bounds, takers in regions_of(shape, leaf.target).items():
        for device in takers:
            wanted[rows[device]] = bounds
    return _Part(shape, tuple(held), tuple(wanted), leaf.target.shard_shape(shape))


def _stacked(devices: Sequence[Any], leaf: Leaf, rows: NamedSharding) -> jax.Array:
    """An array with a row for each device: its shard of the source, or zeros."""
    size = leaf.x.sharding.shard_shape(leaf.x.shape)
    shards = shards_of(leaf.x)
    own = []
    for device in rows.addressable_devices_indices_map((len(devices), *size)):
        shard = shards.get(device)
        if shard is None:
            shard = jax.device_put(np.zeros(size, leaf.x.dtype), device)
        own.append(jnp.expand_dims(shard, 0))
    return jax.make_array_from_single_device_arrays((len(devices), *size), rows, own)


@partial(jax.jit, static_argnums=(0, 1))
def _move(
    parts: tuple[_Part, ...], rows: NamedSharding, stacked: list[jax.Array]
) -> list[jax.Array]:
    moved: list[jax.Array] = []
    for part, given in zip(parts, stacked, strict=True):
        # Or the compiler moves the floats after all.
        given_bits = lax.optimization_barrier(_bits_of(given))
        bits = [_move_bits(part, rows, x) for x in given_bits]
        moved.append(_of_bits(lax.optimization_barrier(bits), given.dtype))
    return moved


def _bits_of(x: jax.Array) -> list[jax.Array]:
    """Integers with the bits of `x`. The compiler adds zeros to what it moves, which would change
    floats: negative zeros, and the smallest ones.
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return [*_bits_of(lax.real(x)), *_bits_of(lax.imag(x))]
    if jnp.issubdtype(x.dtype, jnp.floating):
        bits = jnp.dtype(f"uint{jnp.finfo(x.dtype).bits}")
        return [lax.bitcast_convert_type(x, bits)]
    return [x]


def _of_bits(bits: Sequence[jax.Array], dtype: Any) -> jax.Array:
    if len(bits) == 2:
        number = np.zeros((), dtype).real.dtype
        return lax.complex(*(lax.bitcast_convert_type(x, number) for x in bits))
    return lax.bitcast_convert_type(bits[0], dtype) if bits[0].dtype != dtype else bits[0]


def _move_bits(part: _Part, rows: NamedSharding, given: jax.Array) -> jax.Array:
    shape, held, wanted, size = part
    whole = jnp.zeros(shape, given.dtype)
    for row, bounds in held:
        whole = lax.dynamic_update_slice(whole, given[row], [start for start, _ in bounds])
    shards = [
        jnp.zeros(size, given.dtype)
        if bounds is None
        else lax.slice(whole, *zip(*bounds, strict=True))
        if bounds
        else whole
        for bounds in wanted
    ]
    return lax.with_sharding_constraint(jnp.stack(shards), rows)

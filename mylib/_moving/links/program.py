"""Moves arrays by one program on the devices of source and target together, where JAX has no
transfer server, or none is wanted.

Collectives match by order, so the processes compare first what they move, and wait for each other.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from ..._core.compat import array_like
from ..._core.placement import regions_of
from ..processes import AbsentError, TransferError, exchange, processes_of
from .division import Device
from .leaf import Shipment, assembled, described_all, shards_of

_AXIS = "all"


# A shape, the source and the target.
_Passage = tuple[tuple[int, ...], Sharding, Sharding]


def move_by_program(leaves: Sequence[Shipment]) -> list[jax.Array]:
    """Returns handles in processes without devices of the target."""
    groups: dict[tuple[Device, ...], list[int]] = {}
    for i, leaf in enumerate(leaves):
        devices_of_both = leaf.x.sharding.device_set | leaf.target.device_set
        groups.setdefault(tuple(sorted(devices_of_both, key=lambda d: d.id)), []).append(i)
    shards: list[dict[Device, jax.Array]] = [{} for _ in leaves]
    for devices, index in groups.items():
        processes = processes_of(devices)
        if jax.process_index() in processes:
            shipments = [leaves[i] for i in index]
            purpose = f"transfer of {described_all(shipments)}"
            try:
                exchange(purpose, "", processes, lambda messages: "", in_order=True)
            except AbsentError as error:
                raise TransferError(str(error)) from error
            for i, arrived in zip(index, _move_all(devices, shipments), strict=True):
                shards[i] = arrived
    return [assembled(leaf, arrived) for leaf, arrived in zip(leaves, shards, strict=True)]


def _move_all(
    devices: tuple[Device, ...], leaves: Sequence[Shipment]
) -> list[dict[Device, jax.Array]]:
    mesh = Mesh(np.array(devices), (_AXIS,), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec(_AXIS))
    routes = tuple((array.shape, array.sharding, target) for array, target, *_ in leaves)
    stacked = _move(routes, rows, [_stacked(devices, leaf, rows) for leaf in leaves])
    # Each device's own row. JAX leaves arrays without elements replicated, with all rows.
    return [
        {d: shard.reshape(shard.shape[1:]) for d, shard in shards_of(array).items()}
        for array in stacked
    ]


def _stacked(devices: Sequence[Device], leaf: Shipment, rows: NamedSharding) -> jax.Array:
    """An array with a row for each device: its shard of the source, or zeros."""
    size = leaf.x.sharding.shard_shape(leaf.x.shape)
    shards = shards_of(leaf.x)
    stacked = []
    for device in rows.addressable_devices_indices_map((len(devices), *size)):
        shard = shards.get(device)
        if shard is None:
            shard = jax.device_put(np.zeros(size, leaf.x.dtype), device)
        stacked.append(jnp.expand_dims(shard, 0))
    whole = jax.ShapeDtypeStruct((len(devices), *size), leaf.x.dtype)
    return array_like(whole, rows, stacked)


@partial(jax.jit, static_argnums=(0, 1))
def _move(
    routes: tuple[_Passage, ...], rows: NamedSharding, stacked: list[jax.Array]
) -> list[jax.Array]:
    moved: list[jax.Array] = []
    for route, array in zip(routes, stacked, strict=True):
        # Without the barriers, XLA cancels the bitcasts and moves the floats after all.
        parts = lax.optimization_barrier(_bits_of(array))
        bits = [_move_bits(route, rows, part) for part in parts]
        moved.append(_of_bits(lax.optimization_barrier(bits), array.dtype))
    return moved


def _bits_of(array: jax.Array) -> list[jax.Array]:
    """Integers with the bits. The compiler adds zeros to what it moves, which would change floats:
    negative zeros, and the smallest ones.
    """
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return [*_bits_of(lax.real(array)), *_bits_of(lax.imag(array))]
    if jnp.issubdtype(array.dtype, jnp.floating):
        bits = jnp.dtype(f"uint{jnp.finfo(array.dtype).bits}")
        return [lax.bitcast_convert_type(array, bits)]
    return [array]


def _of_bits(bits: Sequence[jax.Array], dtype: np.dtype) -> jax.Array:
    if len(bits) == 2:
        number = jnp.zeros((), dtype).real.dtype
        return lax.complex(*(lax.bitcast_convert_type(x, number) for x in bits))
    return lax.bitcast_convert_type(bits[0], dtype) if bits[0].dtype != dtype else bits[0]


def _move_bits(route: _Passage, rows: NamedSharding, stacked: jax.Array) -> jax.Array:
    """`stacked` has a row for each device: its shard of the source. The result has those of the
    target.
    """
    shape, source, target = route
    assert isinstance(rows.mesh, Mesh)
    row = {device: i for i, device in enumerate(rows.mesh.devices.flat)}
    whole = jnp.zeros(shape, stacked.dtype)
    for bounds, holders in regions_of(shape, source).items():
        start = [start for start, _ in bounds]
        whole = lax.dynamic_update_slice(whole, stacked[row[holders[0]]], start)
    shards = [jnp.zeros(target.shard_shape(shape), stacked.dtype)] * len(row)
    for bounds, takers in regions_of(shape, target).items():
        shard = lax.slice(whole, *zip(*bounds, strict=True)) if bounds else whole
        for device in takers:
            shards[row[device]] = shard
    return lax.with_sharding_constraint(jnp.stack(shards), rows)

"""Moves arrays by one program on the devices of source and target together, where JAX has no
transfer server.

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

from .._processes import gather, named, processes_of
from .connections import TransferError
from .leaf import Leaf, assembled, shards_of
from .plan import Bounds, regions_of

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
    mine = [leaf.text for leaf in leaves]
    everyone = gather("transfer", mine, processes)
    for process, theirs in zip(processes, everyone, strict=True):
        if theirs != everyone[0]:
            pairs = zip(everyone[0], theirs, strict=False)
            one, other = next((p for p in pairs if p[0] != p[1]), (everyone[0], theirs))
            raise TransferError(
                f"{named(processes[:1])} transfers {one}, but {named([process])} transfers {other}."
                " All processes must make the same transfers, here in the same order"
            )


def _run(devices: tuple[Any, ...], leaves: Sequence[Leaf]) -> list[dict[Any, jax.Array]]:
    mesh = Mesh(np.array(devices), (_AXIS,), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec(_AXIS))
    parts = tuple(_part(devices, leaf) for leaf in leaves)
    stacked = _move(parts, rows, [_stacked(devices, leaf, rows) for leaf in leaves])
    found: list[dict[Any, jax.Array]] = []
    for x in stacked:
        found.append({device: jnp.squeeze(shard, 0) for device, shard in shards_of(x).items()})
    return found


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
    for (shape, held, wanted, size), given in zip(parts, stacked, strict=True):
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
        moved.append(lax.with_sharding_constraint(jnp.stack(shards), rows))
    return moved

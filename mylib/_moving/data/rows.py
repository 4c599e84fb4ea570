"""The rows of a global batch that each process reads.

The shardings of a batch split its rows into blocks. A process needs the blocks that its devices
hold; processes that share a block form one reader, and read the same rows.
"""

import functools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import PyTree

from ..._core.errors import Fault, PlacementError, because
from ..._core.placement import (
    AnyMesh,
    Placement,
    Target,
    axis_names,
    current_world,
    decide,
    is_placement_leaf,
    is_rule,
    parts_of,
    sharding_of,
    show,
)
from ..._core.text import runs_of
from ..._core.tree import split
from ..processes import processes_of

Blocks = tuple[int, ...]


@dataclass(frozen=True)
class ReaderShard:
    """The share of each global batch that one process reads.

    Processes whose devices hold the same rows, such as those along a model axis, form one reader.

    **Attributes:**

    - `index`, `count`: the number of this reader, and how many readers there are. All read the same
        amount.
    - `blocks`, `block_count`: the rows of a batch are split into `block_count` equal blocks, and
        this reader reads `blocks`, in order.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=4, model=2)
        shard = mylib.data.reader_shard(P("data"), mesh=mesh)
        mine = range(1000)[shard.index :: shard.count]
        ```
    """

    index: int
    count: int
    blocks: Blocks
    block_count: int

    def rows(self, global_rows: int) -> tuple[slice, ...]:
        """The rows that this process reads of a global batch of `global_rows` rows: ranges in
        order. Concatenated, they are the share that `mylib.data.to_global` takes.

        !!! Example

            ```python
            mesh = mylib.make_mesh(data=8)
            batch = np.arange(64)
            shard = mylib.data.reader_shard(P("data"), mesh=mesh)
            part = batch[np.r_[shard.rows(len(batch))]]
            ```
        """
        if operator.index(global_rows) < 0:
            raise ValueError(f"a batch can't have {global_rows} rows")
        if global_rows % self.block_count:
            raise ValueError(
                f"{global_rows} rows do not split into {self.block_count} equal blocks, as this "
                f"placement needs: read a multiple of {self.block_count} rows"
            )
        size = global_rows // self.block_count
        return tuple(slice(i * size, (j + 1) * size) for i, j in runs_of(self.blocks))


def reader_shard(placement: PyTree[Placement], /, mesh: AnyMesh | None = None) -> ReaderShard:
    """The share of each global batch that this process reads, for any mesh, even if mesh axes cross
    processes in unusual ways.

    **Arguments:**

    - `placement`: where the batch goes: a `PartitionSpec`, a `jax.sharding.Sharding`, a device, or
        a PyTree of these. Rules need arrays: give the result of `mylib.resolve` for an example
        batch.
    - `mesh`: the mesh for a `PartitionSpec`; by default the mesh of `jax.set_mesh`.

    **Returns:**

    A `mylib.data.ReaderShard`. Its `index` and `count` are arguments for
    `grain.sharding.ShardOptions` and `torch.utils.data.DistributedSampler`, its `rows` returns the
    rows themselves.

    If processes can't read equal shares (a mesh with one device of one process and two of another),
    all of them read everything.

    **Raises:**

    `mylib.PlacementError`, if the placement is invalid, or if this process has no device of the
    mesh.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=4, model=2)
        shard = mylib.data.reader_shard(P("data"), mesh=mesh)
        examples = list(range(1000))[shard.index :: shard.count]
        ```
    """
    rules = rules_in(placement)
    if rules:
        reason = "a rule chooses by the arrays, and there are none here"
        fix = "give mylib.resolve(example, rule, mesh=mesh), for an example batch"
        raise PlacementError([because(reason, fix, repr(rule)) for rule in rules])
    shardings, faults = shardings_in(placement, mesh)
    me = jax.process_index()
    if shardings and me not in processes_of(d for s in shardings for d in s.device_set):
        faults.append(no_device(placement, mesh))
    if faults:
        raise PlacementError(faults)
    return readers_of(shardings).get(me, ALONE)


# The share of a process that has the whole batch.
ALONE = ReaderShard(0, 1, (0,), 1)


def shardings_in(
    placement: PyTree[Placement], mesh: AnyMesh | None
) -> tuple[list[Sharding], list[Fault]]:
    """The shardings of a placement's entries, without any arrays, and their faults. Rules are left
    out.
    """
    plain = jtu.tree_map(_plain, placement, is_leaf=is_placement_leaf)
    # Any array will do: no shape is checked.
    stand_ins = jtu.tree_map(lambda _: np.zeros(()), placement, is_leaf=is_placement_leaf)
    decision = decide(split(stand_ins), plain, mesh, current_world(), fit=fits_all)
    shardings = [
        sharding_of(target)
        for i, target in enumerate(decision.targets)
        if target is not None and i not in decision.faulty
    ]
    faults = decision.faults + [
        replace(fault, request=repr(sharding))
        for sharding in shardings
        for fault in unfit_rows(sharding)
    ]
    return shardings, faults


def rules_in(placement: PyTree[Placement]) -> list[object]:
    return [x for x in jtu.tree_leaves(placement, is_leaf=is_placement_leaf) if is_rule(x)]


def no_device(placement: PyTree[Placement], mesh: AnyMesh | None) -> Fault:
    reason = f"process {jax.process_index()} has none of its devices"
    fix = "make batches in the processes of the mesh only, or give a mesh with devices of all"
    return because(reason, fix, show(placement, mesh))


def _plain(entry: Any) -> Any:
    if isinstance(entry, Format):
        return entry.sharding
    return None if is_rule(entry) else entry


def fits_all(target: Target, shape: tuple[int, ...]) -> Iterator[Fault]:
    """Accepts any shape, because it is not known yet."""
    yield from ()


def readers_of(shardings: Iterable[Sharding]) -> Mapping[int, ReaderShard]:
    """The share of each process with devices of any of these shardings: it covers the rows for all
    of them.

    Shardings within one process don't count, if there are others.
    """
    each = tuple(dict.fromkeys(shardings))
    return _readers_of(tuple(s for s in each if len(processes_of(s.device_set)) > 1) or each)


@functools.lru_cache(maxsize=256)
def _readers_of(shardings: tuple[Sharding, ...]) -> Mapping[int, ReaderShard]:
    count = math.lcm(*[row_blocks(sharding) for sharding in shardings])
    needs: dict[int, set[int]] = {}
    for sharding in shardings:
        # Every process passes arrays whose rows are not split as a whole, so they don't count.
        splits = row_blocks(sharding) > 1 or count == 1
        for device, blocks in _blocks_of_devices(sharding, count).items():
            needs.setdefault(device.process_index, set()).update(blocks if splits else ())
    shares = _shares(list(needs.values()), count)
    readers = [ReaderShard(i, len(shares), share, count) for i, share in enumerate(shares)]
    return {
        process: next(reader for reader in readers if need <= set(reader.blocks))
        for process, need in sorted(needs.items())
    }


def _shares(needs: Sequence[set[int]], count: int) -> list[Blocks]:
    """Splits the blocks into shares of equal size, so that each process needs only one of them."""
    shares: list[set[int]] = []
    for need in filter(None, needs):
        touched = [share for share in shares if share & need]
        shares = [share for share in shares if not share & need] + [need.union(*touched)]
    if len({len(share) for share in shares}) > 1:
        shares = [set(range(count))]
    return sorted(tuple(sorted(share)) for share in shares)


def row_blocks(sharding: Sharding) -> int:
    """The number of blocks that a sharding splits the rows into."""
    if not isinstance(sharding, NamedSharding):
        return 1
    return math.prod(sharding.mesh.shape[name] for name in axis_names(_row_entry(sharding)))


def unfit_rows(sharding: Sharding) -> Iterator[Fault]:
    if not isinstance(sharding, NamedSharding) and not sharding.is_fully_replicated:
        yield because(
            "it can't split the rows before their number is known",
            "give a `jax.sharding.NamedSharding`",
        )


def of_rows(sharding: Sharding) -> Sharding:
    """The sharding of an array with one value per row, next to an array of this sharding."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return sharding.update(spec=PartitionSpec(_row_entry(sharding)))


def _blocks_of_devices(sharding: Sharding, count: int) -> dict[Any, range]:
    if not isinstance(sharding, NamedSharding):
        return dict.fromkeys(sharding.device_set, range(count))
    parts = parts_of(of_rows(sharding), (count,))
    return {device: range(*span) for device, (span,) in parts.items()}


def _row_entry(sharding: NamedSharding) -> Any:
    """The mesh axes that split the rows, as an entry of a `PartitionSpec`."""
    entries = sharding.spec.partitions
    return entries[0] if entries and entries[0] is not PartitionSpec.UNCONSTRAINED else None

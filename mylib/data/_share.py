"""This process's share of a batch: checked, and placed."""

import functools
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .._errors import Fault, because
from .._placement import (
    Target,
    current_world,
    decide,
    fill_free,
    is_rule,
    sharding_of,
    show,
    unfit_shape,
)
from .._processes import (
    Facts,
    Processes,
    checksum,
    described,
    digest,
    named,
    owners,
    shared_indices,
)
from .._transfer import Options, from_local, is_there, place_leaves
from .._tree import Kind, Leaves, canonical_dtype, is_of_keys, split
from ._arrays import as_arrays, copied
from ._request import BatchRequest, Tail
from ._rows import ALONE, ReaderShard, fits_all, of_rows, readers_of, row_blocks, unfit_rows


@dataclass
class Share:
    """This process's share of a batch, and its targets. `spanning` are the leaves whose targets
    reach beyond this process, `row_leaves` those whose rows may be dropped or padded, `rows` their
    number. `sharers` are the processes that read the same rows.
    """

    request: BatchRequest
    leaves: Leaves
    targets: list[Target | None]
    spanning: list[int]
    reader: ReaderShard
    sharers: Processes
    row_leaves: list[int]
    rows: int | None
    faults: list[Fault]

    def facts(self) -> Facts:
        """The facts that must be equal in all processes, or in some."""
        facts: dict[Processes, dict[str, str]] = {}
        rows_vary = self.request.tail != "error"
        for i in self.spanning:
            x, target = self.leaves.arrays[i], self.target(i)
            shape = list(map(str, x.shape))
            if rows_vary and i in self.row_leaves:
                shape[0] = "rows"
            what = f"{canonical_dtype(x)}[{', '.join(shape)}] as {described(target)}"
            facts.setdefault(owners(sharding_of(target)), {})[self.name(i)] = what
        everybody = facts.setdefault(self.request.processes, {})
        everybody |= {"the loop": self.request.loop, "the option tail=": self.request.tail}
        if rows_vary:
            everybody["the divisor of the number of rows"] = str(self.multiple)
            facts.setdefault(self.sharers, {})["the number of rows"] = str(self.rows)
        return {group: values for group, values in facts.items() if len(group) > 1}

    def kind(self) -> str:
        """Equal for batches of the same kind, whatever their shapes."""
        spanning = [(self.leaves.arrays[i], self.target(i), self.name(i)) for i in self.spanning]
        return digest([[name, str(x.dtype), described(target)] for x, target, name in spanning])

    def values(self) -> Facts:
        """Checksums of data that more than one process has."""
        facts: dict[Processes, dict[str, str]] = {}
        me = jax.process_index()
        for i in self.spanning:
            sharding = sharding_of(self.target(i))
            x = _numbers_of(self.leaves.arrays[i])
            for sharers, indices in shared_indices(sharding, self.global_shape(i), me).items():
                number = checksum([x[self.within(i, j)] for j in indices], canonical_dtype(x))
                facts.setdefault(sharers, {})[self.name(i)] = f"checksum {number}"
        return facts

    def global_shape(self, i: int) -> tuple[int, ...]:
        shape = tuple(self.leaves.arrays[i].shape)
        return (shape[0] * self.reader.count, *shape[1:]) if self._is_part(i) else shape

    def within(self, i: int, index: tuple[slice, ...] | None) -> Any:
        """The data of a leaf's share at `index` of the whole array."""
        if not index or not self._is_part(i):
            return index or ...
        size = self.leaves.arrays[i].shape[0] // len(self.reader.blocks)
        start, stop, _ = index[0].indices(self.global_shape(i)[0])
        first = self.reader.blocks.index(start // size) * size if size else 0
        return slice(first, first + stop - start), *index[1:]

    def masked(self, real: int | None) -> "Share":
        """The share with a mask, if it may have been padded: `real` rows are the source's."""
        if self.request.tail != "pad":
            return self
        first, mask = self.row_leaves[0], np.arange(self.rows or 0) < (real or 0)
        tree = self.leaves.join(self.leaves.arrays)
        return replace(
            self,
            leaves=split((tree, mask)),
            targets=[*self.targets, of_rows(sharding_of(self.target(first)))],
            spanning=[*self.spanning, *([len(self.targets)] if first in self.spanning else [])],
        )

    def emptied(self) -> "Share":
        """The share without its rows, independent of the source's buffers."""
        share = self.with_rows(0)
        return replace(share, leaves=split(jtu.tree_map(copied, share.leaves.tree)))

    def with_rows(self, rows: int) -> "Share":
        """The share with this number of rows: the last ones dropped, or zeros added."""
        arrays = list(self.leaves.arrays)
        for i in self.row_leaves:
            arrays[i] = _with_rows(arrays[i], rows)
        return replace(self, leaves=split(self.leaves.join(arrays)), rows=rows)

    def placed(self) -> Any:
        """The batch, with its arrays at their targets."""
        alias = self.request.may_alias
        leaves = self._assembled(bool(alias)) if self.spanning else self.leaves
        each = [Options(alias=alias)] * len(leaves.arrays)
        placed = place_leaves(leaves, self.targets, current_world(), options=each, check=False)
        return leaves.join(placed)

    def _assembled(self, may_alias: bool) -> Leaves:
        arrays = list(self.leaves.arrays)
        for i in self.spanning:
            where = self.global_shape(i), sharding_of(self.target(i))
            within = functools.partial(self.within, i)
            arrays[i] = from_local(arrays[i], within, *where, may_alias)
        return split(self.leaves.join(arrays))

    @property
    def is_empty(self) -> bool:
        return self.request.tail == "drop" and self.rows == 0

    def multiple_of(self, i: int) -> int:
        """The number of rows of a leaf in this process must be a multiple of this."""
        return len(self.reader.blocks) if self._is_part(i) else _blocks(self.target(i))

    @property
    def multiple(self) -> int:
        return math.lcm(*[self.multiple_of(i) for i in self.row_leaves])

    def rounded(self, rows: int) -> int:
        """`rows`, rounded down or up so that they can be split."""
        least = rows // self.multiple * self.multiple
        return least + self.multiple if rows > least and self.request.tail == "pad" else least

    def _is_part(self, i: int) -> bool:
        """Whether this process has only some of the rows of a leaf."""
        return self.reader.count > 1 and i in self.spanning and _blocks(self.target(i)) > 1

    def target(self, i: int) -> Target:
        target = self.targets[i]
        assert target is not None
        return fill_free(target, None, len(self.leaves.arrays[i].shape))

    def name(self, i: int) -> str:
        return self.leaves.name(i)


def look_through(batch: Any, request: BatchRequest) -> Share:
    """Resolves the placement of a batch, and finds its faults."""
    leaves, numbers, faults = _flattened(batch, request)
    world = current_world()
    if world.staged or Kind.TRACED in leaves.kinds:
        raise TypeError(
            "a batch needs values, and inside a transformed function there are none yet: use "
            "mylib.filter_shard there"
        )
    simple = jax.process_count() == 1 and request.tail == "error" and not numbers
    fit = _unfit_batch if simple else fits_all
    decision = decide(leaves, request.placement, request.mesh, world, fit=fit)
    faults += decision.faults
    _put_unplaced(leaves, numbers, decision.targets)
    if simple:
        return Share(request, leaves, decision.targets, [], ALONE, (0,), [], None, faults)
    targets = [
        _everywhere(target) if position in numbers else target
        for target, position in zip(decision.targets, leaves.positions, strict=True)
    ]
    placed = _to_place(leaves, targets, faults)
    share = _share_of(request, leaves, targets, placed, faults)
    for i, target in placed.items():
        shape = tuple(leaves.arrays[i].shape)
        for fault in _unfit_shape(target, shape, share.multiple_of(i), request.tail):
            faults.append(leaves.at(i, replace(fault, request=show(target, None))))
    if request.tail != "error":
        faults += _unequal_rows(share)
    if share.reader.count > 1 and any(map(is_rule, decision.entries)):
        faults += _undecided_rules(share)
    return share


def _put_unplaced(
    leaves: Leaves, numbers: Container[int], targets: Sequence[Target | None]
) -> None:
    """Numbers that become arrays without a target are converted as by `jnp.asarray`."""
    for i, position in enumerate(leaves.positions):
        if position in numbers and targets[i] is None:
            leaves.arrays[i], leaves.kinds[i] = jnp.asarray(leaves.arrays[i]), Kind.DEVICE


def _to_place(
    leaves: Leaves, targets: Sequence[Target | None], faults: list[Fault]
) -> dict[int, Target]:
    """The arrays to be placed from values of this process."""
    placed: dict[int, Target] = {}
    for i, target in enumerate(targets):
        if target is None or leaves.kinds[i] not in (Kind.HOST, Kind.DEVICE):
            continue
        unfit = list(_unfit_for_shares(leaves, i, target))
        faults += unfit
        if not unfit and not _is_over_several(leaves.arrays[i]):
            placed[i] = target
    return placed


def _share_of(
    request: BatchRequest,
    leaves: Leaves,
    targets: list[Target | None],
    placed: Mapping[int, Target],
    faults: list[Fault],
) -> Share:
    spanning = [i for i, t in placed.items() if not sharding_of(t).is_fully_addressable]
    readers = readers_of([*request.shardings, *(sharding_of(placed[i]) for i in spanning)])
    me = jax.process_index()
    reader = readers.get(me, ALONE)
    sharers = tuple(process for process, other in readers.items() if other == reader) or (me,)
    with_rows = [i for i in placed if leaves.arrays[i].ndim]
    row_leaves = [i for i in with_rows if _blocks(placed[i]) > 1] or with_rows
    rows = leaves.arrays[row_leaves[0]].shape[0] if row_leaves else None
    return Share(request, leaves, targets, spanning, reader, sharers, row_leaves, rows, faults)


def _flattened(batch: Any, request: BatchRequest) -> tuple[Leaves, set[int], list[Fault]]:
    leaves = split(batch)
    if len(leaves.arrays) == len(leaves.all) and not request.arrays:
        return leaves, set(), []
    batch, numbers, faults = as_arrays(batch, request.arrays)
    return split(batch), numbers, faults


def _unfit_for_shares(leaves: Leaves, i: int, target: Target) -> Iterator[Fault]:
    x, sharding = leaves.arrays[i], sharding_of(target)
    request = show(target, None)
    for fault in [] if sharding.is_fully_addressable else unfit_rows(sharding):
        yield leaves.at(i, replace(fault, request=request))
    if leaves.kinds[i] is Kind.DEVICE and x.is_deleted():
        reason = "the array has been deleted"
        fix = "if it was donated to a function, make another one"
        yield leaves.at(i, because(reason, fix, request))
    elif _is_over_several(x) and not is_there(x, leaves.kinds[i], target):
        holders = named(owners(x.sharding))
        reason = f"it is already an array on {holders}, not a share of one process"
        fix = "move it by mylib.filter_shard, before or after"
        yield leaves.at(i, because(reason, fix, request))


def _unfit_batch(target: Target, shape: tuple[int, ...]) -> Iterator[Fault]:
    return _unfit_shape(target, shape, _blocks(target), "error")


def _unfit_shape(
    target: Target, shape: tuple[int, ...], multiple: int, tail: Tail
) -> Iterator[Fault]:
    """The faults of a share's shape: unless rows are dropped or padded, they must be a multiple of
    something.
    """
    if shape and _blocks(target) > 1:
        if shape[0] % multiple and tail == "error":
            fewer = shape[0] // multiple * multiple
            yield because(
                f"its {shape[0]} rows are not a multiple of {multiple}",
                f"give such batches; or write tail='drop', which keeps {fewer} of the rows, or "
                f"tail='pad', which pads to {fewer + multiple} rows and returns a mask",
            )
        shape = _blocks(target), *shape[1:]
    yield from unfit_shape(target, shape)


def _unequal_rows(share: Share) -> Iterator[Fault]:
    request = f"tail={share.request.tail!r}"
    if not share.row_leaves and share.request.tail == "pad" and not share.faults:
        fix = "leave tail= out, or give a batch with arrays in it"
        yield because("the batch has no rows that could be padded", fix, request)
    for i in share.row_leaves:
        x = share.leaves.arrays[i]
        if x.shape[0] != share.rows:
            first = share.name(share.row_leaves[0])
            reason = f"it has {x.shape[0]} rows, and {first} has {share.rows}"
            fix = "give the same number of rows to all arrays that are split by rows"
            yield share.leaves.at(i, because(reason, fix, request))


def _undecided_rules(share: Share) -> Iterator[Fault]:
    """Faults of rules that depend on the number of rows: they were called with a share."""
    whole = [
        jax.ShapeDtypeStruct(share.global_shape(i), canonical_dtype(x))
        for i, x in enumerate(share.leaves.arrays)
    ]
    leaves = share.leaves.with_shapes(whole)
    request = share.request
    decision = decide(leaves, request.placement, request.mesh, current_world(), fit=fits_all)
    for i in share.spanning:
        of_share, of_whole = share.targets[i], decision.targets[i]
        if is_rule(decision.entries[i]) and of_share != of_whole:
            reason = (
                f"for one process's share it returns {of_share and show(of_share, None)}, for the "
                f"whole, {whole[i].shape}, {of_whole and show(of_whole, None)}"
            )
            fix = "give the result of mylib.resolve for an example of a whole batch"
            yield share.leaves.at(i, because(reason, fix, repr(decision.entries[i])))


def _is_over_several(x: Any) -> bool:
    return isinstance(x, jax.Array) and not x.is_fully_addressable


def _blocks(target: Target) -> int:
    return row_blocks(sharding_of(target))


def _everywhere(target: Target | None) -> Target | None:
    sharding = None if target is None else sharding_of(target)
    if not isinstance(sharding, NamedSharding):
        return sharding
    return sharding.update(spec=PartitionSpec())


def _numbers_of(x: Any) -> np.ndarray:
    """The numbers of a local array, on the host; for keys, their key data."""
    return np.asarray(jax.random.key_data(x) if is_of_keys(x) else x)


def _with_rows(x: Any, rows: int) -> Any:
    if x.shape[0] == rows:
        return x
    if not rows and not is_of_keys(x):
        return np.zeros((0, *x.shape[1:]), x.dtype)
    numbers = _numbers_of(x)
    fill = np.zeros((max(0, rows - len(numbers)), *numbers.shape[1:]), numbers.dtype)
    numbers = np.concatenate([numbers[:rows], fill])
    if is_of_keys(x):
        return jax.random.wrap_key_data(jnp.asarray(numbers), impl=jax.random.key_impl(x))
    return numbers

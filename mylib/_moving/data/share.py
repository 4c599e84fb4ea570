"""This process's share of a batch: checked, and placed."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.errors import Fault, because
from ..._core.placement import (
    Target,
    current_world,
    decide,
    fill_free,
    is_rule,
    sharding_of,
    show,
    unfit_shape,
)
from ..._core.tree import Kind, Leaves, canonical_dtype, is_of_keys, split, spread_prefix
from ..processes import (
    Facts,
    Processes,
    checksum,
    described,
    digest,
    named,
    processes_at,
    shared_indices,
)
from ..transfer import Options, from_local, is_flag, is_there, place_leaves
from .arrays import as_arrays, copied
from .request import BatchRequest, Tail
from .rows import ALONE, ReaderShard, fits_all, of_rows, readers_of, row_blocks, unfit_rows


@dataclass(eq=False)
class Portion:
    """One array of a share, in this process, and its target; None if it stays as it is."""

    value: Any
    target: Target | None
    alias: bool | None = None
    # Whether its target reaches beyond this process.
    spans: bool = False
    # Whether its rows may be dropped or padded.
    has_rows: bool = False
    # The share of its rows that this process has.
    reader: ReaderShard = ALONE

    @property
    def place(self) -> Target:
        assert self.target is not None
        return fill_free(self.target, None, len(self.value.shape))

    @property
    def global_shape(self) -> tuple[int, ...]:
        shape = tuple(self.value.shape)
        return (shape[0] * self.reader.count, *shape[1:]) if self.reader.count > 1 else shape

    @property
    def multiple(self) -> int:
        """The number of rows in this process must be a multiple of this."""
        return len(self.reader.blocks) if self.reader.count > 1 else _blocks(self.place)

    def within(self, index: tuple[slice, ...] | None) -> Any:
        """`index` of the whole array as an index of the value."""
        if not index or self.reader.count == 1:
            return index or ...
        size = self.value.shape[0] // len(self.reader.blocks)
        start, stop, _ = index[0].indices(self.global_shape[0])
        first = self.reader.blocks.index(start // size) * size if size else 0
        return slice(first, first + stop - start), *index[1:]

    def assembled(self) -> Any:
        """The array over all processes, if its target reaches beyond this one."""
        if not self.spans:
            return self.value
        where = self.global_shape, sharding_of(self.place)
        return from_local(self.value, self.within, *where, bool(self.alias))


@dataclass
class Share:
    """This process's share of a batch: a portion for each array. `rows` is the number of rows of
    those that have them; `sharers` are the processes that read the same rows.
    """

    request: BatchRequest
    leaves: Leaves
    portions: list[Portion]
    sharers: Processes
    rows: int | None
    faults: list[Fault]

    @property
    def spanning(self) -> list[tuple[str, Portion]]:
        """The portions whose targets reach beyond this process, with their names."""
        return [(self.leaves.name(i), x) for i, x in enumerate(self.portions) if x.spans]

    @property
    def with_rows(self) -> list[Portion]:
        return [x for x in self.portions if x.has_rows]

    def facts(self) -> Facts:
        """The facts that must be equal in all processes, or in some."""
        facts: dict[Processes, dict[str, str]] = {}
        rows_vary = self.request.tail != "error"
        for name, part in self.spanning:
            shape = list(map(str, part.value.shape))
            if rows_vary and part.has_rows:
                shape[0] = "rows"
            what = f"{canonical_dtype(part.value)}[{', '.join(shape)}] as {described(part.place)}"
            facts.setdefault(processes_at(sharding_of(part.place)), {})[name] = what
        everybody = facts.setdefault(self.request.processes, {})
        everybody |= {"the loop": self.request.loop, "the option tail=": self.request.tail}
        if rows_vary:
            everybody["the divisor of the number of rows"] = str(self.multiple)
            facts.setdefault(self.sharers, {})["the number of rows"] = str(self.rows)
        return {group: values for group, values in facts.items() if len(group) > 1}

    def kind(self) -> str:
        """Equal for batches of the same kind, whatever their shapes."""
        return digest([[name, str(x.value.dtype), described(x.place)] for name, x in self.spanning])

    def values(self) -> Facts:
        """Checksums of data that more than one process has."""
        facts: dict[Processes, dict[str, str]] = {}
        me = jax.process_index()
        for name, part in self.spanning:
            numbers = _numbers_of(part.value)
            shared = shared_indices(sharding_of(part.place), part.global_shape, me)
            for sharers, indices in shared.items():
                parts = [numbers[part.within(index)] for index in indices]
                number = checksum(parts, canonical_dtype(numbers))
                facts.setdefault(sharers, {})[name] = f"checksum {number}"
        return facts

    def masked(self, real: int | None) -> "Share":
        """The share with a mask, if it may have been padded: `real` rows are the source's."""
        if self.request.tail != "pad":
            return self
        first, mask = self.with_rows[0], np.arange(self.rows or 0) < (real or 0)
        tree = self.leaves.join([part.value for part in self.portions])
        of_mask = of_rows(sharding_of(first.place))
        reader = first.reader if _blocks(of_mask) > 1 else ALONE
        portion = Portion(mask, of_mask, spans=first.spans, reader=reader)
        return replace(self, leaves=split((tree, mask)), portions=[*self.portions, portion])

    def of_rows(self, rows: int, own: Callable[[Any], Any] = lambda value: value) -> "Share":
        """The share with this number of rows: the last ones dropped, or zeros added. `own` makes an
        array independent of the source's buffers.
        """
        portions = [
            replace(part, value=own(_of_rows(part.value, rows) if part.has_rows else part.value))
            for part in self.portions
        ]
        leaves = split(self.leaves.join([part.value for part in portions]))
        return replace(self, leaves=leaves, portions=portions, rows=rows)

    def placed(self, own: bool = False) -> Any:
        """The batch, with its arrays at their targets. The others are copied if the batch shall
        `own` them, unless they may alias.
        """
        leaves = self.leaves
        if own or any(part.spans for part in self.portions):
            leaves = split(leaves.join([_ours(part, own) for part in self.portions]))
        targets = [part.target for part in self.portions]
        options = [Options(alias=part.alias) for part in self.portions]
        placed = place_leaves(leaves, targets, current_world(), options=options, check=False)
        return leaves.join(placed)

    @property
    def is_empty(self) -> bool:
        return self.request.tail == "drop" and self.rows == 0

    @property
    def multiple(self) -> int:
        return math.lcm(*[x.multiple for x in self.with_rows])

    def rounded(self, rows: int) -> int:
        """`rows`, rounded down or up so that they can be split."""
        least = rows // self.multiple * self.multiple
        return least + self.multiple if rows > least and self.request.tail == "pad" else least


def _ours(x: Portion, own: bool) -> Any:
    return copied(x.value) if own and x.target is None and not x.alias else x.assembled()


def look_through(batch: object, request: BatchRequest) -> Share:
    """Resolves the placement of a batch, and finds its faults."""
    leaves = split(batch)
    if len(leaves.arrays) < len(leaves.all):
        leaves = split(as_arrays(batch))
    world = current_world()
    if world.staged or Kind.TRACED in leaves.kinds:
        raise TypeError(
            "a batch needs values, and inside a transformed function there are none yet: use "
            "mylib.filter_shard there"
        )
    alias, misfits = spread_prefix(request.may_alias, leaves, is_flag)
    simple = jax.process_count() == 1 and request.tail == "error"
    fit = _unfit_batch if simple else fits_all
    decision = decide(leaves, request.placement, request.mesh, world, fit=fit)
    faults = [*misfits, *decision.faults]
    portions = list(map(Portion, leaves.arrays, decision.targets, alias))
    share = Share(request, leaves, portions, (jax.process_index(),), None, faults)
    if simple:
        return share
    placed = _to_place(share)
    _set_rows(share, list(placed.values()))
    for i, part in placed.items():
        assert part.target is not None
        shape = tuple(part.value.shape)
        for fault in _unfit_shape(part.target, shape, part.multiple, request.tail):
            faults.append(leaves.at(i, replace(fault, request=show(part.target, None))))
    if request.tail != "error":
        faults += _unequal_rows(share)
    if any(part.reader.count > 1 for part in portions) and any(map(is_rule, decision.entries)):
        faults += _undecided_rules(share, decision.entries)
    return share


def _to_place(share: Share) -> dict[int, Portion]:
    """The arrays to be placed from values of this process, by their positions."""
    placed: dict[int, Portion] = {}
    for i, (part, kind) in enumerate(zip(share.portions, share.leaves.kinds, strict=True)):
        if part.target is None or kind not in (Kind.HOST, Kind.DEVICE):
            continue
        unfit = list(_unfit_for_shares(share.leaves, i, part.target))
        share.faults += unfit
        if not unfit and not _is_over_several(part.value):
            placed[i] = part
    return placed


def _set_rows(share: Share, placed: Sequence[Portion]) -> None:
    """Determines which portions have rows, and which of these this process has."""
    for part in placed:
        part.spans = not sharding_of(part.place).is_fully_addressable
    spanning = [sharding_of(part.place) for part in placed if part.spans]
    readers = readers_of([*share.request.shardings, *spanning])
    reader = readers.get(jax.process_index(), ALONE)
    sharers = tuple(process for process, other in readers.items() if other == reader)
    share.sharers = sharers or share.sharers
    with_rows = [part for part in placed if part.value.ndim]
    with_rows = [part for part in with_rows if _blocks(part.place) > 1] or with_rows
    for part in with_rows:
        part.has_rows = True
        share.rows = with_rows[0].value.shape[0]
    for part in placed:
        if part.spans and _blocks(part.place) > 1:
            part.reader = reader


def _unfit_for_shares(leaves: Leaves, i: int, target: Target) -> Iterator[Fault]:
    value, sharding = leaves.arrays[i], sharding_of(target)
    request = show(target, None)
    for fault in [] if sharding.is_fully_addressable else unfit_rows(sharding):
        yield leaves.at(i, replace(fault, request=request))
    if leaves.kinds[i] is Kind.DEVICE and value.is_deleted():
        reason = "the array has been deleted"
        fix = "if it was donated to a function, make another one"
        yield leaves.at(i, because(reason, fix, request))
    elif _is_over_several(value) and not is_there(value, leaves.kinds[i], target):
        holders = named(processes_at(value.sharding))
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
    if not share.with_rows and share.request.tail == "pad" and not share.faults:
        fix = "leave tail= out, or give a batch with arrays in it"
        yield because("the batch has no rows that could be padded", fix, request)
    first = next((i for i, part in enumerate(share.portions) if part.has_rows), 0)
    for i, portion in enumerate(share.portions):
        if portion.has_rows and portion.value.shape[0] != share.rows:
            name = share.leaves.name(first)
            reason = f"it has {portion.value.shape[0]} rows, and {name} has {share.rows}"
            fix = "give the same number of rows to all arrays that are split by rows"
            yield share.leaves.at(i, because(reason, fix, request))


def _undecided_rules(share: Share, entries: Sequence[object]) -> Iterator[Fault]:
    """Faults of rules that depend on the number of rows: they were called with a share."""
    whole = [
        jax.ShapeDtypeStruct(part.global_shape, canonical_dtype(part.value))
        for part in share.portions
    ]
    leaves, request = share.leaves.with_shapes(whole), share.request
    decision = decide(leaves, request.placement, request.mesh, current_world(), fit=fits_all)
    for i, part in enumerate(share.portions):
        of_share, of_whole = part.target, decision.targets[i]
        if part.spans and is_rule(entries[i]) and of_share != of_whole:
            reason = (
                f"for one process's share it returns {of_share and show(of_share, None)}, for the "
                f"whole, {whole[i].shape}, {of_whole and show(of_whole, None)}"
            )
            fix = "give the result of mylib.resolve for an example of a whole batch"
            yield share.leaves.at(i, because(reason, fix, repr(decision.entries[i])))


def _is_over_several(x: object) -> bool:
    return isinstance(x, jax.Array) and not x.is_fully_addressable


def _blocks(target: Target) -> int:
    return row_blocks(sharding_of(target))


def _numbers_of(x: Any) -> np.ndarray:
    """The numbers of a local array, on the host; for keys, their key data."""
    return np.asarray(jax.random.key_data(x) if is_of_keys(x) else x)


def _of_rows(value: Any, rows: int) -> Any:
    if value.shape[0] == rows:
        return value
    if not rows and not is_of_keys(value):
        return np.zeros((0, *value.shape[1:]), value.dtype)
    numbers = _numbers_of(value)
    fill = np.zeros((max(0, rows - len(numbers)), *numbers.shape[1:]), numbers.dtype)
    numbers = np.concatenate([numbers[:rows], fill])
    if is_of_keys(value):
        return jax.random.wrap_key_data(jnp.asarray(numbers), impl=jax.random.key_impl(value))
    return numbers

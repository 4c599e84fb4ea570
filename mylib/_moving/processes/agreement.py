"""Compares what processes place on devices of several of them, and shares errors between them."""

import functools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from ..._core.errors import Fault, PlacementError, because, in_words
from ..._core.lines import line_of_caller
from ..._core.placement import Target, fill_free, regions_of, sharding_of
from ..._core.text import in_short, show_spec
from ..._core.tree import (
    Kind,
    Leaves,
    canonical_dtype,
    is_of_keys,
    named_texts_of,
    shortened,
    texts_of,
)
from .calls import CommonCall
from .coordination import Processes
from .differences import FIX, Facts, compare, everybodys_faults, faults_in_full
from .groups import digest
from .meeting import meeting, processes_at, processes_of

# Compare whole values at the first call of a kind, and at its next one in each such number of
# meetings.
_EVERY = 100
# By kind of call, in which of these it was last; of so many kinds.
_compared: dict[int, int] = {}
_REMEMBERED = 10_000

# For nodes with data besides their children and fields.
_UNNAMED = because(
    "the data in its nodes, besides their children, differs between them",
    "make the tree in the same way in every process, or place with check=False",
    "the same in all processes",
)
_FIX_ROWS = (
    "pass the same whole value in every process, or this process's own rows to "
    "mylib.data.to_global; where values are meant to differ, place with check=False"
)
_FIX_CODE = "fix the code that raised it, such as a rule; its process shows the traceback"


def agree(
    leaves: Leaves,
    targets: Sequence[Target | None],
    moving: Sequence[int],
    faults: Sequence[Fault],
    check: bool | None,
    meet: Processes = (),
) -> None:
    """Raises the same error in all processes of the arrays' targets, if one of them has found a
    fault, or if they disagree. If `check` is True, or if they `meet` in any case, they also compare
    if nothing must be moved.
    """
    compared = {
        i: fill_free(target, None, len(leaves.arrays[i].shape))
        for i in moving
        if (target := targets[i]) is not None and _comes_from_each(leaves, i, target)
    }
    groups = {i: processes_at(sharding_of(target)) for i, target in compared.items()}
    reached = [
        processes_at(sharding_of(target))
        for kind, target in zip(leaves.kinds, targets, strict=True)
        if check and target is not None and kind is not Kind.ABSTRACT
    ]
    everybody = tuple(sorted({i for group in (*groups.values(), *reached, meet) for i in group}))
    if len(everybody) > 1 and jax.process_index() in everybody:
        compare_all = meeting("placement", everybody)
        with CommonCall(lambda: everybody) as call:
            facts = _facts(leaves, compared, groups)
            outline = {"the outline": digest(texts_of(leaves))}
            brief = {**facts, everybody: {**facts.get(everybody, {}), **outline}}
            kind, now = _kind(leaves, compared), call.turn // _EVERY
            whole = not faults and (check or _compared.get(kind) != now)
            values = _values(leaves, groups if whole else {}, _sum_of_bits)
            difference = compare(compare_all, faults, brief, values)
            if difference is None:
                if len(_compared) == _REMEMBERED:
                    _compared.clear()
                _compared[kind] = now
                return
            named = {**named_texts_of(leaves), **facts.get(everybody, {})}
            full, fix = {**facts, everybody: named}, FIX
            if difference.of_values:
                full, fix = _values(leaves, groups, _described_sum), _FIX_ROWS
            faults = faults_in_full(compare_all, difference, faults, full, fix) or [_UNNAMED]
    if faults:
        raise PlacementError(faults)


@contextmanager
def raised_in_all(processes: Processes) -> Iterator[None]:
    """Raises an error of one process in all that come to compare, before any targets are known."""
    try:
        yield
    except Exception as error:
        is_ours = isinstance(error, PlacementError)
        reason = f"resolving it raised an error: {in_words(error)}"
        foreign = because(reason, _FIX_CODE, "a placement for each array")
        mine = error.faults if is_ours else [foreign]
        try:
            faults = everybodys_faults(meeting("placement", processes, alone=True), mine, {})
        except TimeoutError as absence:
            # Processes with nothing to place don't come, which can't be known while waiting.
            error.add_note(f"(raised in this process alone: {absence})")
            raise error from None
        if is_ours:
            raise PlacementError(faults) from error
        raise


def _comes_from_each(leaves: Leaves, i: int, target: Target) -> bool:
    """Whether each process places its shards of an array from a value of its own."""
    if leaves.kinds[i] in (Kind.HOST, Kind.ABSTRACT):  # abstract: it is read by each
        return True
    return leaves.arrays[i].sharding.device_set != sharding_of(target).device_set


def _facts(leaves: Leaves, targets: Mapping[int, Target], groups: Mapping[int, Processes]) -> Facts:
    """Each leaf's dtype, shape and target; and a checksum of each shard that several processes
    place, since nothing else compares these.
    """
    facts: dict[Processes, dict[str, str]] = {}
    me = jax.process_index()
    for i, group in groups.items():
        if me not in group:
            continue
        x, target = leaves.arrays[i], targets[i]
        name, dtype = leaves.name(i), canonical_dtype(x)
        what = f"{dtype}{list(x.shape)} as {described(target)}"
        facts.setdefault(group, {})[name] = what
        if leaves.kinds[i] is Kind.HOST:
            for sharers, indices in shared_indices(sharding_of(target), x.shape, me).items():
                numbers = checksum([x[index] for index in indices], dtype)
                shared = facts.setdefault(sharers, {})
                shared[name] = f"{shared.get(name, dtype)} (checksum {numbers})"
    return {group: values for group, values in facts.items() if len(group) > 1}


def _kind(leaves: Leaves, targets: Mapping[int, Target]) -> int:
    """Equal for calls at the same place that move arrays of the same shapes to the same targets."""
    arrays = [leaves.arrays[i] for i in targets]
    return hash((line_of_caller(), *((x.shape, x.dtype) for x in arrays), *targets.values()))


def _values(
    leaves: Leaves, groups: Mapping[int, Processes], text_of_value: Callable[[np.ndarray], str]
) -> Facts:
    """Each process's whole value of each array that it and others place, as text."""
    facts: dict[Processes, dict[str, str]] = {}
    for i, group in groups.items():
        x = leaves.arrays[i]
        if len(group) > 1 and jax.process_index() in group and leaves.kinds[i] is not Kind.ABSTRACT:
            x = jax.random.key_data(x) if is_of_keys(x) else x
            numbers = np.asarray(x, canonical_dtype(x))
            facts.setdefault(group, {})[leaves.name(i)] = text_of_value(numbers)
    return facts


def _sum_of_bits(x: np.ndarray) -> str:
    return checksum([x], x.dtype)


def _described_sum(x: np.ndarray) -> str:
    total = x.sum(dtype=np.complex128 if np.iscomplexobj(x) else np.float64)
    checked = f"with the sum {total:.9g} and the checksum {_sum_of_bits(x)}"
    return f"{x.dtype}{list(x.shape)} {checked}"


@functools.lru_cache(maxsize=1024)
def described(target: Target) -> str:
    """Short for thousands of devices, too, and different for different orders of them."""
    sharding = sharding_of(target)
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        ids = [device.id for device in sharding.mesh.devices.flat]
    else:
        ids = sorted(device.id for device in sharding.device_set)
    listed = in_short(ids)
    order = f" (checksum {digest(ids)[:8]})" if listed.endswith("more") else ""
    text = str(target)
    if isinstance(sharding, NamedSharding):
        text = text.replace(str(sharding.spec), show_spec(sharding.spec))
    return f"{shortened(text)} on devices {listed}{order}"


@functools.lru_cache(maxsize=4096)
def shared_indices(
    sharding: Sharding, shape: tuple[int, ...], me: int
) -> dict[Processes, list[tuple[slice, ...]]]:
    """The indices of shards that this process shares with others, by the group that holds them."""
    shared: dict[Processes, list[tuple[slice, ...]]] = {}
    for bounds, devices in regions_of(shape, sharding).items():
        who = processes_of(devices)
        if me in who and len(who) > 1:
            shared.setdefault(who, []).append(tuple(slice(*ends) for ends in bounds))
    return shared


def checksum(arrays: Sequence[Any], dtype: Any) -> str:
    """A checksum of the bits: NaN is equal to itself, and -0.0 isn't 0.0."""
    total = 0
    for x in arrays:
        # Four times as fast as the best of `hashlib`.
        total = zlib.crc32(np.ascontiguousarray(x, dtype).reshape(-1).view(np.uint8).data, total)
    return f"{total:08x}"

"""Comparing what processes place over the devices of several, and telling them of errors."""

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from .._errors import Fault, PlacementError, in_words
from .._placement import Target, fill_free, sharding_of
from .._tree import Kind, Leaves, canonical_dtype, name_of, named_texts_of, texts_of
from .meeting import (
    Facts,
    Processes,
    all_agree,
    digest,
    everybodys_faults,
    faults_in_full,
    meeting,
    processes_of,
)

# Of nodes that keep something beside their children and fields.
_UNNAMED = Fault(
    "",
    None,
    "the same in all processes",
    "what its nodes hold beside their children differs between them",
    "make the tree in the same way in every process, or place with check=False",
)


def agree(
    leaves: Leaves,
    targets: Sequence[Target | None],
    moving: Sequence[int],
    faults: Sequence[Fault],
    check: bool | None,
) -> None:
    """Raises the same error in all processes that would get devices of an array, if one of them
    has found a fault, or they don't mean the same. If `check` is True, they also compare where
    nothing is to be moved.
    """
    wanted = {
        i: fill_free(target, None, len(leaves.arrays[i].shape))
        for i in moving
        if (target := targets[i]) is not None and _comes_from_each(leaves, i, target)
    }
    groups = {i: owners(sharding_of(target)) for i, target in wanted.items()}
    reached = [
        owners(sharding_of(target))
        for kind, target in zip(leaves.kinds, targets, strict=True)
        if check and target is not None and kind is not Kind.ABSTRACT
    ]
    everybody = tuple(sorted({i for group in (*groups.values(), *reached) for i in group}))
    if len(everybody) > 1 and jax.process_index() in everybody:
        facts, meet = _facts(leaves, wanted, groups), meeting("placement", everybody)
        outline = {"the outline": digest(texts_of(leaves))}
        brief = {**facts, everybody: {**facts.get(everybody, {}), **outline}}
        if all_agree(meet, bool(faults), brief):
            return
        named = {**named_texts_of(leaves), **facts.get(everybody, {})}
        faults = faults_in_full(meet, faults, {**facts, everybody: named}) or [_UNNAMED]
    if faults:
        raise PlacementError(faults)


@contextmanager
def told_to_all(mesh: Any, check: bool | None) -> Iterator[None]:
    """What one process finds to be wrong before it knows where anything goes is raised in all
    processes with devices of the mesh, as far as they are on their way to compare. If they aren't,
    it is raised here alone.
    """
    try:
        yield
    except Exception as error:
        others = processes_of(mesh.devices.flat) if isinstance(mesh, Mesh) else ()
        if check is False or len(others) < 2 or jax.process_index() not in others:
            raise
        is_ours = isinstance(error, PlacementError)
        mine = error.faults if is_ours else [_raised(error)]
        try:
            faults = everybodys_faults(meeting("placement", others, alone=True), mine, {})
        except TimeoutError:
            raise error from None
        if is_ours:
            raise PlacementError(faults) from error
        raise


def _raised(error: Exception) -> Fault:
    """An error that is not ours, such as a rule's, for the other processes."""
    mend = "mend what raised it, such as a rule; the process in which it did shows the traceback"
    reason = f"an error was raised on the way to it: {in_words(error)}"
    return Fault("", None, "a placement for each array", reason, mend)


def _comes_from_each(leaves: Leaves, i: int, target: Target) -> bool:
    """Whether each process puts its part of an array from a value of its own."""
    if leaves.kinds[i] is Kind.HOST:
        return True
    return leaves.arrays[i].sharding.device_set != sharding_of(target).device_set


def _facts(leaves: Leaves, targets: Mapping[int, Target], groups: Mapping[int, Processes]) -> Facts:
    """Of each leaf what it is and where it is to go; and a checksum of each part that several
    processes put, since nobody looks at these again.
    """
    facts: dict[Processes, dict[str, str]] = {}
    me = jax.process_index()
    for i, group in groups.items():
        if me not in group:
            continue
        x, target = leaves.arrays[i], targets[i]
        name, dtype = name_of(leaves.paths[i]), canonical_dtype(x)
        what = f"{dtype}{list(x.shape)} as {described(target)}"
        facts.setdefault(group, {})[name] = what
        if leaves.kinds[i] is Kind.HOST:
            for sharers, parts in shared_parts(sharding_of(target), x.shape, me).items():
                numbers = checksum([x[part] for part in parts], dtype)
                said = facts.setdefault(sharers, {})
                said[name] = f"{said.get(name, dtype)} (checksum {numbers})"
    return {group: said for group, said in facts.items() if len(group) > 1}


@functools.lru_cache(maxsize=1024)
def owners(sharding: Sharding) -> Processes:
    return processes_of(sharding.device_set)


@functools.lru_cache(maxsize=1024)
def described(target: Target) -> str:
    sharding = sharding_of(target)
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return f"{target} on devices {[device.id for device in sharding.mesh.devices.flat]}"
    return f"{target} on devices {sorted(device.id for device in sharding.device_set)}"


@functools.lru_cache(maxsize=4096)
def shared_parts(
    sharding: Sharding, shape: tuple[int, ...], me: int
) -> dict[Processes, list[tuple[slice, ...]]]:
    """The parts of an array that this process has in common with others, by all who have them."""
    indices = sharding.devices_indices_map(shape)
    owners: dict[Any, set[int]] = {}
    parts: dict[Any, tuple[slice, ...]] = {}
    for device, index in indices.items():
        part = () if index is None else tuple(index)
        bounds = tuple((s.start, s.stop) for s in part)
        parts[bounds] = part
        owners.setdefault(bounds, set()).add(device.process_index)
    shared: dict[Processes, list[tuple[slice, ...]]] = {}
    for bounds, who in sorted(owners.items()):
        if me in who and len(who) > 1:
            shared.setdefault(tuple(sorted(who)), []).append(parts[bounds])
    return shared


def checksum(parts: Sequence[Any], dtype: Any) -> str:
    """Of the bits: NaN is equal to itself, and -0.0 isn't 0.0."""
    total = hashlib.blake2b(digest_size=8)
    for part in parts:
        numbers = np.ascontiguousarray(part, dtype)
        total.update(numbers.reshape(-1).view(np.uint8).data)
    return total.hexdigest()

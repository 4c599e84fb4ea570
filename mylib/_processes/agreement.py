"""Compares what processes place on devices of several of them, and shares errors between them."""

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from .._errors import Fault, PlacementError, because, in_words
from .._placement import AnyMesh, Target, World, fill_free, regions_of, sharding_of
from .._text import in_short, show_spec
from .._tree import Kind, Leaves, canonical_dtype, named_texts_of, shortened, texts_of
from .coordination import Processes
from .differences import Facts, compare, everybodys_faults, faults_in_full
from .groups import digest
from .meeting import meeting, on_the_way, processes_of

# For nodes with data besides their children and fields.
_UNNAMED = because(
    "the data in its nodes, besides their children, differs between them",
    "make the tree in the same way in every process, or place with check=False",
    "the same in all processes",
)
_FIX_CODE = "fix the code that raised it, such as a rule; its process shows the traceback"


def agree(
    leaves: Leaves,
    targets: Sequence[Target | None],
    moving: Sequence[int],
    faults: Sequence[Fault],
    check: bool | None,
) -> None:
    """Raises the same error in all processes of the arrays' targets, if one of them has found a
    fault, or if they disagree. If `check` is True, they also compare if nothing must be moved.
    """
    compared = {
        i: fill_free(target, None, len(leaves.arrays[i].shape))
        for i in moving
        if (target := targets[i]) is not None and _comes_from_each(leaves, i, target)
    }
    groups = {i: owners(sharding_of(target)) for i, target in compared.items()}
    reached = [
        owners(sharding_of(target))
        for kind, target in zip(leaves.kinds, targets, strict=True)
        if check and target is not None and kind is not Kind.ABSTRACT
    ]
    everybody = tuple(sorted({i for group in (*groups.values(), *reached) for i in group}))
    if len(everybody) > 1 and jax.process_index() in everybody:
        meet = meeting("placement", everybody)
        with on_the_way(everybody):
            facts = _facts(leaves, compared, groups)
            outline = {"the outline": digest(texts_of(leaves))}
            brief = {**facts, everybody: {**facts.get(everybody, {}), **outline}}
        difference = compare(meet, faults, brief)
        if difference is None:
            return
        named = {**named_texts_of(leaves), **facts.get(everybody, {})}
        full = {**facts, everybody: named}
        faults = faults_in_full(meet, difference, faults, full) or [_UNNAMED]
    if faults:
        raise PlacementError(faults)


def processes_of_call(mesh: AnyMesh | None, world: World, check: bool | None = None) -> Processes:
    """The processes of the mesh that a call places arrays on, if they are several, and this one is
    among them: they receive an error that is raised before anything is moved.
    """
    if world.staged or check is False or jax.process_count() == 1:
        return ()
    mesh = world.devices if mesh is None else mesh
    if not isinstance(mesh, Mesh):
        return ()
    processes = owners(NamedSharding(mesh, PartitionSpec()))
    return processes if len(processes) > 1 and jax.process_index() in processes else ()


def one_call(processes: Processes) -> AbstractContextManager[None]:
    """A call that may place arrays. If it is interrupted before it has met the others, theirs
    fails, too.
    """
    return on_the_way(processes, alone=True) if processes else nullcontext()


def raised_in_all(processes: Processes) -> AbstractContextManager[None]:
    """Raises an error of one process in all, before any targets are known. Only processes that come
    to compare get it; without them it is raised here alone.
    """
    return _raised_in_all(processes) if processes else nullcontext()


@contextmanager
def _raised_in_all(processes: Processes) -> Iterator[None]:
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


@functools.lru_cache(maxsize=1024)
def owners(sharding: Sharding) -> Processes:
    return processes_of(sharding.device_set)


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
    total = hashlib.blake2b(digest_size=8)
    for x in arrays:
        numbers = np.ascontiguousarray(x, dtype)
        total.update(numbers.reshape(-1).view(np.uint8).data)
    return total.hexdigest()

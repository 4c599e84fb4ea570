"""`filter_shard` and `filter_device_put`."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import EllipsisType
from typing import Any, TypeVar

import jax
from jax.sharding import Sharding, SingleDeviceSharding
from jaxtyping import PyTree

from ..._core import watched as _watched
from ..._core.compat import UNCOMMITTED, label_of, sharding_under
from ..._core.errors import Fault, PlacementError, because
from ..._core.lines import line_of_caller
from ..._core.placement import (
    AnyMesh,
    Placement,
    Target,
    World,
    current_world,
    default_memory_kind,
    is_here,
    memory_kind,
    memory_space,
    resolve_leaves,
    sharding_of,
    show_mesh,
    unusual_memory_kind,
)
from ..._core.tree import Kind, Leaves, broadcast_prefix, split
from .. import several
from ..several import one_call, raised_in_all
from .eager import move
from .primitive import RoundTrip, place
from .relocation import NOT_HERE, Options, Relocation, rows_of, set_values, with_values
from .staged import constrain, transfer_and_constrain

T = TypeVar("T")
Constrain = Callable[[list[jax.Array], list[Target], World], list[jax.Array]]
Refusal = Callable[[Target], Iterator[Fault]]


def filter_shard(
    tree: T,
    placement: PyTree[Placement],
    /,
    mesh: AnyMesh | None = None,
    *,
    check: bool | None = None,
) -> T:
    """Places the arrays of a PyTree according to `placement`, in any context.

    Outside `jax.jit` the arrays are moved; inside, values of the compiled program are constrained.
    Both work on meshes with Auto, Explicit and mixed axes, under `vmap` and inside `shard_map`, and
    can be differentiated.

    A replacement for `equinox.filter_shard`.

    **Arguments:**

    - `tree`: any PyTree. Anything else than an array is returned as the same object.
    - `placement`: a device, a `jax.sharding.Sharding`, a `Format`, a `PartitionSpec`, None (leave
        alone), a rule (a callable from `mylib.Leaf` to any of these), or a PyTree prefix of
        all of these.
    - `mesh`: the mesh for a `PartitionSpec`; by default the mesh of `jax.set_mesh`.
    - `check`: whether to check that copies are equal. If several processes place values of their
        own on the devices of all of them, they compare by default, on the host, once per call:
        shapes, dtypes and targets; the numbers that more than one process transfers; and the
        structure and static values of the tree (strings, numbers and booleans; only the type of
        anything else). Whole values are compared at the first such call at a line, and at least in
        every 100th. If True, they always are, and the numbers on the devices by
        `mylib.check_replicas`, even if nothing must be moved; if False, nothing is compared.

    **Returns:**

    A tree of the same structure and values. An array that is already at its target is returned as
    the same object; all others share no memory with their source.

    **Raises:**

    `mylib.PlacementError` before anything has moved, naming every leaf that can't be placed as
    requested, or that isn't the same in all processes. A rule's own error in the process where it
    was raised; the other processes raise a `PlacementError` that quotes it. `TimeoutError` if a
    process does not take part in the comparison. `mylib.errors.ReplicaError` if `check` is True
    and copies differ.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=8)
        with jax.set_mesh(mesh):
            model = eqx.nn.MLP(8, 8, 64, 2, key=jax.random.key(0))
            model = mylib.filter_shard(model, P())  # on every device
            # Split between them.
            batch = mylib.filter_shard(np.zeros((32, 8)), P("data"))
        ```
    """
    return _placed(tree, placement, mesh, check, _refuse_memory_kinds, constrain)


def _placed(
    tree: T,
    placement: PyTree[Placement],
    mesh: AnyMesh | None,
    check: bool | None,
    refuse: Refusal,
    how: Constrain,
    options: Callable[[Leaves], Sequence[Options]] | None = None,
) -> T:
    """The tree with its arrays moved to their targets, or constrained by `how`, if `refuse` has no
    objection to that.
    """
    world = current_world()
    with one_call(mesh, world, check) as call:
        leaves = split(tree)
        of_each = None if options is None else options(leaves)
        with raised_in_all(call.processes):
            refusal = refuse if world.staged else None
            targets = resolve_leaves(leaves, placement, mesh, world, refusal)
        if check:
            _refuse_check(world)
        meet = call.processes if call.processes and leaves.has_others else ()
        values = place_leaves(leaves, targets, world, how, of_each, check=check, meet=meet)
        placed = leaves.join(values)
    if check:
        several.check_replicas(placed)
    return placed


def _on_default_device(
    tree: T,
    mesh: AnyMesh | None,
    check: bool | None,
    options: Callable[[Leaves], Sequence[Options]],
) -> T:
    """What `filter_device_put` does without a placement: only NumPy arrays move."""
    if mesh is not None:
        reason = "without a placement there is no PartitionSpec for the mesh"
        fix = "write filter_device_put(tree, PartitionSpec(), mesh=mesh), or leave out mesh="
        raise PlacementError([because(reason, fix, show_mesh(mesh))])
    world, leaves = current_world(), split(tree)
    of_each = options(leaves)
    if check:
        _refuse_check(world)
    here = [
        UNCOMMITTED
        if kind is Kind.HOST
        # Values under a transformation stay, and their cotangents go to `src`.
        else sharding_under(array) or UNCOMMITTED
        if kind is Kind.TRACED and option.source and not world.staged
        else None
        for array, kind, option in zip(leaves.arrays, leaves.kinds, of_each, strict=True)
    ]
    rows = rows_of(leaves.arrays, leaves.kinds, here, of_each, even_there=True)
    move([row for row in rows if row.kind is Kind.HOST])
    _place_traced([row for row in rows if row.kind is Kind.TRACED])
    result = leaves.join(with_values(leaves.arrays, rows))
    if check:
        several.check_replicas(result)
    return result


def _refuse_check(world: World) -> None:
    if world.staged:
        raise TypeError(
            "check=True compares values, and inside a transformed function there are none yet. "
            "Leave it out there, and call mylib.check_replicas on the results"
        )


def place_leaves(
    leaves: Leaves,
    targets: Sequence[Target | None],
    world: World,
    how: Constrain = constrain,
    options: Sequence[Options] | None = None,
    *,
    check: bool | None = None,
    across: bool = False,
    meet: "several.Processes" = (),
) -> list[Any]:
    """The array leaves at their targets, in the world that these were resolved for: constrained by
    `how` in a compiled program, or else moved.

    `check` is that of `filter_shard`; `across` is whether an array on devices of a single process
    is the same one in all; `meet` are processes that compare even if nothing must be moved here.
    """
    rows = rows_of(leaves.arrays, leaves.kinds, targets, options, even_there=world.staged)
    valued = rows
    if Kind.ABSTRACT in leaves.kinds:
        valued = [row for row in rows if row.kind is not Kind.ABSTRACT]
        _place_abstract([row for row in rows if row.kind is Kind.ABSTRACT])
    if world.staged:
        values = how([row.value for row in valued], [row.target for row in valued], world)
        set_values(valued, values)
    elif valued or check or meet:
        _relocate(leaves, targets, valued, check, across, meet)
    placed = with_values(leaves.arrays, rows)
    if not world.staged and options is not None:
        moved = [row.at for row in valued if row.kind is not Kind.TRACED]
        let_go([leaves.arrays[i] for i in moved if options[i].donate], placed)
    return placed


def _place_abstract(rows: Sequence[Relocation]) -> None:
    for row in rows:
        # Not `update`: it can't replace a layout by a sharding.
        array = row.value
        row.value = jax.ShapeDtypeStruct(
            array.shape, array.dtype, sharding=row.target, weak_type=array.weak_type
        )


def transfer(tree: T, placement: PyTree[Placement], /, mesh: AnyMesh | None = None) -> T:
    """`mylib.mpmd.transfer`, which documents it."""
    world = current_world()
    if world.staged:
        raise TypeError(
            "mylib.mpmd.transfer moves arrays between programs, so it can't be part of one. Call "
            "it outside of the compiled function; inside, use mylib.filter_shard"
        )
    leaves = split(tree)
    targets = resolve_leaves(leaves, placement, mesh, world)
    return leaves.join(place_leaves(leaves, targets, world, across=True))


def filter_device_put(
    tree: T,
    placement: "PyTree[Placement] | EllipsisType" = ...,
    /,
    mesh: AnyMesh | None = None,
    *,
    src: PyTree[Any] = None,
    donate: PyTree[bool] = False,
    may_alias: PyTree[bool | None] = None,
    check: bool | None = None,
) -> T:
    """`mylib.filter_shard` as a transfer, with the arguments of `jax.device_put`.

    A replacement for `jax.device_put` for trees that may hold anything. Inside `jax.jit` it also
    moves between memory kinds, and, unlike `jax.device_put`, respects Auto axes.

    **Arguments:**

    - `tree`, `placement`, `mesh`, `check`: as in `mylib.filter_shard`. Without a placement
        NumPy arrays go to JAX's default device, and all others stay where they are; a mesh is then
        an error.
    - `src`: the device or sharding for the cotangents of an eager transfer; by default that of the
        arrays.
    - `donate`: whether to donate the arrays. Their memory is freed or reused, and they can't be
        read any more.
    - `may_alias`: if True, the result may share memory with its source, which saves a copy. Writing
        to a NumPy source, or donating either side, may then change the other.

    `src`, `donate` and `may_alias` may be PyTree prefixes of `tree`. `donate` has no effect on
    traced values, and inside `jax.jit` all three have no effect.

    **Returns:**

    A tree of the same structure and values.

    **Raises:**

    As `mylib.filter_shard`.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=8)
        state = {"step": 3, "weight": jnp.ones((16, 4))}
        state = mylib.filter_device_put(state, P("data"), mesh=mesh, donate=True)
        ```
    """
    options = partial(_options, src=src, donate=donate, may_alias=may_alias)
    if placement is ...:
        return _on_default_device(tree, mesh, check, options)
    return _placed(tree, placement, mesh, check, _refuse_unpinned, transfer_and_constrain, options)


def _relocate(
    leaves: Leaves,
    targets: Sequence[Target | None],
    rows: Sequence[Relocation],
    check: bool | None,
    across: bool,
    meet: "several.Processes",
) -> None:
    """Moves concrete arrays, and those under an eager transformation, if all of them can be."""
    traced = [row for row in rows if row.kind is Kind.TRACED]
    moving = [row for row in rows if row.kind is not Kind.TRACED] if traced else rows
    _mark_crossings(moving, across)
    local = [row.at for row in moving if not row.across]
    faults = _elsewhere(leaves, rows) or _unreadable(leaves, moving)
    if check is not False and (local or check or meet) and jax.process_count() > 1:
        several.agree(leaves, targets, local, faults, check, meet)
    elif faults:
        raise PlacementError(faults)
    _place_traced(traced, across)
    if moving:
        if any(row.donate for row in moving):
            # An array that occurs in the tree more than once is not donated at one occurrence.
            times = Counter(map(id, leaves.arrays))
            for row in moving:
                row.donate = row.donate and times[id(row.value)] == 1
        wanted = [row.target for row in moving]
        move(moving, counted=check is not False)
        if _watched.record is not None:
            _watched.record.placed([row.value for row in moving])
        _label_placed(leaves, moving, wanted)


def _place_traced(rows: Sequence[Relocation], across: bool = False) -> None:
    """Places arrays under an eager transformation."""
    if rows:
        trips = [
            RoundTrip(
                row.target,
                row.source or sharding_under(row.value) or _near(row.target),
                row.alias,
                across,
            )
            for row in rows
        ]
        set_values(rows, place([row.value for row in rows], trips))


def let_go(donated: Sequence[object], still_used: Sequence[object]) -> None:
    """Deletes donated arrays."""
    used = set(map(id, still_used)) if donated else set()
    for array in donated:
        if isinstance(array, jax.Array) and id(array) not in used and not array.is_deleted():
            array.delete()


def _mark_crossings(rows: Sequence[Relocation], across: bool) -> None:
    """Marks the arrays that processes send and receive, rather than each placing a value of its
    own.
    """
    if jax.process_count() > 1:
        for row in rows:
            row.across = (
                row.kind is Kind.DEVICE
                and not row.value.is_deleted()
                and several.crosses(row.value, sharding_of(row.target), always=across)
            )


def _label_placed(leaves: Leaves, rows: Sequence[Relocation], wanted: Sequence[Target]) -> None:
    """Labels arrays with the call that placed them: processes without shards can't see it."""
    if jax.process_count() == 1:
        return
    calls: dict[object, str] = {}
    for row, target in zip(rows, wanted, strict=True):
        if not label_of(row.value):
            holders = several.processes_at(sharding_of(target))
            if holders not in calls:
                calls[holders] = several.next_call(
                    f"placed on {several.named(holders)} in {line_of_caller()}"
                )
            several.set_origin([row.value], f"{leaves.name(row.at)}, {calls[holders]}")


def _near(target: Target) -> Sharding | None:
    """The target of a cotangent whose primal is a NumPy array: it stays where it is, but in the
    default memory, because JAX would reject another memory kind.
    """
    sharding = sharding_of(target)
    if memory_kind(sharding) == default_memory_kind(sharding):
        return None
    return sharding.with_memory_kind(default_memory_kind(sharding))


def _elsewhere(leaves: Leaves, rows: Sequence[Relocation]) -> list[Fault]:
    """Faults of arrays whose targets are devices of a machine that is only described."""
    fix = "place jax.ShapeDtypeStructs, such as those of equinox.filter_eval_shape"
    return [
        leaves.at(row.at, because(NOT_HERE, fix, str(row.target)))
        for row in rows
        if not is_here(sharding_of(row.target))
    ]


def _unreadable(leaves: Leaves, rows: Sequence[Relocation]) -> list[Fault]:
    """Faults of arrays without values, or with values that this process can't read."""
    faults: list[Fault] = []
    several_processes = jax.process_count() > 1
    for row in rows:
        array, target = row.value, row.target
        if row.kind is not Kind.DEVICE:
            continue
        if array.is_deleted():
            reason = "the array has been deleted"
            fix = "if it was donated to a function, use that function's result instead"
        elif several_processes and not row.across and _out_of_reach(array, sharding_of(target)):
            source, destination = (
                several.processes_at(array.sharding),
                several.processes_at(sharding_of(target)),
            )
            reason = (
                f"its shards are on {several.named(source)}, and the target's devices are those of "
                f"{several.named(destination)}"
            )
            fix = "use mylib.mpmd.transfer, which sends one array from process to process"
        else:
            continue
        faults.append(leaves.at(row.at, because(reason, fix, str(target))))
    return faults


def _out_of_reach(array: jax.Array, sharding: Sharding) -> bool:
    if several.is_nowhere_here(array.sharding, sharding):
        return False
    whole_here = array.is_fully_replicated and len(array.addressable_shards) > 0
    readable = array.is_fully_addressable or whole_here
    return not readable and array.sharding.device_set != sharding.device_set


def _refuse_memory_kinds(target: Target) -> Iterator[Fault]:
    kind = unusual_memory_kind(target)
    if kind is not None:
        can_be_staged = memory_space(sharding_of(target)) == jax.memory.Space.Host
        yield because(
            f"filter_shard can't move an array to {kind} memory inside a transformed function",
            "use mylib.filter_device_put there"
            if can_be_staged
            else "move the array outside of the function",
        )


def _refuse_unpinned(target: Target) -> Iterator[Fault]:
    kind = unusual_memory_kind(target)
    if kind not in (None, "pinned_host"):
        yield because(
            f"a compiled program can't put a value in {kind} memory: JAX ignores it there",
            "write memory_kind='pinned_host', or move the array outside of the function",
        )


def _options(
    leaves: Leaves, src: PyTree[Any], donate: PyTree[Any], may_alias: PyTree[Any]
) -> list[Options]:
    """The options of each array."""
    if src is None and donate is False and is_flag(may_alias):
        # One row for all: a thousand would make a call that moves nothing 1.3 times as long.
        return [Options(alias=may_alias)] * len(leaves.arrays)
    sources = broadcast_prefix(src, leaves, _is_source)
    gone, alias = (broadcast_prefix(flags, leaves, is_flag) for flags in (donate, may_alias))
    options = list(map(Options, sources, gone, alias))
    each = enumerate(options)
    faults = [fault for i, option in each for fault in _unfit_options(leaves, i, option)]
    if faults:
        raise PlacementError(faults)
    return [option._replace(source=_as_sharding(option.source)) for option in options]


def _unfit_options(leaves: Leaves, i: int, option: Options) -> Iterator[Fault]:
    flags = f"donate={option.donate!r}, may_alias={option.alias!r}"
    if not (is_flag(option.donate) and is_flag(option.alias)):
        fix = "write True or False, or a prefix of them"
        yield leaves.at(i, because("these are flags", fix, flags))
    elif option.donate and option.alias:
        reason = "a donated array can't share its memory: it is deleted"
        yield leaves.at(i, because(reason, "give one of the two", flags))
    if not _is_source(option.source):
        reason = "src is the device or sharding of the source"
        yield leaves.at(i, because(reason, "give a device or a Sharding", f"src={option.source!r}"))


def is_flag(x: object) -> bool:
    return x is None or isinstance(x, bool)


def _is_source(x: object) -> bool:
    return x is None or isinstance(x, jax.Device | Sharding)


def _as_sharding(source: Any) -> Sharding | None:
    return SingleDeviceSharding(source) if isinstance(source, jax.Device) else source

"""Finds the collectives of a compiled program, in all forms that the compilers write them in."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..._core.errors import AuditError
from .groups import Groups, groups_of, pairs_of, rings_of
from .hlo import Array, Computation, HloModule, Instruction
from .opcodes import Likeness
from .positions import positions
from .short_rings import rings_in
from .targets import TARGETS
from .values import (
    Execution,
    Value,
    behind,
    computed,
    done_of,
    inputs_here,
    runs_of,
    trips,
    unchanged,
    uses_in,
)


@dataclass(frozen=True, eq=False)
class Transfer:
    """One collective of the program: its instruction (the `first` of a chain), the runs of its
    computation, and its groups of devices (for a permutation: pairs).
    """

    kind: str
    first: Instruction
    runs: Sequence[Execution]
    groups: Groups
    arrays: tuple[Array, ...]
    wire_bytes: int
    spelling: str = ""
    asynchronous: bool = False
    # The instructions whose results are the arrays of the result.
    results: tuple[Instruction, ...] = ()
    # Which of the instruction's results they are.
    elements: tuple[int, ...] = (0,)
    # The instructions of a chain, and those whose results are the sum if it adds on its way.
    members: "tuple[Transfer, ...]" = ()
    ends: tuple[Instruction, ...] = ()

    @property
    def done(self) -> Instruction:
        """The instruction whose result is that of the collective."""
        return done_of(self.first)

    @cached_property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.arrays)

    @property
    def times(self) -> int | None:
        """How often it runs in one call of the program."""
        times = [run.times for run in self.runs]
        return None if None in times else sum(n or 0 for n in times)


def transfers(module: HloModule, local: frozenset[str]) -> list[Transfer]:
    """All transfers between devices, in the order of the text."""
    if module.partitions > 1 and module.replicas > 1:
        raise AuditError(
            f"the program has {module.replicas} replicas of {module.partitions} partitions. Only "
            "one of the two is understood"
        )
    runs = runs_of(module)
    single: list[Transfer] = []
    started: set[tuple[str, str | None]] = set()
    repeated: list[Instruction] = []
    for x in module.instructions():
        kind, name = _kind(x, local), x.computation.name
        if kind is None:
            continue
        if name not in runs:
            raise AuditError(f"{x} moves data between devices for each pair of elements")
        if _goes_on(x):
            repeated.append(x)
            continue
        started.add(x.channel)
        single += _transfers(kind, x, runs[name], module.devices)
    for x in repeated:
        if x.channel not in started:
            raise AuditError(f"{x} goes on with a collective that nothing starts")
    return chained(single)


def _kind(x: Instruction, local: frozenset[str]) -> str | None:
    """The kind of collective of an instruction, or None if it moves no data between devices."""
    if x.does == "custom-call" and not x.waits:
        _check_target(x, local)
    return None if x.attributes.get("is_host_transfer") == "true" else x.sends


def _check_target(x: Instruction, local: frozenset[str]) -> None:
    """Raises an error unless a custom call is known not to move data. `local` are more of these."""
    if x.target in local:
        return
    if x.target not in TARGETS:
        raise AuditError(
            f"{x} calls {x.target!r}, which is not in the program: it may move data between "
            f"devices. If it doesn't, pass local=({x.target!r},)"
        )
    settings = x.attributes.get("backend_config", "").replace(" ", "")
    if x.target == "tpu_custom_call" and '"has_communication":true' in settings:
        name = x.op_names[0] if x.op_names else "a kernel"
        raise AuditError(
            f"{x} ({name}) is a kernel that moves data between devices by itself. What it moves is "
            "not in the program; pass local=('tpu_custom_call',) to count everything else"
        )


def _goes_on(x: Instruction) -> bool:
    """Whether this repeats a collective that another instruction has started. The TPU's compiler
    writes it into each fusion that runs in the meantime.
    """
    if not x.operands or not x.computation.fusions:
        return False
    copies = unchanged(Value(x.operand(0)))
    return any(value.made_by.row.window == "start" for value in copies)


def _transfers(
    kind: str, x: Instruction, runs: list[Execution], devices: int
) -> Iterator[Transfer]:
    groups = _groups(kind, x, devices)
    if (groups == groups[:, :1]).all():
        return  # each device alone
    # What `send` returns is a context and a token, too; of a reduce-scatter the operand tells more.
    arrays = tuple(done_of(x).arrays) if x.opcode != "send" else tuple(x.inputs()[0].arrays)
    if x.form == "start" and done_of(x) is x:
        raise AuditError(f"nothing waits for {x}")
    if kind == "reduce-scatter":
        arrays = tuple(array for operand in x.inputs() for array in operand.arrays)

    asynchronous = x.opcode.endswith(("-start", "send")) or any(run.asynchronous for run in runs)
    # Or a fusion starts it.
    asynchronous = asynchronous or any(user.row.window == "start" for user in x.users)
    # A combined all-reduce is split up: gradients may be sharded, and the loss not.
    elements = _elements(done_of(x), len(arrays))
    by_use: dict[bool | None, list[int]] = {}
    for i, users in enumerate(elements):
        fused = _is_scattered(x, users, groups) if kind == "all-reduce" else None
        by_use.setdefault(fused, []).append(i)
    for fused, indices in by_use.items():
        part = tuple(arrays[i] for i in indices)
        sent_as = "reduce-scatter" if fused else kind
        yield Transfer(
            kind=kind if fused is None else "reduce-scatter",
            first=x,
            runs=runs,
            groups=groups,
            arrays=part,
            wire_bytes=wire_bytes(sent_as, sum(array.bytes for array in part), groups.shape[1]),
            spelling=_SPELLINGS[fused],
            asynchronous=asynchronous,
            results=tuple(y for i in indices for y in elements[i]),
            elements=tuple(indices),
        )


_SPELLINGS = {None: "", True: "all-reduce-scatter fusion", False: "all-reduce + dynamic-slice"}
# XLA's name for the loop into which it makes a matrix product and a collective: in each turn it
# multiplies one part while it sends another on.
_WINDOWED = re.compile(r"windowed_dot_general_body_(ag|rs)\b")
_MEANT = {"ag": "all-gather", "rs": "reduce-scatter"}


def chained(all_transfers: list[Transfer]) -> list[Transfer]:
    """The transfers, those that are steps of a larger collective as that one."""
    steps = [t for t in all_transfers if t.kind == "collective-permute"]
    chain_of = {id(step): chain for chain in _looped(steps) for step in chain.members}
    unrolled = _unrolled([t for t in steps if id(t) not in chain_of])
    chain_of |= {id(step): chain for chain in unrolled for step in chain.members}
    return list(dict.fromkeys(chain_of.get(id(transfer), transfer) for transfer in all_transfers))


def _looped(all_steps: list[Transfer]) -> Iterator[Transfer]:
    """The chains of steps in the body of a loop, and of those beside it that belong to them."""
    by_body: dict[Computation, list[Transfer]] = {}
    for transfer in all_steps:
        by_body.setdefault(transfer.first.computation, []).append(transfer)
    for body, steps in by_body.items():
        match = _WINDOWED.search(body.name)
        if match is None or len(body.callers) != 1:
            continue  # permutations of the function's own, which are told as they are
        (loop,) = body.callers
        near = [t for t in by_body.get(loop.computation, ()) if _touches(t, loop)]
        members, turns = [*near, *steps], trips(loop)
        if not turns or any(t.times is None for t in members):
            continue
        sent = len(near) + turns * len(steps)
        # One before or behind the loop is a turn that is peeled off, or sends the last part home.
        whole = _as_one(members, members[0], _MEANT[match[1]], sent, sent)
        if whole is not None:
            yield replace(
                whole,
                runs=[
                    replace(run, times=(run.times or 0) // turns, loops=run.loops[:-1])
                    for run in steps[0].runs
                ],
                asynchronous=True,
                results=tuple(y for member in members for y in member.results),
                ends=(loop,) if match[1] == "rs" else (),
            )


def _as_one(
    members: Sequence[Transfer], like: Transfer, kind: str, sent: int, steps: int
) -> Transfer | None:
    """Permutations as one collective of this kind, which sends `sent` parts in `steps` steps; None
    if they don't go round rings of all devices in equal parts.
    """
    rings = rings_of(like.groups)
    devices = like.first.computation.module.devices
    if rings is None or rings.size < devices or any(t.bytes != like.bytes for t in members):
        return None
    return replace(
        like,
        kind=kind,
        groups=rings,
        arrays=tuple(a._replace(shape=(rings.shape[1], *a.shape)) for a in like.arrays),
        wire_bytes=sent * like.bytes,
        spelling=f"{steps} collective-permutes",
        members=tuple(members),
    )


def _unrolled(steps: list[Transfer]) -> Iterator[Transfer]:
    seen: set[int] = set()
    for ring, end in rings_in([(t.first, t.done) for t in steps]):
        members = [steps[i] for i in ring if i not in seen]
        if not members or any(steps[i].bytes != members[-1].bytes for i in ring):
            continue
        whole = _as_one(members, members[-1], "reduce-scatter", len(members), len(ring))
        # A step less than devices, or one more that brings the sum to its own device.
        if whole is not None and abs(len(ring) - whole.groups.shape[1]) <= 1:
            seen.update(ring)
            yield replace(whole, ends=(end,))


def _touches(transfer: Transfer, loop: Instruction) -> bool:
    """Whether a permutation prepares the input of a loop, or continues with its output."""
    if computed(Value(transfer.first.operand(0))).made_by is loop:
        return True
    begins = loop.operand(0)
    elements = begins.inputs() if begins.opcode == "tuple" else [begins]
    return any(value.made_by is transfer.done for x in elements for value in unchanged(Value(x)))


def wire_bytes(kind: str, size: int, devices: int) -> int:
    """The bytes that each of `devices` sends with the best algorithm for a ring. `size` is that of
    the result; for a reduce-scatter that of its operand.
    """
    share = size * (devices - 1) // devices
    match kind:
        case "all-reduce":
            return 2 * share
        case "collective-permute" | "broadcast":
            return size
    return share


def _groups(kind: str, x: Instruction, devices: int) -> Groups:
    if kind != "collective-permute":
        return groups_of(x.attribute("replica_groups"), devices)
    if x.does == "collective-permute":
        return pairs_of(x.attribute("source_target_pairs"), devices)
    match = re.search(r'_xla_send_recv_source_target_pairs="(\{[\d,{} ]*\})"', x.text)
    if match is None:
        raise AuditError(f"{x} doesn't record which devices it moves data between")
    return pairs_of(match[1], devices)


def _elements(result: Instruction, count: int) -> list[list[Instruction]]:
    """The instructions that return each array of a result."""
    if not result.type.startswith("("):
        return [[result]]
    elements: list[list[Instruction]] = [[] for _ in range(count)]
    if all(user.opcode == "get-tuple-element" for user in result.users):
        for user in result.users:
            elements[user.index].append(user)
    return elements


def _is_scattered(x: Instruction, elements: list[Instruction], groups: Groups) -> bool | None:
    """Whether each device takes only its own share of the result of an all-reduce, so that it is a
    reduce-scatter. None if not; True if the two are one fusion.
    """
    ends = [end for element in elements for end in _ends(element)]
    if not ends or not all(_takes_share(end, whole, groups) for whole, end in ends):
        return None
    # Compilers send such a fusion as a reduce-scatter; the two apart as an all-reduce.
    fused = all(end.computation is x.computation for _, end in ends)
    return fused and bool(x.computation.fusions)


def _ends(x: Instruction) -> Iterator[tuple[Instruction, Instruction]]:
    """The uses of a value that is only passed on: the value there, and the instruction using it."""
    queue = [x]
    for value in queue:
        if value.is_root:
            queue += value.computation.fusions
            if not value.computation.fusions:
                yield value, value
        for user in value.users:
            if user.row.like >= Likeness.ELEMENTS and not user.target:
                queue.append(user)
            elif user.opcode == "fusion":
                queue += uses_in(user, value)
            else:
                yield value, user


def _takes_share(x: Instruction, whole: Instruction, groups: Groups) -> bool:
    """Whether the devices of a group take parts of an array, all that there are. Each part may be
    taken by several of them: by those of other axes.
    """
    if not _takes_own_part(x, whole):
        return False
    (part,), (array,) = x.arrays, whole.arrays
    starts = [positions(start, groups.size) for start in x.inputs()[1:]]
    if any(start is None for start in starts):
        # The place may be in a table, and those of more than ten devices are not in the text.
        return array.size == part.size * groups.shape[1]
    where = np.concatenate([start for start in starts if start is not None], 1)[groups]
    parts = {len(np.unique(each, axis=0)) for each in where}
    return len(parts) == 1 and 1 < min(parts) == array.size / part.size


def _takes_own_part(x: Instruction, whole: Instruction) -> bool:
    """Whether a device takes a part of an array, at a place that depends on the device."""
    is_part = x.opcode == "dynamic-slice" and x.operands[0] == whole.name
    return is_part and any(y.row.of_device for y in behind(x.inputs()[1:], inputs_here))


def is_split_again(transfer: Transfer) -> bool:
    """Whether an array is gathered only for each device to keep another part of it. XLA does so if
    it can't go from one sharding to another, and then warns of an "involuntary full
    rematerialization": https://github.com/jax-ml/jax/issues/18591
    """
    if transfer.kind != "all-gather":
        return False
    ends = [end for result in transfer.results for end in _ends(result)]
    return bool(ends) and all(_takes_own_part(x, whole) for whole, x in ends)

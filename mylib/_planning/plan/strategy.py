"""Strategies: all that a plan decides, and which of them are possible."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from ..._core.known_faults import CONVOLVED
from ..._core.placement import trimmed
from ..._core.text import listed, show_spec
from ..._programs.machines import Machine
from .fixes import MODEL, ContradictionError, Entry, FixedParts, Fixes, Spec, axes_at, axes_of
from .trace import SMALL, ArrayIn, TracedStep, role_of


@dataclass(frozen=True)
class Strategy:
    """A mesh, how weights are kept and used on it, and what layers save.

    - `axes`: the mesh axes and their sizes; the last axis has neighbouring devices.
    - `is_sharded`: whether weights are sharded over the axis "data" (FSDP).
    - `tensor`: the groups of dimensions that are split over the axis "model".
    - `policy`: what layers save: a name in `POLICIES`.
    - `micro_batches`: into how many the step cuts its batch.
    - `saved`: the spec with which the inputs of layers are saved; None: replicated over "model".
    - `fixes`: the specs that were given.
    - `why`: why the step can't use this mesh; empty if it can.
    """

    axes: tuple[tuple[str, int], ...]
    is_sharded: bool
    tensor: tuple[int, ...] = ()
    policy: str = "full"
    micro_batches: int = 1
    saved: Spec | None = None
    fixes: Fixes = Fixes({}, {})
    why: str = ""

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.axes)

    @property
    def rows(self) -> tuple[str, ...]:
        """The axes over which the batch is split."""
        return tuple(axis for axis, _ in self.axes if axis != MODEL)

    @property
    def pieces(self) -> int:
        """Into how many parts the batch is cut: for the devices, and into micro-batches."""
        return math.prod(self.sizes[x] for x in self.rows) * self.micro_batches

    @property
    def over(self) -> tuple[str, ...]:
        """The axes over which weights are sharded."""
        return ("data",) if self.is_sharded else ()

    @property
    def name(self) -> str:
        kinds = {"data": "FSDP" if self.is_sharded else "DP", "replica": "DP", MODEL: "TP"}
        parts = [f"{kind} {self.sizes.get(axis, 1)}" for axis, kind in kinds.items()]
        name = " x ".join(part for part in parts if not part.endswith(" 1")) or "one device"
        if self.saved is not None:
            name += ", splits saved"
        name += "" if self.policy == "full" else f", saves {self.policy}"
        return name if self.micro_batches == 1 else f"{name}, {self.micro_batches} micro-batches"


def strategies(
    traced: TracedStep,
    machine: Machine,
    axes: Mapping[str, int] | None,
    fixed: FixedParts,
) -> Iterator[Strategy]:
    """All strategies for a machine, in one order; with `axes` only those on this mesh."""
    for sizes, is_sharded in meshes(machine, axes):
        turns = traced.step.micro_batches
        strategy = Strategy(sizes or (("data", 1),), is_sharded, (), traced.policy, turns)
        if traced.batch_size % strategy.pieces:
            rows = f"{traced.batch_size} rows of {traced.step.names[traced.step.batch]}"
            rows += f" in {turns} micro-batches" * (turns > 1)
            devices = strategy.pieces // turns
            yield replace(strategy, why=f"{rows} can't be divided over {devices} devices")
            continue
        try:
            strategy = replace(strategy, fixes=fixed.on(traced, strategy.sizes))
            _refuse_wrong_sums(strategy, traced)
            on_mesh = _on_mesh(strategy, traced)
        except ContradictionError as error:
            yield replace(strategy, why=str(error))
            continue
        for candidate in on_mesh:
            yield candidate
            saved = traced.input and traced.input.spec(
                _entry(candidate.rows), MODEL, candidate.sizes.get(MODEL, 1)
            )
            # Other policies save more, which would stay whole.
            if candidate.tensor and saved and traced.policy == "full":
                yield replace(candidate, saved=saved)


def _refuse_wrong_sums(strategy: Strategy, traced: TracedStep) -> None:
    """Raises where compilers make a gradient wrong without a word. Rows of a micro-batch may be on
    some devices though those of the batch are on all; positions may be split over "model".
    """
    batch = f"[{traced.step.batch}]"
    fixed = [spec for path, spec in strategy.fixes.kept.items() if path.startswith(batch)]
    is_split = all(axes_of(spec) >= set(strategy.rows) for spec in fixed)
    for line, rows, is_grouped in traced.program.convolved:
        on_some = not is_split or traced.program.dims.group(rows) not in traced.rows
        if sum((MODEL in strategy.sizes, is_grouped, on_some)) > 1:
            raise ContradictionError(f"{CONVOLVED.what}: {line}")


def _on_mesh(strategy: Strategy, traced: TracedStep) -> list[Strategy]:
    """The strategies on a mesh, which must not contradict what is fixed."""
    parts, candidates = strategy.sizes.get(MODEL, 1), [strategy]
    if parts > 1:
        choices = traced.choices(parts, strategy.fixes.is_whole)
        if not choices:
            raise ContradictionError(_no_group(parts, traced))
        candidates = [
            replace(strategy, tensor=tuple(sorted(x for group in chosen for x in group.groups)))
            for chosen in choices
        ]
    whys = [_contradiction(candidate, traced) for candidate in candidates]
    possible = [candidate for candidate, why in zip(candidates, whys, strict=True) if not why]
    if not possible:
        raise ContradictionError(whys[0])
    return possible[:_SETS]


def _contradiction(strategy: Strategy, traced: TracedStep) -> str:
    """How a strategy contradicts what is fixed; empty if it doesn't."""
    fixes, over = strategy.fixes, set[str]()
    for leaf in traced.leaves if fixes.kept or fixes.used else ():
        name, used = traced.step.called(leaf.path), trimmed(used_spec(leaf, strategy, traced))
        kept = spec_of(leaf, strategy, traced)
        if fixes.used.get(leaf.path, used) != used:
            spec = show_spec(PartitionSpec(*fixes.used[leaf.path]))
            return f"used= fixes {name} at {spec}, and here it is used at {PartitionSpec(*used)}"
        missing = any(not set(axes_at(used, i)) <= set(axes_at(kept, i)) for i in range(len(used)))
        if missing and not leaf.is_data:
            spec = show_spec(PartitionSpec(*kept))
            return f"kept= fixes {name} at {spec}, and here it is used at {PartitionSpec(*used)}"
        over |= set() if leaf.is_data else axes_of(kept)
    fixed = [path in fixes.kept for path in traced.in_models]
    if any(fixed) and strategy.is_sharded and "data" not in over:
        return "kept= shards no weight over 'data'"
    if "data" in over and all(fixed):
        return "" if strategy.is_sharded else "kept= shards weights over 'data'"
    return ""


# Try at most this many sets of groups for the axis "model", those with most bytes first. A guess;
# benchmarks/plan_search.py compares the plan with the best of these, not with other sets.
_SETS = 4
# TPUs have no hosts that are faster inside, so their axis "model" has a limit. It is a guess, twice
# the largest that MaxText publishes.
WIDEST = 32


def meshes(
    machine: Machine, axes: Mapping[str, int] | None
) -> Iterator[tuple[tuple[tuple[str, int], ...], bool]]:
    """Meshes, and whether weights are sharded on them: over all devices, or within hosts;
    with `axes` those of these sizes. The axis "model" is within a host of GPUs.
    """
    requested = None if axes is None else {axis: n for axis, n in axes.items() if n > 1}
    count, is_torus = machine.count, machine.chip.platform == "tpu"
    host = count if is_torus else machine.shape[-1]
    for model in _divisors(count):
        # Tensor parallelism sends in each layer, which pays only over the fast links of a host.
        if model > min(host, WIDEST) or host % model:
            continue
        for data in _divisors(count // model):
            replicas = count // model // data
            within_hosts = not is_torus and data * model == host
            # Replicas of FSDP (HSDP) pay where links inside hosts are faster than between them.
            if replicas > 1 and data > 1 and not within_hosts and requested is None:
                continue
            sizes = {"replica": replicas, "data": data} if data > 1 else {"data": replicas}
            named = {axis: n for axis, n in {**sizes, MODEL: model}.items() if n > 1}
            if requested in (None, named):
                yield tuple(named.items()), data > 1


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _no_group(parts: int, traced: TracedStep) -> str:
    if traced.choices(parts):
        return "kept= or used= leaves no dimensions of weights to split over 'model'"
    limits = sorted({group.limit for group in traced.groups}, reverse=True)[:3]
    largest = f": the largest can be divided into {', '.join(map(str, limits))}" if limits else ""
    return f"no group of dimensions can be divided by {parts}{largest}"


def mesh_of(machine: Machine, sizes: Mapping[str, int]) -> Mesh:
    axes: dict[str, Any] = dict(sizes)
    return machine.mesh(**axes)


def _entry(axes: Sequence[str]) -> Entry:
    """Axes as the entry of a spec."""
    return tuple(axes) if len(axes) > 1 else next(iter(axes), None)


def fix_of(leaf: ArrayIn, strategy: Strategy, traced: TracedStep) -> Spec | None:
    """Where `kept=` fixes an argument, or the weight that it follows."""
    kept = strategy.fixes.kept
    return kept.get(leaf.path, kept.get(traced.followed.get(leaf.path, "")))


def spec_of(leaf: ArrayIn, strategy: Strategy, traced: TracedStep) -> Spec:
    """Where an argument is kept: the rows of data, the groups of the axis "model", and of weights
    the largest other dimension.
    """
    fixed = fix_of(leaf, strategy, traced)
    if fixed is not None:
        return fixed
    spec = [*used_spec(leaf, strategy, traced)]
    if leaf.is_data or leaf.is_small or not strategy.is_sharded:
        return trimmed(spec)
    parts, shape = strategy.sizes["data"], leaf.aval.shape
    first = int(traced.is_stacked(leaf))
    free = [i for i in range(first, len(shape)) if spec[i] is None and shape[i] % parts == 0]
    if free:
        # As `rules.fsdp` chooses, so that the code of a plan can name that rule.
        spec[max(free, key=lambda i: (shape[i], -i))] = "data"
    return trimmed(spec)


def used_spec(leaf: ArrayIn, strategy: Strategy, traced: TracedStep) -> list[Entry]:
    """Where an argument is used: with all its dimensions."""
    spec: list[Entry] = [None] * len(leaf.aval.shape)
    for i, x in enumerate(leaf.groups):
        if leaf.is_data and x in traced.rows and strategy.rows:
            entry: Entry = _entry(strategy.rows)
            size = math.prod(strategy.sizes[axis] for axis in strategy.rows)
        elif x in strategy.tensor:
            entry, size = MODEL, strategy.sizes[MODEL]
        else:
            continue
        # A spec may name an axis once: of a square weight the first dimension is split.
        if entry not in spec and leaf.aval.shape[i] % size == 0:
            spec[i] = entry
    return spec


def reason_of(leaf: ArrayIn, spec: Spec, strategy: Strategy, traced: TracedStep) -> str:
    """Why an argument that isn't fixed is kept where it is."""
    reasons = [_of_entry(leaf, dim, spec[dim], traced) for dim in range(len(spec)) if spec[dim]]
    if strategy.is_sharded and not leaf.is_data and "data" not in spec:
        why = f"no other dimension is a multiple of {strategy.sizes['data']}"
        if leaf.is_small:
            why = f"it has fewer than {SMALL} numbers"
        reasons.append(f"not split over data: {why}")
    return "; ".join(reasons) or "replicated"


def _of_entry(leaf: ArrayIn, dim: int, entry: Entry, traced: TracedStep) -> str:
    if entry != MODEL:
        return (
            "rows of the batch" if leaf.is_data else f"FSDP, by its largest other dimension, {dim}"
        )
    members = next((x.members for x in traced.groups if leaf.groups[dim] in x.groups), [])
    names = {role_of(traced.in_models[path][1]).strip("."): None for path, _ in members}
    return f"over model by dimension {dim}, together with {listed([*names], 3)}"

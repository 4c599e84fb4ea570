"""The candidates of a plan: priced, and the best of them compiled."""

import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from ..._core.errors import AuditError
from ..._core.placement import trimmed
from ..._core.text import show_bytes
from ..._core.tree import is_of_keys
from ..._programs.audit import Report
from ..._programs.machines import Machine, OutOfMemoryError
from ..._training.jit import filter_jit
from .apply import FIXED, Applying, Planned, PlannedFunction
from .calls import argument_of
from .candidate import TIES, Candidate
from .fixes import FixedParts, Spec
from .layers import layers_in
from .matrices import laid_out, specs_in
from .price import Price, Prices, Pricing
from .replaced import Replaced
from .strategy import Strategy, fix_of, mesh_of, reason_of, spec_of, strategies, used_spec
from .trace import ArrayIn, TracedStep

# The part of the memory that a plan leaves free for fragmentation and the runtime. It is a
# guess. Of MaxText's steps on v5e it keeps the published one (12.6 of 15.75 GiB), and rejects one
# that compiles at 15.5 (benchmarks/plan.py).
RESERVE = 0.05
# Candidates whose modelled memory is more than this times the machine's are not compiled. Prices
# were 0.76 to 0.95 of what H100's compiler counts, 0.97 to 1.19 of v5e's, and 0.46 to 1.08 of the
# CPU's (`benchmarks/plan.py --prices` has such rows).
_SURELY = 1.25
_NOT_FIXED = FixedParts()


@dataclass(eq=False)
class LiveCandidate:
    """A candidate while the plan is made: with its trace and its program, which would keep much
    memory alive, and can't be saved. `figures` are what the plan keeps of it.

    `price` is None if the step can't use its mesh. `report` is that of the compiled program, and
    `call` runs it, if the machine is available, and returns the seconds that it took.
    """

    strategy: Strategy
    traced: TracedStep
    figures: Candidate
    price: Price | None = None
    report: Report | None = None
    call: Callable[[], float] | None = None

    @property
    def name(self) -> str:
        return self.figures.name

    @property
    def seconds(self) -> float:
        return math.inf if self.figures.seconds is None else self.figures.seconds

    @property
    def memory(self) -> float:
        return math.inf if self.figures.memory is None else self.figures.memory

    def note(self, **figures: Any) -> None:
        self.figures = replace(self.figures, **figures)


def priced(
    traced: TracedStep,
    machine: Machine,
    room: float,
    axes: dict[str, int] | None = None,
    fixed: FixedParts = _NOT_FIXED,
) -> list[LiveCandidate]:
    """All candidates with a policy, of each mesh the cheapest. Those that can't be have a reason in
    `figures.why`.
    """
    prices = Prices(traced, machine)
    cheapest: dict[str, LiveCandidate] = {}
    for strategy in strategies(traced, machine, axes, fixed):
        figures = Candidate(strategy.name, None, None, None, False, {}, why=strategy.why)
        tried = LiveCandidate(strategy, traced, figures)
        if not strategy.why:
            tried.price = price = Pricing(prices, strategy).price()
            why = too_much(price.memory, room, "by the model of its price")
            tried.note(
                seconds=price.seconds,
                modelled=price.seconds,
                interval=price.interval,
                memory=price.memory,
                parts=dict(price.parts),
                why=why if price.memory > room * _SURELY else "",
            )
        best = cheapest.setdefault(strategy.name, tried)
        if (bool(tried.figures.why), tried.seconds) < (bool(best.figures.why), best.seconds):
            cheapest[strategy.name] = tried
    return list(cheapest.values())


def too_much(needed: float, room: float, by: str) -> str:
    return f"needs {show_bytes(needed)} of {show_bytes(room)} on each device, {by}"


def ordered(tried: Sequence[LiveCandidate]) -> list[LiveCandidate]:
    """The fastest first. Ties go to fewer axes, then to replicated weights, then to less memory."""
    best = min(tried, key=lambda one: one.seconds, default=None)

    def key(one: LiveCandidate) -> tuple[object, ...]:
        assert best is not None
        if not is_tie(one, best):
            return 1, one.seconds, one.name
        simple = len(one.strategy.axes), one.strategy.is_sharded
        return 0, *simple, one.seconds, one.memory, one.name

    return sorted(tried, key=key)


def is_tie(x: LiveCandidate, best: LiveCandidate) -> bool:
    return x.seconds <= best.seconds * (1 + TIES[best.figures.source])


def to_compile(tried: Sequence[LiveCandidate], count: int) -> list[LiveCandidate]:
    """The best, those with other meshes and policies first."""
    by_kind: dict[Hashable, LiveCandidate] = {}
    for one in tried:
        strategy = one.strategy
        kind = strategy.axes, strategy.is_sharded, strategy.policy, strategy.micro_batches
        by_kind.setdefault(kind, one)
    return [*dict.fromkeys([*by_kind.values(), *tried])][:count]


def compiled(
    tried: LiveCandidate, machine: Machine, rated: Machine, room: float, dtype: DTypeLike | None
) -> None:
    """Compiles a candidate for the machine, which judges it. `rated` is the machine with all
    figures.
    """
    step = tried.traced.step
    mesh = mesh_of(machine, tried.strategy.sizes)
    applied = applying(tried, dtype)
    fun = PlannedFunction(step.fun, applied, mesh)
    args = laid_out(step.args, applied.of_matrices.spec_at, mesh)
    try:
        program = fun.lower(*args).compile()
    except OutOfMemoryError as error:
        tried.note(why=too_much(error.fit.needed, error.fit.available, "by its compiler"))
        return
    try:
        report = program.audit(mesh=mesh)
        estimate = report.estimate(rated)
    except AuditError as error:
        tried.note(unread=str(error))
        return
    tried.report = report
    tried.note(compiled=True, seconds=estimate.seconds, interval=estimate.interval)
    if report.memory is not None:
        tried.note(memory=report.memory.peak)
    if tried.memory > room * (1 - RESERVE):
        why = too_much(tried.memory, room, "by its compiler")
        tried.note(why=why)
    if machine.is_here:
        tried.call = _called_with_zeros(program, args, applied, mesh)


def _called_with_zeros(program: Any, args: Any, applied: Applying, mesh: Mesh) -> Any:
    """A function that calls a compiled candidate, and returns the seconds that it took."""
    places = tuple(Planned(applied.arguments[name], name, depth=1) for name in applied.names)
    zeros = filter_jit(lambda: jax.tree.map(_zeros, args), out_shardings=places, mesh=mesh)

    def call() -> float:
        # Arguments are made anew, as the step donates them.
        made = jax.block_until_ready(zeros())
        start = time.perf_counter()
        jax.block_until_ready(eqx.filter(program(*made), eqx.is_array))
        return time.perf_counter() - start

    return call


def _zeros(leaf: object) -> object:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if is_of_keys(leaf):
        return jnp.broadcast_to(jax.random.key(0), leaf.shape)
    return jnp.zeros(leaf.shape, leaf.dtype)


def applying(tried: LiveCandidate, dtype: DTypeLike | None) -> Applying:
    """How a candidate is applied to its step."""
    traced, strategy = tried.traced, tried.strategy
    step, replaced = traced.step, Replaced(traced)
    arguments, reasons = _arguments(traced, strategy)
    used: dict[str, dict[str, Spec]] = {path: {} for path in traced.models}
    for leaf in traced.leaves:
        if leaf.path in traced.in_models:
            role, path = traced.in_models[leaf.path]
            used[role.path][path] = trimmed(used_spec(leaf, strategy, traced))
    alike, states = dict(replaced.alike()), specs_in(traced, strategy)
    results = {result.path: spec_of(leaf, strategy, traced) for result, leaf in alike.items()}
    for state, specs in states.items():
        number, path = argument_of(state)
        arguments[step.names[number]] |= {path + end: spec for end, spec in specs.items()}
        reasons[step.names[number]] |= dict.fromkeys((path + end for end in specs), _OWNED)
        for node in _nodes_replacing(state, alike):
            results |= {node + end: spec for end, spec in specs.items()}
    return Applying(
        names=step.names,
        donated=replaced.donated,
        arguments=arguments,
        results=results,
        used=used,
        reasons=reasons,
        order=tuple(role.path for role in traced.called),
        by_matrix=tuple(states),
        layered={
            path: tuple(map(traced.layers.index, layers_in(role.module, traced.layers)))
            for path, role in traced.models.items()
        },
        layers=traced.layers,
        policy=traced.policy,
        micro_batches=step.micro_batches,
        dtype=dtype,
        saved=strategy.saved,
    )


def _arguments(traced: TracedStep, strategy: Strategy) -> tuple[Any, Any]:
    """Where the arrays of each argument are, and why."""
    names = traced.step.names
    specs: dict[str, dict[str, Spec]] = {name: {} for name in names}
    reasons: dict[str, dict[str, str]] = {name: {} for name in names}
    for leaf in traced.leaves:
        number, path = argument_of(leaf.path)
        name = names[number]
        specs[name][path] = spec = spec_of(leaf, strategy, traced)
        is_fixed = fix_of(leaf, strategy, traced) is not None
        reasons[name][path] = FIXED if is_fixed else reason_of(leaf, spec, strategy, traced)
    return specs, reasons


_OWNED = "by_matrix keeps it with the owners of the matrices"


def _nodes_replacing(node: str, alike: Mapping[ArrayIn, ArrayIn]) -> set[str]:
    """The nodes of the result that are new values of a node of the arguments, by their paths."""
    return {
        result.path.removesuffix(leaf.path.removeprefix(node))
        for result, leaf in alike.items()
        if leaf is not result and leaf.path.startswith(node)
    }

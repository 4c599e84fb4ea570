"""The candidates of a plan: priced, and the best of them compiled."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .._audit import Report
from .._errors import AuditError
from .._jit import filter_jit
from .._placement import trimmed
from .._text import show_bytes
from .._tree import is_of_keys
from ..machines import Machine, OutOfMemoryError
from .apply import Applying, Planned, PlannedFunction
from .calls import argument_of
from .fixes import FixedParts
from .layers import layers_in
from .matrices import laid_out, specs_in
from .price import Price, Prices
from .replaced import Replaced
from .result import TIES, Candidate
from .strategy import (
    Impossible,
    Strategy,
    fix_of,
    mesh_of,
    reason_of,
    spec_of,
    strategies,
    used_spec,
)
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

    `rows` is their number if they can't be divided over the mesh, `report` and `estimated` are
    those of the compiled program, `call` calls it if the machine is available, and `measured` are
    the seconds that a call took. `unread` says what the audit doesn't know of the compiled program,
    so that its figures are unknown.
    """

    name: str
    strategy: Strategy | None = None
    traced: TracedStep | None = None
    price: Price | None = None
    why: str = ""
    rows: int | None = None
    unread: str = ""
    report: Report | None = None
    estimated: tuple[float, tuple[float, float]] | None = None
    call: Callable[..., Any] | None = None
    measured: float | None = None

    @property
    def source(self) -> str:
        """Where its seconds are from."""
        compiled = "modelled" if self.report is None else "compiled"
        return compiled if self.measured is None else "measured"

    @property
    def seconds(self) -> float:
        if self.measured is not None:
            return self.measured
        if self.estimated is not None:
            return self.estimated[0]
        return math.inf if self.price is None else self.price.seconds

    @property
    def memory(self) -> float:
        if self.report is not None and self.report.memory is not None:
            return self.report.memory.peak
        return math.inf if self.price is None else self.price.memory

    def figures(self) -> Candidate:
        price = self.price
        interval = None if price is None else price.interval
        return Candidate(
            name=self.name,
            seconds=None if math.isinf(self.seconds) or self.unread else self.seconds,
            interval=None if self.unread else self.estimated[1] if self.estimated else interval,
            memory=None if math.isinf(self.memory) or self.unread else int(self.memory),
            compiled=self.report is not None or bool(self.unread),
            measured=self.measured,
            modelled=None if price is None else price.seconds,
            parts={} if price is None else dict(price.parts),
            why=self.why,
            unread=self.unread,
        )


def priced(
    traced: TracedStep,
    machine: Machine,
    room: float,
    axes: dict[str, int] | None = None,
    fixed: FixedParts = _NOT_FIXED,
    send_dtypes: Sequence[str] = (),
) -> list[LiveCandidate]:
    """All candidates with a policy, of each mesh the cheapest. Those that can't be have a reason in
    `why`.
    """
    prices = Prices(traced, machine)
    cheapest: dict[str, LiveCandidate] = {}
    for strategy in strategies(traced, machine, axes, fixed, send_dtypes):
        if isinstance(strategy, Impossible):
            cheapest[strategy.name] = LiveCandidate(
                strategy.name, why=strategy.why, rows=strategy.rows
            )
            continue
        price = prices.price(strategy)
        tried = LiveCandidate(strategy.name, strategy, traced, price)
        if price.memory > room * _SURELY:
            tried.why = too_much(price.memory, room, "by the model of its price")
        best = cheapest.setdefault(strategy.name, tried)
        if (bool(tried.why), price.seconds) < (bool(best.why), best.seconds):
            cheapest[strategy.name] = tried
    return list(cheapest.values())


def too_much(needed: float, room: float, by: str) -> str:
    return f"needs {show_bytes(needed)} of {show_bytes(room)} on each device, {by}"


def ordered(tried: Sequence[LiveCandidate]) -> list[LiveCandidate]:
    """The fastest first. Ties go to fewer axes, then to replicated weights, then to weights that
    are not rounded, and then to less memory.
    """
    best = min(tried, key=lambda x: x.seconds, default=None)

    def key(x: LiveCandidate) -> tuple[Any, ...]:
        assert x.strategy is not None and best is not None
        if not is_tie(x, best):
            return 1, x.seconds, x.name
        simple = len(x.strategy.axes), x.strategy.is_sharded, x.strategy.sent is not None
        return 0, *simple, x.seconds, x.memory, x.name

    return sorted(tried, key=key)


def is_tie(x: LiveCandidate, best: LiveCandidate) -> bool:
    return x.seconds <= best.seconds * (1 + TIES[best.source])


def to_compile(tried: Sequence[LiveCandidate], count: int) -> list[LiveCandidate]:
    """The best, those with other meshes and policies first."""
    by_kind: dict[Any, LiveCandidate] = {}
    for x in tried:
        assert x.strategy is not None
        strategy = x.strategy
        kind = strategy.axes, strategy.is_sharded, strategy.policy
        by_kind.setdefault((*kind, strategy.micro_batches, strategy.sent), x)
    return [*dict.fromkeys([*by_kind.values(), *tried])][:count]


def compiled(
    tried: LiveCandidate, machine: Machine, rated: Machine, room: float, dtype: Any
) -> None:
    """Compiles a candidate for the machine, which judges it. `rated` is the machine with all
    figures.
    """
    assert tried.traced is not None and tried.strategy is not None
    step = tried.traced.step
    mesh = mesh_of(machine, tried.strategy.sizes)
    applied = applying(tried, dtype)
    fun = PlannedFunction(step.fun, applied, mesh)
    try:
        program = fun.lower(*laid_out(step.args, applied.of_matrices.spec_at, mesh)).compile()
    except OutOfMemoryError as error:
        tried.why = too_much(error.fit.needed, error.fit.available, "by its compiler")
        return
    try:
        report = program.audit(mesh=mesh)
        estimate = report.estimate(rated)
    except AuditError as error:
        tried.unread = str(error)
        return
    tried.report, tried.estimated = report, (estimate.seconds, estimate.interval)
    if machine.is_here:
        tried.call = program
    if tried.memory > room * (1 - RESERVE):
        tried.why = too_much(tried.memory, room, "by its compiler, and 5 % are kept free")


class Trial:
    """Calls of a compiled candidate on the machine, with zeros."""

    def __init__(self, tried: LiveCandidate, machine: Machine, dtype: Any):
        assert tried.traced is not None and tried.strategy is not None and tried.call is not None
        step, applied = tried.traced.step, applying(tried, dtype)
        mesh = mesh_of(machine, tried.strategy.sizes)
        places = tuple(Planned(applied.arguments[name], name, depth=1) for name in step.names)
        args = laid_out(step.args, applied.of_matrices.spec_at, mesh)
        self.zeros = filter_jit(lambda: jax.tree.map(_zeros, args), out_shardings=places, mesh=mesh)
        self.step = tried.call

    def __call__(self) -> float:
        """The seconds of a call. Arguments are made anew, as it donates them."""
        args = jax.block_until_ready(self.zeros())
        start = time.perf_counter()
        jax.block_until_ready(eqx.filter(self.step(*args), eqx.is_array))
        return time.perf_counter() - start


def _zeros(x: Any) -> Any:
    if not isinstance(x, jax.ShapeDtypeStruct):
        return x
    if is_of_keys(x):
        return jnp.broadcast_to(jax.random.key(0), x.shape)
    return jnp.zeros(x.shape, x.dtype)


def applying(tried: LiveCandidate, dtype: Any) -> Applying:
    """How a candidate is applied to its step."""
    traced, strategy = tried.traced, tried.strategy
    assert traced is not None and strategy is not None
    step, replaced = traced.step, Replaced(traced)
    arguments, reasons, fixed = _arguments(traced, strategy)
    used: dict[str, dict[str, Any]] = {path: {} for path in traced.models}
    for leaf in traced.leaves:
        if leaf.path in traced.in_models:
            role, path = traced.in_models[leaf.path]
            used[role.path][path] = trimmed(used_spec(leaf, strategy, traced))
    alike, states = dict(replaced.alike()), specs_in(traced, strategy)
    results = {x.path: spec_of(leaf, strategy, traced) for x, leaf in alike.items()}
    for state, specs in states.items():
        number, path = argument_of(state)
        arguments[step.names[number]] |= {path + end: spec for end, spec in specs.items()}
        reasons[step.names[number]] |= dict.fromkeys((path + end for end in specs), _OWNED)
        for node in _replacing(state, alike):
            results |= {node + end: spec for end, spec in specs.items()}
    return Applying(
        names=step.names,
        donated=replaced.donated,
        arguments=arguments,
        results=results,
        used=used,
        reasons=reasons,
        fixed=fixed,
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
        send_dtype=strategy.sent,
    )


def _arguments(traced: TracedStep, strategy: Strategy) -> tuple[Any, Any, Any]:
    """Where the arrays of each argument are, and why, and the paths of what `kept=` fixes."""
    names = traced.step.names
    specs: dict[str, dict[str, Any]] = {name: {} for name in names}
    reasons: dict[str, dict[str, str]] = {name: {} for name in names}
    fixed: dict[str, list[str]] = {}
    for leaf in traced.leaves:
        number, path = argument_of(leaf.path)
        name = names[number]
        specs[name][path] = spec = spec_of(leaf, strategy, traced)
        if fix_of(leaf, strategy, traced) is not None:
            fixed.setdefault(name, []).append(path)
            reasons[name][path] = "fixed by kept="
        else:
            reasons[name][path] = reason_of(leaf, spec, strategy, traced)
    return specs, reasons, fixed


_OWNED = "by_matrix keeps it with the owners of the matrices"


def _replacing(node: str, alike: Mapping[ArrayIn, ArrayIn]) -> set[str]:
    """The nodes of the result that are new values of a node of the arguments, by their paths."""
    return {
        x.path.removesuffix(leaf.path.removeprefix(node))
        for x, leaf in alike.items()
        if leaf is not x and leaf.path.startswith(node)
    }

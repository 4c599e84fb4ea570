"""`plan`: the search for a plan."""

import math
import numbers
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.typing import DTypeLike

from ..._core.placement import no_mesh
from ..._core.status import StatusLine
from ..._core.text import listed, show_bytes, show_time
from ..._programs.machines import Machine, here
from .candidate import TIES
from .candidates import (
    RESERVE,
    LiveCandidate,
    applying,
    compiled,
    is_tie,
    ordered,
    priced,
    to_compile,
    too_much,
)
from .fixes import FixedParts
from .layers import layers_in
from .matrices import check_states
from .price import with_figures
from .replaced import Replaced
from .result import Plan
from .strategy import WIDEST, meshes
from .trace import POLICIES, PlanError, PlannedStep, TracedStep, layers_of, trace


# A plan is made on a mesh of its own.
@no_mesh()
def plan(
    fun: Callable[..., object],
    /,
    *args: object,
    machine: Machine | str | None = None,
    layers: type | tuple[type, ...] | None = None,
    axes: Mapping[str, int] | None = None,
    kept: object = None,
    used: object = None,
    memory: float | None = None,
    dtype: DTypeLike | None = None,
    policies: Sequence[str] = ("full", "dots", "all"),
    micro_batches: Sequence[int] = (),
    compile: int = 8,
    budget: float = 600,
    measure: int = 0,
    progress: bool | None = None,
) -> Plan:
    """Finds a mesh, placements and a policy for a step that is written as for one device.

    The step is traced, and the dimensions of its arrays that must be split alike are found from its
    operations. All meshes of the machine, with and without FSDP, tensor parallelism and each policy
    are priced by a model of the machine. The best are compiled for it, though you needn't have it,
    and the fastest that fits by its compiler's own count is chosen. Nothing is placed or run.

    **Arguments:**

    - `fun`: a step, such as of training. It calls the model, an argument that is a Module, and is
        not edited: `plan.jit` replaces these calls by those of `mylib.fully_shard`.
    - `args`: its arguments; abstract ones (`equinox.filter_eval_shape`) are enough. The first one
        that has an array outside of Modules and states is the batch: its first dimension is split
        over the devices.
    - `machine`: a `mylib.machines.Machine` or its name, such as `"h100 x 64"`; by default the
        available devices.
    - `layers`: a class or a tuple of classes, as for `fully_shard`; by default what repeats in the
        model. A model without such layers is one layer.
    - `axes`: the sizes of the mesh axes, of `"replica"`, `"data"` and `"model"`, if they are fixed:
        `dict(data=4, model=2)`. Weights are sharded over `"data"`.
    - `kept`, `used`: what is fixed of where weights are kept and used, as for `fully_shard`: a rule
        or specs for the models that the step calls, or a dict with some for each argument by its
        name. Where a rule returns PASS or None, the plan decides. Moments are kept where their
        weights are. Plans that contradict are not considered; `mylib.rules.where_present` is
        for axes that not every mesh has.
    - `memory`: the bytes that the step may use on each device; by default the machine's.
    - `dtype`: the dtype that layers compute in, as for `fully_shard`.
    - `policies`: what layers may save: `"full"` (only their input), `"dots"` (products without
        batch dimensions), `"all"`; in the host's memory `"offload_inputs"` (their input) and
        `"offload"` (as `"dots"`).
    - `micro_batches`: numbers of micro-batches to choose from, for steps that loop over these. Then
        `fun` is a function of the number that returns the step, and the plan is applied by
        `plan.jit(fun(plan.micro_batches))`.
    - `compile`: how many candidates are compiled at most. With 0 all figures are modelled, no
        compiler is needed, and the plan may not fit.
    - `budget`: seconds for compiling. At least one candidate is compiled; no other is that would
        end later if it takes as long as the longest before it.
    - `measure`: how many of the compiled candidates that fit are run, with zeros and alternately,
        if the machine is available; then measured times decide. This needs as much memory as the
        step.
    - `progress`: whether to write what is compiled to stderr; by default on terminals.

    **Returns:**

    A `mylib.Plan`. Ctrl-C while candidates are compiled or run returns the best so far.

    **Raises:**

    `mylib.errors.PlanError` if nothing fits (by how much the least of all fails), if the batch
    can't be divided, if the step has operations whose dimensions are unknown, or if it calls no
    model; `mylib.machines.CompilerError` if the compiler of the machine is missing;
    `ValueError` if several processes plan for the available devices, and compile.

    !!! Example

        ```python
        def step(batch, model):
            loss = lambda model: jnp.mean(jax.vmap(model)(batch) ** 2)
            grads = eqx.filter_grad(loss)(model)
            return eqx.apply_updates(model, jax.tree.map(lambda g: -g, grads))

        model = eqx.nn.MLP(64, 64, 256, 2, key=jax.random.key(0))
        plan = mylib.plan(step, np.ones((16, 64), np.float32), model, compile=1)
        model = plan.jit(step)(np.ones((16, 64), np.float32), model)
        ```
    """
    target = Machine.of(machine) if isinstance(machine, str) else machine or here()
    if not isinstance(target, Machine):
        raise TypeError(f"plan: machine={machine!r}: write a Machine or its name, 'h100 x 8'")
    limits = {"compile": compile, "budget": budget, "measure": measure}
    _check(policies, axes, memory, micro_batches, limits)
    _check_axes(axes, target)
    _check_place(target, compile, measure)
    rated, is_assumed = with_figures(target)
    room = math.inf if target.memory is None else float(target.memory)
    room = room if memory is None else float(memory)
    with StatusLine(f"planning for {target}: tracing the step", progress) as line:
        steps = _steps(fun, args, micro_batches)
        step = steps[0]
        check_states(step.args)
        classes = _layers(step, layers)
        fixed, sizes = FixedParts(kept, used), None if axes is None else dict(axes)
        each = [(x, policy) for x in steps for policy in policies]
        tried = list[LiveCandidate]()
        for i, (x, policy) in enumerate(each, 1):
            if i > 1:
                line.write(f"planning for {target}: policy {i} of {len(each)}, {policy!r}")
            tried += priced(trace(x, policy, classes, dtype), rated, room, sizes, fixed)
        search = _Search(target, rated, room, dtype, compile, budget)
        ranked, rejected = search.ranked(tried, measure, line)
    if not ranked:
        raise PlanError(_nothing(rejected, search.left, target, room, budget))
    return plan_of(ranked, rejected, target, room, is_assumed, dtype)


def _steps(fun: Callable[..., Any], args: Any, micro_batches: Sequence[int]) -> list[PlannedStep]:
    """The step, for each number of micro-batches."""
    return [PlannedStep.of(fun(n), args, n) for n in micro_batches] or [PlannedStep.of(fun, args)]


def _check_place(target: Machine, compile: int, measure: int) -> None:
    if measure and not target.is_here:
        raise ValueError(
            f"plan: measure={measure}: {target} is unavailable, so nothing can run on it"
        )
    if target.is_here and compile and jax.process_count() > 1:
        raise ValueError(
            f"plan: {jax.process_count()} processes might choose different plans, as each has its "
            "own times. Plan in one process, such as for machine='h100 x 64' on a laptop, save the "
            "plan's as_text(), and read it in all by mylib.Plan.of"
        )


def _check(
    policies: Sequence[str],
    axes: object,
    memory: object,
    micro_batches: object,
    limits: Mapping[str, float],
) -> None:
    given = micro_batches if isinstance(micro_batches, Sequence) else [None]
    if not all(isinstance(n, numbers.Integral) and n is not True and int(n) > 0 for n in given):
        raise TypeError(
            f"plan: micro_batches={micro_batches!r}: write numbers of at least 1, such as (1, 2, 4)"
        )
    unknown = [x for x in policies if x not in POLICIES]
    if unknown or not policies:
        raise ValueError(f"plan: policies={policies!r}: write some of {', '.join(POLICIES)}")
    sizes = axes.values() if isinstance(axes, Mapping) else [axes]
    if axes is not None and not (sizes and all(isinstance(n, int) and n > 0 for n in sizes)):
        raise TypeError(f"plan: axes={axes!r} is no dict of sizes, such as dict(data=4, model=2)")
    if not isinstance(memory, numbers.Real | None):
        raise TypeError(f"plan: memory={memory!r} is no number of bytes, such as 80 * 2**30")
    for name, limit in limits.items():
        if not isinstance(limit, numbers.Real) or limit < 0:
            raise TypeError(f"plan: {name}={limit!r}: write a number of at least 0")
    if limits["measure"] and not limits["compile"]:
        raise ValueError(
            f"plan: measure={limits['measure']} runs compiled candidates, and with compile=0 there "
            "are none"
        )


def _check_axes(axes: Mapping[str, int] | None, target: Machine) -> None:
    if axes is not None and not any(True for _ in meshes(target, axes)):
        named = ", ".join(f"{axis}={n}" for axis, n in axes.items())
        raise PlanError(
            f"axes: no mesh of {target} is considered with {named}. It has {target.count} devices; "
            "the axes of plans are 'data' (rows, and shards of weights), 'replica' (rows) and "
            f"'model' (tensor parallelism: within a host of GPUs, and at most {WIDEST}). For other "
            "axes write the strategy by hand, with mylib.fully_shard"
        )


def _layers(step: PlannedStep, layers: Any) -> tuple[type, ...]:
    if layers is None:
        return layers_of(trace(step, "full", None))
    classes = layers if isinstance(layers, tuple) else (layers,)
    if not classes or not all(isinstance(cls, type) for cls in classes):
        raise TypeError(f"plan: layers={layers!r} is neither a class nor a tuple of classes")
    present = {cls for role in step.roles for cls in layers_in(role.module, classes)}
    missing = [cls.__qualname__ for cls in classes if cls not in present]
    if missing:
        names = " or ".join(missing)
        raise PlanError(f"layers: no argument of the step has a {names} outside of other layers")
    return classes


@dataclass
class _Search:
    """Compiles candidates. `rated` is the machine with all figures, `left` are those that may fit
    and were not compiled.
    """

    target: Machine
    rated: Machine
    room: float
    dtype: DTypeLike | None
    count: int
    budget: float
    is_interrupted: bool = False
    left: Sequence[LiveCandidate] = ()

    def ranked(
        self, tried: Sequence[LiveCandidate], measure: int, line: StatusLine
    ) -> tuple[list[LiveCandidate], list[LiveCandidate]]:
        """The candidates that fit, the best first, and those that don't, the smallest first."""
        for x in tried if not self.count else ():
            # Without a compiler the price decides what fits.
            if not x.figures.why and x.memory > self.room * (1 - RESERVE):
                x.note(why=too_much(x.memory, self.room, "by the model of its price"))
        possible = ordered([x for x in tried if not x.figures.why])
        self.compile(possible, line)
        fitting = ordered([x for x in possible if x.report is not None and not x.figures.why])
        self.measure(fitting[:measure], line)
        self.left = [x for x in possible if not (x.figures.why or x.figures.compiled)]
        ranked = [*ordered(fitting[:measure]), *fitting[measure:]]
        # Its compiler has accepted what can't be read.
        is_unread = any(x.figures.unread for x in self.left)
        if ranked or not self.count or self.is_interrupted or is_unread:
            ranked += self.left
        rejected = sorted((x for x in tried if x.figures.why), key=lambda x: (x.memory, x.name))
        return ranked, rejected

    def compile(self, possible: Sequence[LiveCandidate], line: StatusLine) -> None:
        """Compiles the best. If none of them fits, it goes on with those of least memory."""
        start, longest, best = time.monotonic(), 0.0, math.inf
        chosen = to_compile(possible, self.count)
        others = [one for one in possible if one not in chosen] if self.count else []
        for i, one in enumerate([*chosen, *sorted(others, key=lambda one: one.memory)]):
            begun = time.monotonic()
            # The first is compiled whatever it takes: without any there is no plan.
            if i and begun + longest > start + self.budget:
                return
            if i >= self.count and best < math.inf:
                return
            so_far = "" if best == math.inf else f"; the best so far takes {show_time(best)}"
            line.write(f"compiling {i + 1} of {len(chosen)}: {one.name}{so_far}")
            try:
                compiled(one, self.target, self.rated, self.room, self.dtype)
            except KeyboardInterrupt:
                self.is_interrupted = True
                return
            longest = max(longest, time.monotonic() - begun)
            best = min(best, math.inf if one.figures.why else one.seconds)

    def measure(self, chosen: Sequence[LiveCandidate], line: StatusLine) -> None:
        """Runs candidates in turns, so that what else the machine does slows all alike. The fastest
        of a few calls counts.
        """
        try:
            for turn in range(1 + _CALLS if chosen else 0):
                seconds = list[float]()
                for one in chosen:
                    line.write(f"measuring, {turn} of {_CALLS}: {one.name}")
                    assert one.call is not None
                    seconds.append(one.call())
                # The first call warms up.
                for one, took in zip(chosen if turn else (), seconds, strict=False):
                    least = min(took, one.figures.measured or math.inf)
                    one.note(measured=least, seconds=least)
        except KeyboardInterrupt:
            self.is_interrupted = True


# How often each candidate is called, after a first time. A guess: more take longer.
_CALLS = 5


def _nothing(
    rejected: Sequence[LiveCandidate],
    uncompiled: Sequence[LiveCandidate],
    target: Machine,
    room: float,
    budget: float,
) -> str:
    least = rejected[0]
    if math.isinf(least.memory):
        reasons = listed([f"{one.name}: {one.figures.why}" for one in rejected], 3)
        return f"no plan for {target}: {reasons}"
    free = f"{show_bytes(room * RESERVE)} of them as {RESERVE:.0%} are kept free"
    missing = show_bytes(least.memory - room * (1 - RESERVE))
    helps = ["more devices", "a smaller batch", "micro-batches in the step (micro_batches=)"]
    tried = {one.strategy.policy for one in rejected if one.price is not None}
    helps[:0] = [f'policies=("{one}",)' for one in ("full", "offload_inputs") if one not in tried]
    if uncompiled:
        helps.insert(0, f"a larger budget= than {budget:g} s, as {len(uncompiled)} more are left")
    return (
        f"no plan fits on {target}. The least, {least.name}, {least.figures.why}: {missing} are "
        f"missing, {free}. Fixes: {', '.join(helps[:-1])}, or {helps[-1]}"
    )


def plan_of(
    ranked: Sequence[LiveCandidate],
    rejected: Sequence[LiveCandidate],
    target: Machine,
    room: float,
    is_assumed: bool,
    dtype: DTypeLike | None,
) -> Plan:
    """The plan with the first of these candidates."""
    best = ranked[0]
    stacked = {best.traced.in_models[weight][0].path for weight in best.traced.stacked}
    return Plan(
        machine=target,
        axes=best.strategy.sizes,
        is_sharded=best.strategy.is_sharded,
        chosen=best.figures,
        others=tuple(one.figures for one in ranked[1:]),
        rejected=tuple(one.figures for one in rejected),
        notes=tuple(_notes(ranked, target, is_assumed, best.traced)),
        limit=None if math.isinf(room) else room * (1 - RESERVE),
        stacked=tuple(path for path in best.traced.models if path in stacked),
        applying=applying(best, dtype),
        audit=best.report,
        _planned=best.traced.step,
    )


def _notes(
    ranked: Sequence[LiveCandidate], target: Machine, is_assumed: bool, traced: TracedStep
) -> Iterator[str]:
    first, best = ranked[0], ranked[0].figures
    others = ranked[1:]
    same = [one.name for one in others if one.figures.source == best.source and is_tie(one, first)]
    if same:
        yield f"a tie, within {100 * TIES[best.source]:g} %: {listed(same, 4)}"
    if any(one.seconds < first.seconds for one in others if one.figures.source != best.source):
        yield (
            f"the chosen one was {best.source}. Others were not, and come after it: their modelled "
            "seconds compare only with its modelled seconds"
        )
    for one in ranked:
        if one.figures.unread:
            yield f"{one.name} was compiled, and its figures are modelled: {one.figures.unread}"
    if not (best.compiled or best.unread):
        yield "nothing was compiled: all figures are modelled, and it may not fit"
    if is_assumed:
        chip = target.chip.name
        yield f"{chip} has no data sheet: its rates are assumed, and the seconds tell little"
    if traced.program.counted_once:
        lines = listed(traced.program.counted_once, 2)
        yield f"loops whose length depends on data are counted once: {lines}"
    if traced.program.unpriced:
        lines = listed(traced.program.unpriced, 2)
        yield (
            f"what these kernels compute is unknown, and takes no time here: {lines}. Give "
            "mylib.opaque like=, or pallas_call cost_estimate="
        )
    for group in Replaced(traced).unclear:
        yield (
            f"not donated: {' and '.join(group)}, as a result could be the new value of each. "
            "plan.jit(step, donate=...) takes the names of those that it replaces"
        )

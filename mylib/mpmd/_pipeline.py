"""`pipeline`: a model cut into stages, each on a mesh of its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxtyping import PyTree

from .._compat import jit
from .._errors import Fault, PlacementError, because
from .._functions import Key
from .._placement import entries_of
from .._tree import Arrays
from ._actions import Pass
from ._backward import Var
from ._compile import Programs, compile_stage
from ._inputs import (
    Batch,
    Module,
    Where,
    check_rows,
    read_batch,
    read_stages,
    refuse_tracers,
    tied_groups,
)
from ._schedule import Schedule
from ._stage import (
    Stage,
    Struct,
    boundary,
    chosen,
    shape_of_loss,
    shape_of_result,
)
from ._transfer import handle, transfer

Loss = Callable[[Any, Any], jax.Array]
Place = tuple[int, int]


def pipeline(
    stages: Sequence[Callable[..., Any]],
    loss: Loss,
    *,
    schedule: Schedule,
    tied: Sequence[tuple[Where, Where]] = (),
    checkpoint: bool = False,
) -> "Pipeline":
    """TODO"""
    refuse_tracers(stages)
    modules = read_stages(stages, schedule)
    return Pipeline(modules, loss, schedule, tied_groups(tied, modules), checkpoint)


class Pipeline:
    """The loss of a pipeline and its gradients, as a function of the stages and a batch."""

    def __init__(
        self,
        modules: list[Module],
        loss: Loss,
        schedule: Schedule,
        tied: list[list[Place]],
        checkpoint: bool,
    ):
        self._modules = modules
        self._loss = loss
        self._tied = tied
        self._checkpoint = checkpoint
        self._plans: dict[Any, _Plan] = {}
        self.schedule = schedule

    def __call__(
        self, stages: Sequence[Any], x: PyTree[Any], y: PyTree[Any], /
    ) -> tuple[jax.Array, list[Any]]:
        refuse_tracers(stages, x, y)
        faults: list[Fault] = []
        modules = self._modules
        if len(stages) != len(modules):
            reason = f"the pipeline was made for {len(modules)}"
            mend = "give the stages that it was made for"
            faults.append(because(reason, mend, f"a call with {len(stages)} stages"))
            raise PlacementError(faults)
        arrays = [
            module.arrays_of(stage, faults) for module, stage in zip(modules, stages, strict=True)
        ]
        batch = read_batch(x, "x", modules[0].mesh, faults)
        targets = read_batch(y, "y", modules[-1].mesh, faults)
        rows = check_rows(batch, targets, self.schedule.microbatches, faults)
        if faults:
            raise PlacementError(faults)
        plan = self._plan(batch, targets, rows)
        return _Run(plan, arrays, batch, targets).run()

    def _plan(self, batch: Batch, targets: Batch, rows: int) -> "_Plan":
        structs = (*batch.form.structs, *targets.form.structs)
        types = tuple((x.shape, x.dtype, x.sharding) for x in structs)
        key = batch.fixed, targets.fixed, types
        plan = self._plans.get(key)
        if plan is None:
            chain = _chain(self._modules, self._loss, self.schedule, batch, targets, rows)
            plan = _Plan.of(chain, self.schedule, self._tied, self._checkpoint)
            self._plans[key] = plan
        return plan


def _chain(
    modules: Sequence[Module],
    loss: Loss,
    schedule: Schedule,
    batch: Batch,
    targets: Batch,
    rows: int,
) -> list[Stage]:
    """The stages, with what each of them receives and sends. Only shapes are computed, and the same
    in every process.
    """
    count = schedule.microbatches
    axes = _batch_axes(batch)
    made: list[Stage] = []
    for module, following in zip(modules, [*modules[1:], None], strict=True):
        first = not made
        stage = Stage(
            module.number,
            module.mesh,
            module.form,
            count,
            before=None if first else made[-1].after,
            batch=batch.form if first else None,
        )
        if following is not None:
            structs, outline = shape_of_result(stage)
            after = boundary(structs, outline, stage.mesh, following.mesh, rows // count, axes)
            stage = replace(stage, after=after)
        else:
            stage = replace(stage, targets=targets.form, loss=loss)
            stage = replace(stage, value=_value(stage))
        made.append(stage)
    return made


def _batch_axes(batch: Batch) -> Any:
    """The mesh axes over which the batch is split."""
    for struct in batch.form.structs:
        sharding = struct.sharding
        assert isinstance(sharding, NamedSharding)
        if entries := entries_of(sharding.spec):
            return entries[0]
    return None


def _value(stage: Stage) -> Struct:
    shapes = shape_of_loss(stage)
    if len(shapes) != 1 or shapes[0].shape or not jnp.issubdtype(shapes[0].dtype, jnp.floating):
        told = ", ".join(f"{x.dtype}{x.shape}" for x in shapes) or "no array"
        reason = f"it returns {told}"
        mend = "return a real scalar, such as jnp.mean(...) over the rows of a microbatch"
        raise PlacementError([because(reason, mend, "a loss")])
    (shape,) = shapes
    return Struct((), shape.dtype, sharding=NamedSharding(stage.mesh, P()))


@dataclass(frozen=True, eq=False)
class _Plan:
    """Everything that is made once for batches of one shape. There are programs and numbers of the
    microbatches only for stages on devices of this process.
    """

    stages: list[Stage]
    schedule: Schedule
    programs: dict[int, Programs]
    numbers: dict[int, list[jax.Array]]
    ties: list["_Tie"]

    @classmethod
    def of(
        cls, stages: list[Stage], schedule: Schedule, tied: list[list[Place]], checkpoint: bool
    ) -> "_Plan":
        splits = schedule.splits_backward
        here = [stage for stage in stages if stage.is_here]
        programs = {
            stage.number: compile_stage(stage, splits=splits, checkpoint=checkpoint)
            for stage in here
        }
        numbers = {
            stage.number: [_number(m, stage) for m in range(schedule.microbatches)]
            for stage in here
            if stage.index
        }
        return cls(stages, schedule, programs, numbers, [_Tie.of(x, stages) for x in tied])


def _number(m: int, stage: Stage) -> jax.Array:
    (struct,) = stage.index
    value = np.int32(m)
    return jax.make_array_from_callback((), struct.sharding, lambda _: value, dtype=struct.dtype)


@dataclass(frozen=True, eq=False)
class _Tie:
    """Places that hold one parameter. Its gradient is the sum of theirs."""

    places: list[Place]
    structs: list[Struct]
    # Adds them on the mesh of the first place; None in processes without its devices.
    add: Any

    @classmethod
    def of(cls, places: list[Place], stages: Sequence[Stage]) -> "_Tie":
        structs = [stages[s].module.structs[i] for s, i in places]
        first = structs[0]
        given = [Struct(first.shape, first.dtype, sharding=first.sharding) for _ in places]
        add = None
        if stages[places[0][0]].is_here:
            program = jit(lambda *grads: sum(grads[1:], grads[0]), out_shardings=first.sharding)
            add = program.lower(*given).compile()
        return cls(places, structs, add)


class _State:
    """What a stage holds during a call: its arguments, what its microbatches need, and the sums so
    far.
    """

    def __init__(self, stage: Stage, programs: Programs, numbers: list[jax.Array]):
        self.stage = stage
        self.programs = programs
        self.numbers = numbers
        self.fixed: dict[Var, jax.Array] = {}
        self.held: dict[int, dict[Var, jax.Array]] = {}
        self.loss: Arrays
        self.grads: Arrays
        self.loss, self.grads = programs.zeros()

    def take(self, variables: Sequence[Var], arrays: Sequence[jax.Array]) -> None:
        self.fixed.update(zip(variables, arrays, strict=True))

    def deliver(self, m: int, variables: Sequence[Var], arrays: Sequence[jax.Array]) -> None:
        self.held.setdefault(m, {}).update(zip(variables, arrays, strict=True))

    def forward(self, m: int) -> Arrays:
        variables = self.programs.variables
        if variables.index:
            self.deliver(m, variables.index, [self.numbers[m]])
        sent, self.loss, kept = self.programs.forward(self._reader(m), self.loss)
        self._keep(m, kept, self.programs.after_forward)
        return sent

    def backward(self, m: int) -> Arrays:
        program = self.programs.backward
        if self.programs.weight is None:
            back, self.grads, _ = program(self._reader(m), self.grads)
            self.held.pop(m, None)
            return back
        back, _, kept = program(self._reader(m), [])
        self._keep(m, kept, self.programs.after_backward)
        return back

    def weight(self, m: int) -> None:
        assert self.programs.weight is not None
        _, self.grads, _ = self.programs.weight(self._reader(m), self.grads)
        self.held.pop(m, None)

    def _reader(self, m: int) -> Callable[[Var], jax.Array]:
        held, fixed = self.held.get(m, {}), self.fixed
        return lambda x: held[x] if x in held else fixed[x]

    def _keep(self, m: int, kept: dict[Var, jax.Array], needed: frozenset[Var]) -> None:
        held = {**self.held.get(m, {}), **kept}
        self.held[m] = {x: array for x, array in held.items() if x in needed}


class _Run:
    """One call: goes through the actions of the schedule. Every process goes through all of them,
    and takes part in those that concern its devices.
    """

    def __init__(self, plan: _Plan, arrays: list[Arrays], batch: Batch, targets: Batch):
        self.plan = plan
        self.states: dict[int, _State] = {}
        for s, programs in plan.programs.items():
            state = _State(plan.stages[s], programs, plan.numbers.get(s, []))
            state.take(programs.variables.module, arrays[s])
            self.states[s] = state
        first, last = plan.stages[0], plan.stages[-1]
        # Every process calls this, because processes that share a mesh compare what they place.
        x, y = batch.arrays(first.is_here), targets.arrays(last.is_here)
        if first.is_here:
            self.states[0].take(plan.programs[0].variables.received, x)
        if last.is_here:
            self.states[last.number].take(plan.programs[last.number].variables.targets, y)

    def run(self) -> tuple[jax.Array, list[Any]]:
        calls = {Pass.FORWARD: self._forward, Pass.BACKWARD: self._backward}
        for kind, s, m in self.plan.schedule.order():
            if kind is Pass.WEIGHT:
                if s in self.states:
                    self.states[s].weight(m)
            else:
                calls[kind](s, m)
        grads = [self._grads(stage) for stage in self.plan.stages]
        for tie in self.plan.ties:
            self._tie(tie, grads)
        last = self.plan.stages[-1]
        (value,) = self._here(last).loss if last.number in self.states else _handles([last.value])
        return value, [
            stage.module.outline.treedef.unflatten(_in_places(stage, own))
            for stage, own in zip(self.plan.stages, grads, strict=True)
        ]

    def _here(self, stage: Stage) -> _State:
        return self.states[stage.number]

    def _forward(self, s: int, m: int) -> None:
        stage = self.plan.stages[s]
        sent = self.states[s].forward(m) if stage.is_here else None
        if stage.after is None:
            return
        arrived = self._transfer(s, s + 1, sent, stage.after.sent, stage.after.received)
        if arrived is not None:
            state = self.states[s + 1]
            state.deliver(m, state.programs.variables.received, arrived)

    def _backward(self, s: int, m: int) -> None:
        stage, before = self.plan.stages[s], self.plan.stages[s].before
        back = self.states[s].backward(m) if stage.is_here else None
        if before is None:
            return
        source, target = (chosen(x, before.floating) for x in (before.received, before.sent))
        arrived = self._transfer(s, s - 1, back, source, target)
        if arrived is not None:
            state = self.states[s - 1]
            state.deliver(m, state.programs.variables.cotangents, arrived)

    def _transfer(
        self,
        source: int,
        target: int,
        arrays: Arrays | None,
        here: Sequence[Struct],
        there: Sequence[Struct],
    ) -> Arrays | None:
        """Moves arrays between two stages. None in processes that don't receive them."""
        if source not in self.states and target not in self.states:
            return None
        given = _handles(here) if arrays is None else arrays
        arrived = transfer(given, [x.sharding for x in there])
        return arrived if target in self.states else None

    def _grads(self, stage: Stage) -> dict[int, jax.Array]:
        """The gradients of a stage, by the number of their array."""
        numbers = chosen(range(len(stage.floating)), stage.floating)
        own = self.states[stage.number].grads if stage.is_here else _handles(stage.params)
        return dict(zip(numbers, own, strict=True))

    def _tie(self, tie: _Tie, grads: list[dict[int, jax.Array]]) -> None:
        (s, i), *others = tie.places
        first, *structs = tie.structs
        added = [grads[s][i]]
        for (t, j), struct in zip(others, structs, strict=True):
            arrived = self._transfer(t, s, [grads[t][j]], [struct], [first])
            added += arrived or []
        if tie.add is not None:
            grads[s][i] = tie.add(*added)
        for (t, j), struct in zip(others, structs, strict=True):
            arrived = self._transfer(s, t, [grads[s][i]], [first], [struct])
            if arrived is not None:
                grads[t][j] = arrived[0]


def _handles(structs: Sequence[Any]) -> Arrays:
    return [handle(x.shape, x.dtype, x.sharding) for x in structs]


def _in_places(stage: Stage, grads: dict[int, jax.Array]) -> list[Any]:
    """All leaves of a stage's gradient: None where there is none."""
    flags = stage.module.outline.are_arrays
    numbers = iter(range(len(stage.floating)))
    return [grads.get(next(numbers)) if flag else None for flag in flags]

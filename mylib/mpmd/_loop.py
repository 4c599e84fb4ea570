"""Runs a pipeline: one loop over the actions of its schedule."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._links import handles, next_call, set_origin
from .._processes import in_short
from .._tree import Arrays
from ._actions import Pass
from ._backward import Var
from ._batch import Batch
from ._compile import Programs
from ._plan import Plan, Tie
from ._stage import Stage, Struct, chosen
from ._transfer import transfer


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
        if variables.microbatch:
            self.deliver(m, variables.microbatch, [self.numbers[m]])
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


class Run:
    """One call: goes through the actions of the schedule. Every process goes through all of them,
    and takes part in those that concern its devices.
    """

    def __init__(self, plan: Plan, arrays: list[Arrays], batch: Batch, targets: Batch):
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
        for kind, s, m in self.plan.order:
            if kind is Pass.WEIGHT:
                if s in self.states:
                    self.states[s].weight(m)
            else:
                calls[kind](s, m)
        grads = [self._grads(stage) for stage in self.plan.stages]
        for tie in self.plan.ties:
            self._tie(tie, grads)
        last = self.plan.stages[-1]
        own = self.states.get(last.number)
        (value,) = handles([last.value]) if own is None else own.loss
        if jax.process_count() > 1:
            made = [value, *(x for own in grads for x in own.values())]
            set_origin(made, next_call(_results(self.plan)))
        return value, [
            stage.module.outline.treedef.unflatten(_in_places(stage, own))
            for stage, own in zip(self.plan.stages, grads, strict=True)
        ]

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
        given = handles(here) if arrays is None else arrays
        arrived = transfer(given, [x.sharding for x in there])
        return arrived if target in self.states else None

    def _grads(self, stage: Stage) -> dict[int, jax.Array]:
        """The gradients of a stage, by the number of their array."""
        numbers = chosen(range(len(stage.floating)), stage.floating)
        own = self.states[stage.number].grads if stage.is_here else handles(stage.params)
        return dict(zip(numbers, own, strict=True))

    def _tie(self, tie: Tie, grads: list[dict[int, jax.Array]]) -> None:
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
            elif struct.sharding == first.sharding:
                # One array in two places, as in the processes that have it.
                grads[t][j] = grads[s][i]


def _results(plan: Plan) -> str:
    ids = sorted({device.id for stage in plan.stages for device in stage.mesh.devices.flat})
    return f"the results of a pipeline of {len(plan.stages)} stages on devices {in_short(ids)}"


def _in_places(stage: Stage, grads: dict[int, jax.Array]) -> list[Any]:
    """All leaves of a stage's gradient: None where there is none."""
    flags = stage.module.outline.are_arrays
    numbers = iter(range(len(stage.floating)))
    return [grads.get(next(numbers)) if flag else None for flag in flags]

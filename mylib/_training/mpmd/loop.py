"""Runs a pipeline: one loop over the actions of its schedule."""

from collections.abc import Sequence
from itertools import repeat
from typing import TypeAlias

import jax
from jax.extend.core import Var
from jaxtyping import PyTree

from ..._core.text import in_short
from ..._core.tree import Arrays
from ..._moving.links import handles, next_call, set_origin
from .actions import Pass
from .backward import Atom
from .batch import PipelineBatch
from .compile import Programs
from .plan import PipelinePlan, Tie
from .stage import Stage, Struct, chosen, merged
from .transfer import transfer

# Of each array of a stage, if it has one.
Grads: TypeAlias = list[jax.Array | None]


class _State:
    """What a stage holds during a call: its arguments, what its microbatches need, and the sums so
    far, by pass.
    """

    def __init__(self, programs: Programs, numbers: list[jax.Array], module: Arrays):
        self.programs = programs
        self.numbers = numbers
        self.fixed = dict(zip(programs.variables.module, module, strict=True))
        self.held: dict[int, dict[Atom, jax.Array]] = {}
        self.totals: dict[Pass, Arrays] = programs.zeros()

    def take(self, variables: Sequence[Var], arrays: Sequence[jax.Array]) -> None:
        self.fixed.update(zip(variables, arrays, strict=True))

    def deliver(self, m: int, variables: Sequence[Var], arrays: Sequence[jax.Array]) -> None:
        self.held.setdefault(m, {}).update(zip(variables, arrays, strict=True))

    def run(self, kind: Pass, m: int) -> Arrays:
        """The arrays that a pass over a microbatch sends to another stage."""
        variables = self.programs.variables
        if kind is Pass.FORWARD and variables.microbatch:
            self.deliver(m, variables.microbatch, [self.numbers[m]])
        held, needed = self.held.pop(m, {}), self.programs.needed_after[kind]
        sent, totals, results = self.programs.by_pass[kind](
            lambda x: held[x] if x in held else self.fixed[x], self.totals.get(kind, [])
        )
        self.totals[kind] = totals
        self.held[m] = {x: array for x, array in {**held, **results}.items() if x in needed}
        return sent

    @property
    def grads(self) -> Arrays:
        return self.totals[list(self.programs.by_pass)[-1]]


class Run:
    """One call: goes through the actions of the schedule. Every process goes through all of them,
    and takes part in those that concern its devices.
    """

    def __init__(
        self, plan: PipelinePlan, arrays: list[Arrays], batch: PipelineBatch, targets: PipelineBatch
    ):
        self.plan = plan
        self.states = {
            s: _State(programs, plan.numbers[s], arrays[s]) for s, programs in plan.programs.items()
        }
        first, last = plan.stages[0], plan.stages[-1]
        # Every process calls this, because processes that share a mesh compare what they place.
        x, y = batch.arrays(first.is_here), targets.arrays(last.is_here)
        if first.is_here:
            self.states[0].take(plan.programs[0].variables.received, x)
        if last.is_here:
            self.states[last.number].take(plan.programs[last.number].variables.targets, y)

    def run(self) -> tuple[jax.Array, list[PyTree[jax.Array]]]:
        for kind, s, m in self.plan.order:
            sent = self.states[s].run(kind, m) if s in self.states else None
            if kind is not Pass.WEIGHT:
                self._pass_on(kind, s, m, sent)
        stages = self.plan.stages
        grads = [self._grads(stage) for stage in stages]
        for tie in self.plan.ties:
            self._tie(tie, grads)
        state = self.states.get(stages[-1].number)
        (value,) = handles([stages[-1].value]) if state is None else state.totals[Pass.FORWARD]
        if jax.process_count() > 1:
            results = [value, *(x for of_stage in grads for x in of_stage if x is not None)]
            devices = {x.id for stage in stages for x in stage.mesh.devices.flat}
            where = f"{len(stages)} stages on devices {in_short(sorted(devices))}"
            set_origin(results, next_call(f"the results of a pipeline of {where}"))
        outlines = [stage.module.outline for stage in stages]
        return value, [
            outline.treedef.unflatten(merged(outline.are_arrays, of_stage, repeat(None)))
            for outline, of_stage in zip(outlines, grads, strict=True)
        ]

    def _pass_on(self, kind: Pass, s: int, m: int, sent: Arrays | None) -> None:
        """Sends results to the next stage, or cotangents to the one before."""
        stage, forward = self.plan.stages[s], kind is Pass.FORWARD
        between = stage.after if forward else stage.before
        if between is None or not (forward or between.returns):
            return
        sent_as, received_as, target = between.sent, between.received, s + 1
        if not forward:
            sent_as, received_as = (chosen(x, between.floating) for x in (received_as, sent_as))
            target = s - 1
        arrived = self._transfer(s, target, sent, sent_as, received_as)
        if arrived is not None:
            variables = self.states[target].programs.variables
            into = variables.received if forward else variables.cotangents
            self.states[target].deliver(m, into, arrived)

    def _transfer(
        self,
        source: int,
        target: int,
        arrays: Arrays | None,
        sent_as: Sequence[Struct],
        received_as: Sequence[Struct],
    ) -> Arrays | None:
        """Moves arrays between two stages. None in processes that don't receive them."""
        if source not in self.states and target not in self.states:
            return None
        arrays = handles(sent_as) if arrays is None else arrays
        received = transfer(arrays, [x.sharding for x in received_as])
        return received if target in self.states else None

    def _grads(self, stage: Stage) -> Grads:
        """The gradients of a stage's arrays: None where there is none."""
        grads = self.states[stage.number].grads if stage.is_here else handles(stage.params)
        return merged(stage.floating, grads, repeat(None))

    def _tie(self, tie: Tie, grads: list[Grads]) -> None:
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

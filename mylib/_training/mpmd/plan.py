"""The exchanges between stages and the programs, made once for batches of one shape."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from ..._core.errors import PlacementError, because
from .actions import Action, Pass
from .batch import PipelineBatch
from .compile import Programs, compile_stage
from .modules import Module
from .schedule import Schedule
from .stage import Boundary, Stage, Struct, boundary, shape_of_result
from .ties import Tie, Tied

Loss = Callable[[Any, Any], jax.Array]


def chain(
    modules: Sequence[Module],
    loss: Loss,
    schedule: Schedule,
    batch: PipelineBatch,
    targets: PipelineBatch,
    rows: int,
) -> list[Stage]:
    """The stages, with what each of them receives and sends. Only shapes are computed, and the same
    in every process.
    """
    count = schedule.microbatches
    axes = _batch_axes(batch)
    stages: list[Stage] = []
    before = Boundary(batch.form.outline, (), batch.form.structs, returns=False)
    for module, following in zip(modules, [*modules[1:], None], strict=True):
        stage = Stage(module.number, module.mesh, module.form, count, before)
        try:
            if following is not None:
                structs, outline = shape_of_result(stage)
                before = boundary(structs, outline, stage.mesh, following.mesh, rows // count, axes)
                stage = replace(stage, after=before)
            else:
                stage = replace(stage, targets=targets.form, loss=loss)
                stage = replace(stage, value=_value(stage))
        except Exception as error:  # Perhaps of a user's function.
            error.add_note(f"while stages[{stage.number}] of a pipeline was traced")
            raise
        stages.append(stage)
    return stages


def _batch_axes(batch: PipelineBatch) -> Any:
    """The mesh axes over which the batch is split."""
    for struct in batch.form.structs:
        sharding = struct.sharding
        assert isinstance(sharding, NamedSharding)
        if entries := sharding.spec.partitions:
            return entries[0]
    return None


def _value(stage: Stage) -> Struct:
    shapes, _ = shape_of_result(stage)
    if len(shapes) != 1 or shapes[0].shape or not jnp.issubdtype(shapes[0].dtype, jnp.floating):
        returned = ", ".join(f"{x.dtype}{x.shape}" for x in shapes) or "no array"
        fix = "return a real scalar, such as jnp.mean(...) over the rows of a microbatch"
        raise PlacementError([because(f"it returns {returned}", fix, "a loss")])
    (shape,) = shapes
    return Struct((), shape.dtype, sharding=NamedSharding(stage.mesh, P()))


@dataclass(frozen=True, eq=False)
class PipelinePlan:
    """Everything that is made once for batches of one shape. There are programs only for stages on
    devices of this process.
    """

    stages: list[Stage]
    order: tuple[Action, ...]
    programs: dict[int, Programs]
    ties: list[Tie]

    @classmethod
    def of(
        cls, stages: list[Stage], schedule: Schedule, tied: list[list[Tied]], checkpoint: bool
    ) -> "PipelinePlan":
        splits = schedule.splits_backward
        programs = {
            stage.number: compile_stage(stage, splits=splits, checkpoint=checkpoint)
            for stage in stages
            if stage.is_here
        }
        return cls(stages, schedule.order(), programs, [Tie.of(places, stages) for places in tied])

    def compiled(self) -> dict[tuple[Pass, int], jax.stages.Compiled]:
        """The programs, by pass and stage, without passes that have nothing to compute."""
        return {
            (kind, s): program.compiled
            for s, programs in self.programs.items()
            for kind, program in programs.by_pass.items()
            if program.compiled is not None
        }

    @cached_property
    def numbers(self) -> dict[int, list[jax.Array]]:
        """The numbers of the microbatches, on the meshes of the stages that take them."""
        return {
            s: [
                jax.make_array_from_callback((), x.sharding, lambda _, m=m: np.int32(m), np.int32)
                for x in self.stages[s].microbatch
                for m in range(self.stages[s].microbatches)
            ]
            for s in self.programs
        }

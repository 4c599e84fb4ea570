"""The schedule of a pipeline, as data."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from ..._core.text import counted
from .actions import Action, Pass, needs
from .faults import faults_of
from .simulation import Timed, simulate
from .table import table


@dataclass(frozen=True, repr=False)
class Schedule:
    """What each mesh of a pipeline does, in which order.

    It is checked when it is made: each stage runs forward and backward over each microbatch once,
    on its own mesh, and no mesh waits forever. A forward pass waits for that of the stage before;
    a backward pass for the forward pass of its stage and the backward pass of the stage after; a
    weight pass for the backward pass of its stage.

    The functions beside it write the usual schedules; rows written by hand are just as good. An
    action in a row may be a tuple, such as `("F", 0, 0)`.

    `print(schedule)` shows a table of it, as if all actions took the same time.

    **Attributes:**

    - `name`: what tables and errors call it.
    - `stages`: the number of pieces that the model is cut into.
    - `meshes`: the number of meshes. Stage `s` runs on mesh `s % meshes`.
    - `microbatches`: the number of pieces that a batch is cut into.
    - `rows`: for each mesh, its actions, a `mylib.mpmd.Action` each, in order.

    **Raises:**

    `ValueError`, which lists everything that is wrong: actions that are missing, repeated or on the
    wrong mesh, and for a deadlock where each mesh is stuck and what it waits for.

    !!! Example

        ```python
        schedule = mylib.mpmd.Schedule(
            name="one microbatch at a time",
            stages=2,
            meshes=2,
            microbatches=2,
            rows=(
                (("F", 0, 0), ("B", 0, 0), ("F", 0, 1), ("B", 0, 1)),
                (("F", 1, 0), ("B", 1, 0), ("F", 1, 1), ("B", 1, 1)),
            ),
        )
        assert schedule.bubble() == 0.5
        assert schedule.live() == (1, 1)
        assert mylib.mpmd.one_f_one_b(2, 2).live() == (2, 1)
        ```
    """

    name: str
    stages: int
    meshes: int
    microbatches: int
    rows: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        rows = tuple(tuple(Action(Pass(k), s, m) for k, s, m in row) for row in self.rows)
        object.__setattr__(self, "rows", rows)
        if faults := faults_of(self.stages, self.meshes, self.microbatches, rows):
            raise ValueError("\n  ".join([f"the schedule {self.name!r} can't be run:", *faults]))

    @cached_property
    def splits_backward(self) -> bool:
        """Whether weight passes are separate: backward passes then compute only the gradient of
        their stage's input.
        """
        return any(action.kind is Pass.WEIGHT for row in self.rows for action in row)

    def mesh_of(self, stage: int) -> int:
        """The mesh that runs `stage`."""
        return stage % self.meshes

    def order(self) -> tuple[Action, ...]:
        """All actions in an order in which a single process can run them, one after another. It is
        that of their starts in `timeline()`.
        """
        lines = enumerate(self.timeline())
        starts = [(start, mesh, action) for mesh, line in lines for start, _, action in line]
        return tuple(action for _, _, action in sorted(starts))

    def timeline(
        self,
        forward: float = 1.0,
        backward: float | None = None,
        weight: float = 1.0,
        send: float = 0.0,
    ) -> list[list[Timed]]:
        """When each mesh does what, by simulation.

        **Arguments:**

        - `forward`, `backward`, `weight`: how long a pass of one stage takes, in any unit. By
            default, a backward pass takes 2, or 1 if weight passes are separate.
        - `send`: how long a result is on its way to another mesh. Neither of the two is busy
            meanwhile.

        **Returns:**

        For each mesh, a list of `(start, end, action)`.

        **Raises:**

        `ValueError` if a pass takes no time, or `send` is negative.
        """
        if backward is None:
            backward = 1.0 if self.splits_backward else 2.0
        durations = {Pass.FORWARD: forward, Pass.BACKWARD: backward, Pass.WEIGHT: weight}
        if min(durations.values()) <= 0 or send < 0:
            arguments = f"{forward=}, {backward=}, {weight=}, {send=}"
            raise ValueError(f"passes take time, and sending isn't negative: {arguments}")
        return simulate(
            self.rows,
            lambda action: needs(action, self.stages),
            lambda action: durations[action.kind],
            send,
        )

    def bubble(
        self,
        forward: float = 1.0,
        backward: float | None = None,
        weight: float = 1.0,
        send: float = 0.0,
    ) -> float:
        """How much of the time the meshes are idle, from the first start to the last end.

        **Arguments:**

        - `forward`, `backward`, `weight`, `send`: as for `timeline`.

        **Returns:**

        A fraction, the average of the meshes.
        """
        lines = self.timeline(forward, backward, weight, send)
        busy = sum(end - start for line in lines for start, end, _ in line)
        whole = len(lines) * max(line[-1][1] for line in lines)
        # Sums of floats may differ in the last digit.
        return max(0.0, 1 - busy / whole)

    def live(self) -> tuple[int, ...]:
        """The most activations that each mesh holds at once, in units of one stage and one
        microbatch. A forward pass begins to hold them; the backward pass releases them, or the
        weight pass if it is separate.
        """
        last = Pass.WEIGHT if self.splits_backward else Pass.BACKWARD
        change = {Pass.FORWARD: 1, last: -1}
        return tuple(
            max(accumulate(change.get(action.kind, 0) for action in row)) for row in self.rows
        )

    def __str__(self) -> str:
        where = f"{counted(self.stages, 'stage')} on {counted(self.meshes, 'mesh')}"
        live = counted(max(self.live()), "activation")
        return (
            f"{self.name}: {where}, {counted(self.microbatches, 'microbatch')}\n"
            f"bubble {self.bubble():.1%}, at most {live} on a mesh\n\n"
            f"{table(self.timeline(1.0, 1.0, 1.0), self.stages == self.meshes)}"
        )

    def __repr__(self) -> str:
        sizes = f"stages={self.stages}, meshes={self.meshes}, microbatches={self.microbatches}"
        return f"Schedule({self.name!r}, {sizes})"

"""The usual schedules. In all of them a stage runs its backward passes, and its weight passes, in
the order of the microbatches, so that all add the gradients up in the same order.
"""

from collections.abc import Sequence

from .actions import Action, Pass
from .schedule import Schedule


def gpipe(stages: int, microbatches: int) -> Schedule:
    """GPipe (Huang et al. 2019): all forward passes, then all backward passes.

    With `p` stages and `m` microbatches the bubble is `(p - 1) / (m + p - 1)`, and each mesh holds
    the activations of all microbatches.

    **Arguments:**

    - `stages`: the number of stages, each on a mesh of its own.
    - `microbatches`: the number of microbatches.

    **Returns:**

    A `mylib.mpmd.Schedule`.

    !!! Example

        ```python
        schedule = mylib.mpmd.gpipe(stages=4, microbatches=8)
        assert round(schedule.bubble(), 3) == round(3 / 11, 3)
        assert schedule.live() == (8, 8, 8, 8)
        ```
    """
    rows = [_row(stage, stages, microbatches, microbatches) for stage in range(stages)]
    return Schedule("GPipe", stages, stages, microbatches, tuple(rows))


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """1F1B (PipeDream-Flush, Narayanan et al. 2021): after a few forward passes, forward and
    backward passes alternate.

    The bubble is that of GPipe, but stage `s` of `p` holds the activations of at most `p - s`
    microbatches.

    **Arguments:**

    - `stages`: the number of stages, each on a mesh of its own.
    - `microbatches`: the number of microbatches.

    **Returns:**

    A `mylib.mpmd.Schedule`.

    !!! Example

        ```python
        schedule = mylib.mpmd.one_f_one_b(stages=4, microbatches=8)
        assert round(schedule.bubble(), 3) == round(3 / 11, 3)
        assert schedule.live() == (4, 3, 2, 1)
        ```
    """
    rows = [_row(stage, stages, microbatches, stages - 1 - stage) for stage in range(stages)]
    return Schedule("1F1B", stages, stages, microbatches, tuple(rows))


def interleaved(meshes: int, microbatches: int, chunks: int) -> Schedule:
    """Interleaved 1F1B, as in Megatron-LM (Narayanan et al. 2021): each mesh has several stages,
    and mesh `i` of `p` has the stages `i`, `i + p`, `i + 2 * p`, ...

    With `m` microbatches and `v` chunks the bubble is `(p - 1) / (v * m + p - 1)`: smaller than
    that of 1F1B, for more transfers and more activations. A mesh's stages are smaller, too: compare
    `1 / v` of the activations with those of the other schedules.

    **Arguments:**

    - `meshes`: the number of meshes.
    - `microbatches`: the number of microbatches, a multiple of `meshes`.
    - `chunks`: the number of stages on each mesh. With one, this is 1F1B.

    **Returns:**

    A `mylib.mpmd.Schedule` of `meshes * chunks` stages.

    **Raises:**

    `ValueError` if `microbatches` isn't a multiple of `meshes`.

    !!! Example

        ```python
        schedule = mylib.mpmd.interleaved(meshes=4, microbatches=8, chunks=2)
        assert schedule.stages == 8
        assert round(schedule.bubble(), 3) == round(3 / 19, 3)
        assert schedule.live() == (11, 9, 7, 5)
        ```
    """
    for name, size in {"meshes": meshes, "chunks": chunks}.items():
        if size < 1:
            raise ValueError(f"interleaved: {name}={size} must be at least 1")
    if microbatches % meshes:
        raise ValueError(
            f"interleaved: microbatches={microbatches} isn't a multiple of meshes={meshes}, as the "
            f"stages of a mesh take turns after every {meshes} microbatches; use a multiple, or "
            "one_f_one_b"
        )
    # With several stages, one more forward pass for each mesh after this one: the transfers there
    # and back then have the time of a pass.
    extra = [0 if chunks == 1 else meshes - 1 - i + (chunks - 1) * meshes for i in range(meshes)]
    rows = [
        _row(mesh, meshes, microbatches, meshes - 1 - mesh + extra[mesh], chunks)
        for mesh in range(meshes)
    ]
    return Schedule("interleaved 1F1B", meshes * chunks, meshes, microbatches, tuple(rows))


def zero_bubble(stages: int, microbatches: int) -> Schedule:
    """ZB-H1 (Qi et al. 2023): 1F1B whose backward passes compute only the gradient of the input,
    which the stage before waits for. The gradients of the weights, which nobody waits for, are
    computed when meshes would be idle.

    With at least as many microbatches as stages, each mesh is idle for
    `(p - 1) * (forward + backward - weight)`, if a weight pass takes no longer than each of the
    others: a third of 1F1B's bubble if all three take the same time. No mesh holds more activations
    than the first one does with 1F1B: those of `p` microbatches.

    **Arguments:**

    - `stages`: the number of stages, each on a mesh of its own.
    - `microbatches`: the number of microbatches.

    **Returns:**

    A `mylib.mpmd.Schedule` with weight passes.

    !!! Example

        ```python
        schedule = mylib.mpmd.zero_bubble(stages=4, microbatches=8)
        assert round(schedule.bubble(), 3) == round(3 / 27, 3)
        assert schedule.live() == (4, 4, 4, 4)
        ```
    """
    rows = [_zero_bubble(stage, stages, microbatches) for stage in range(stages)]
    return Schedule("ZB-H1", stages, stages, microbatches, tuple(rows))


_Row = tuple[Action, ...]


def _row(mesh: int, meshes: int, microbatches: int, warmup: int, chunks: int = 1) -> _Row:
    """First `warmup` forward passes, then one forward and one backward in turns, then the rest."""

    # Groups of as many microbatches as meshes run through all of a mesh's stages before the next.
    def turns(kind: Pass, order: Sequence[int]) -> list[Action]:
        return [
            Action(kind, chunk * meshes + mesh, i)
            for first in range(0, microbatches, meshes)
            for chunk in order
            for i in range(first, min(first + meshes, microbatches))
        ]

    forward = turns(Pass.FORWARD, range(chunks))
    backward = turns(Pass.BACKWARD, range(chunks)[::-1])
    pairs = list(zip(forward[warmup:], backward, strict=False))
    alternating = [action for pair in pairs for action in pair]
    return (*forward[:warmup], *alternating, *backward[len(pairs) :])


def _zero_bubble(stage: int, stages: int, microbatches: int) -> _Row:
    """1F1B's row. Stage `s` is `s` weight passes late: it has as many forward passes fewer in its
    warm-up than the first stage, and so holds as many activations.
    """
    row: list[Action] = []
    for action in _row(stage, stages, microbatches, stages - 1 - stage):
        row.append(action)
        if action.kind is Pass.BACKWARD and action.microbatch >= stage:
            row.append(Action(Pass.WEIGHT, stage, action.microbatch - stage))
    late = range(max(0, microbatches - stage), microbatches)
    return (*row, *(Action(Pass.WEIGHT, stage, i) for i in late))

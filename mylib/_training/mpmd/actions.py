"""An action of a mesh in a pipeline: a pass of one stage over one microbatch."""

import enum
from typing import NamedTuple


class Pass(enum.StrEnum):
    """The kinds of passes over a stage.

    **Attributes:**

    - `FORWARD`: `"F"`, computes the stage's output and keeps its activations.
    - `BACKWARD`: `"B"`, computes the gradients of the stage's input and weights. In a schedule that
        has `WEIGHT`, only the gradient of the input.
    - `WEIGHT`: `"W"`, computes the gradients of the weights.

    !!! Example

        ```python
        order = mylib.mpmd.one_f_one_b(stages=2, microbatches=2).order()
        kinds = {action.kind for action in order}
        assert kinds == {mylib.mpmd.Pass.FORWARD, mylib.mpmd.Pass.BACKWARD}
        ```
    """

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"


class Action(NamedTuple):
    """One pass of one stage over one microbatch. As text it is `F2.0`: the forward pass of stage 2
    over microbatch 0.

    **Attributes:**

    - `kind`: a `mylib.mpmd.Pass`.
    - `stage`, `microbatch`: their numbers, from 0.

    !!! Example

        ```python
        action = mylib.mpmd.Action(mylib.mpmd.Pass.FORWARD, 2, 0)
        assert str(action) == "F2.0"
        ```
    """

    kind: Pass
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


def needs(action: Action, stages: int) -> list[Action]:
    """The actions whose results an action uses."""
    kind, stage, microbatch = action
    if kind is Pass.FORWARD:
        return [Action(kind, stage - 1, microbatch)] if stage else []
    if kind is Pass.WEIGHT:
        return [Action(Pass.BACKWARD, stage, microbatch)]
    forward = Action(Pass.FORWARD, stage, microbatch)
    return [forward, Action(kind, stage + 1, microbatch)] if stage + 1 < stages else [forward]

"""What a call passes through: steps before the program runs, and after."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import PyTree

from ..._core.placement import AnyMesh, Placement
from ..._core.tree import Arrays, Outline
from .signature import Function


@dataclass(eq=False, kw_only=True)
class Wrapped:
    """A function without its arrays, as steps, errors and warnings know it. `code` is its Python
    function, if it has one; `options` are those of `jax.jit`.
    """

    fun: Outline
    function: Function
    code: Any
    mesh: AnyMesh | None = None
    out_shardings: PyTree[Placement] = None
    options: Mapping[str, Any] = field(default_factory=dict)
    # Equinox looks for this id on the stack, to show only the frames inside the program.
    id: bytes = field(default_factory=lambda: os.urandom(16))
    # Whether a warning has said that all devices compute the same.
    is_replicated_told: bool = False

    @property
    def name(self) -> str:
        return self.function.name


@dataclass(slots=True, eq=False)
class Call:
    """A call: its arguments, and the `arrays` in them and, after these, in the function (a
    Module's). If it `is_abstract`, it is only lowered, and arrays may be abstract.
    """

    wrapped: Wrapped
    args: Sequence[object]
    kwargs: Mapping[str, object]
    arrays: Arrays
    outline: Outline
    is_abstract: bool
    variant: Any = None
    # Known once the program has run: how, whether it was compiled ahead of time, what it was given
    # and what it has returned (`Made`, with what `Running` says of its trace).
    mode: str = ""
    is_ahead: bool = False
    taken: Arrays = field(default_factory=list)
    returned: Any = None


class Step:
    """What a function was asked for. Each of its variants has one of its own, which may remember
    what it has found out. What a step doesn't define costs calls nothing.
    """

    def before(self, arrays: Arrays, call: Call) -> Arrays:
        """The arrays that the program takes, or the step after this one. If the call is abstract,
        nothing is moved.
        """
        return arrays

    def after(self, call: Call) -> None:
        """After each call that has worked."""

    def compiled(self, call: Call) -> None:
        """After a call that has compiled the program."""


class Variant:
    """A function for arguments that differ only in arrays, with what runs it. JAX's programs go
    with it.
    """

    def __init__(self, outline: Outline, steps: Sequence[Step], running: Any):
        self.outline: Outline = outline.noted()
        self.running = running
        self.before = [step.before for step in steps if type(step).before is not Step.before]
        self.after = [step.after for step in steps if type(step).after is not Step.after]
        self.compiled = [
            step.compiled for step in steps if type(step).compiled is not Step.compiled
        ]
        # What `audit` has found, if it was asked; for `mylib.watch`.
        self.collectives: Any = None

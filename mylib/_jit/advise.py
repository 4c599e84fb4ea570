"""Warnings about a function, its variants and its programs."""

import os
from functools import partial

import jax

from .._advice import (
    ChangingNumbers,
    Earlier,
    NewProgram,
    about_arrivals,
    about_gathered,
    about_misread,
    about_order,
    about_pieces,
    about_replicated,
)
from .._tree import Arrays, Outline
from .inputs import Inputs
from .naming import leaves_of, names_of
from .steps import Call, Step


class Advice:
    """What was noted and told about a function."""

    def __init__(self) -> None:
        self._numbers = ChangingNumbers()
        # Whether a warning has said that all devices compute the same.
        self.is_replicated_told = False

    def about_new(self, call: Call, latest: Outline | None, inputs: Inputs | None) -> None:
        """Warns about a call with a new tree of arguments; `latest` is that of the call before."""
        wrapped = call.wrapped
        self._numbers.look_at(call.outline, latest, wrapped.name, partial(leaves_of, call))
        if inputs is not None and isinstance(inputs.placement, dict):
            arguments = [*enumerate(call.args), *call.kwargs.items()]
            given = {wrapped.function.parameter(key): x for key, x in arguments}
            about_order(wrapped.name, inputs.placement, given)


class Advise(Step):
    """Warns after a call that has compiled the program."""

    def __init__(self, advice: Advice):
        self._advice, self._earlier = advice, Earlier()

    def compiled(self, call: Call) -> None:
        name, names = call.wrapped.name, partial(names_of, call)
        given, returned = call.taken, call.returned.arrays
        about_arrivals(name, given, names, call.returned.rest.trace.kept)
        if call.mode != "eager":
            return
        self._earlier.about_moved(name, given, returned, names)
        about_misread(_platform_of(returned), os.environ.get("XLA_FLAGS", ""))
        if not call.is_ahead and not self._advice.is_replicated_told:
            # JAX has both in its caches, and finds them there in the context of the call alone.
            program = partial(call.variant.running.lowered, given)
            new = NewProgram(name, given, returned, names, call.outline.count, program)
            looks = about_replicated, about_gathered, about_pieces
            self._advice.is_replicated_told = any(look(new) for look in looks)


def _platform_of(arrays: Arrays) -> str:
    placed = (x.sharding for x in arrays if isinstance(x, jax.Array))
    return next((next(iter(at.device_set)).platform for at in placed), "")

"""Warnings about a function, its variants and its programs."""

import os
from functools import partial

import jax

from ..._core.tree import Arrays
from ..advice import Earlier, about_arrivals, about_misread, about_replicated
from .naming import names_of
from .steps import Call, Step


class Advise(Step):
    """Warns after a call that has compiled the program."""

    def __init__(self) -> None:
        self._earlier = Earlier()

    def compiled(self, call: Call) -> None:
        name, names = call.wrapped.name, partial(names_of, call)
        given, returned = call.taken, call.returned.arrays
        about_arrivals(name, given, names, call.returned.rest.trace.kept)
        if call.mode != "eager":
            return
        self._earlier.about_moved(name, given, returned, names)
        about_misread(_platform_of(returned), os.environ.get("XLA_FLAGS", ""))
        if not call.is_ahead and not call.wrapped.is_replicated_told:
            # JAX has both in its caches, and finds them there in the context of the call alone.
            program = partial(call.variant.running.lowered, given)
            count = call.outline.count
            told = about_replicated(name, given, count, returned, names, program)
            call.wrapped.is_replicated_told = told


def _platform_of(arrays: Arrays) -> str:
    placed = (array.sharding for array in arrays if isinstance(array, jax.Array))
    return next((next(iter(at.device_set)).platform for at in placed), "")

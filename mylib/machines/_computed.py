"""The largest arrays that a program computes, before it is compiled."""

import math
from typing import Any

from .._compat import names
from .._lines import is_of_user, spot
from .._programs import all_equations, frame_of
from ._fit import Alive

_SHOWN = 5
# What they compute are the results of equations in them.
_CALLS = names.CALLS | {names.REMAT}


def computed(program: Any) -> tuple[Alive, ...]:
    """The largest arrays, one of each shape and dtype, with their bytes on all devices together:
    how they are divided is not known before the program is compiled.
    """
    largest: dict[Any, Alive] = {}
    for eqn in all_equations(program):
        name = eqn.primitive.name
        # The compiler joins what is filled with what uses it.
        for x in () if name in names.FILLED | _CALLS else eqn.outvars:
            shape = tuple(getattr(x.aval, "shape", ()))
            if shape:
                dtype = x.aval.str_short(short_dtypes=True).partition("[")[0]
                size, frame = math.prod(shape) * x.aval.dtype.itemsize, frame_of(eqn)
                line = ""
                if frame is not None and is_of_user(frame.file_name):
                    line = spot(frame.file_name, frame.line_num)
                largest.setdefault((dtype, shape), Alive(size, 1, dtype, shape, name, line))
    return tuple(sorted(largest.values(), key=lambda x: -x.bytes)[:_SHOWN])

"""Lowers a function for the arguments of a call, and calls what was compiled of it."""

from functools import partial
from typing import Any

import jax
import jax.tree_util as jtu

from .._lowered import Lowered, Origin, argument
from .._tree import Arrays
from .naming import explain, named, names_of
from .program import Program
from .variants import Call, Variant


def lowered_for(call: Call) -> Lowered:
    program, variant = call.program, call.variant
    lowered, traced, arrays = program.lower(call)
    names = names_of(call)
    origin = Origin(
        program.name,
        program.mesh,
        [argument(name, x) for name, x in zip(names, arrays, strict=True)],
        traced,
        partial(named, arrays=names, donated=variant.donated),
        partial(_call, program, variant, call.fun_arrays),
        lambda report: setattr(variant, "collectives", report.collectives),
    )
    return Lowered(origin, lowered)


def _call(
    program: Program,
    variant: Variant,
    fun_arrays: Arrays,
    compiled: jax.stages.Compiled,
    first: bool,
    args: Any,
    kwargs: Any,
) -> Any:
    call = program.read(fun_arrays, args, kwargs)
    if call.split != variant.split:
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jtu.tree_leaves((args, kwargs))):
            raise TypeError(
                f"{program.name} is called with a jax.ShapeDtypeStruct, which has no numbers: "
                "it is for compiling only"
            )
        raise TypeError(
            f"{program.name} was compiled for other static arguments, or for another tree "
            "structure: compile it for these, too"
        )
    call.variant = variant
    try:
        return program.call(call, compiled, first)
    except Exception as error:
        explain(error, call)
        raise

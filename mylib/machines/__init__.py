"""Machines that programs can be compiled for: GPUs and TPUs that you needn't have."""

from .._errors import NotHereError as NotHereError
from ._compilers import CompilerError as CompilerError, require as require
from ._fit import (
    Alive as Alive,
    Argument as Argument,
    Fit as Fit,
    OutOfMemoryError as OutOfMemoryError,
    largest as largest,
)
from ._gpu_errors import WITHOUT_TRITON as WITHOUT_TRITON, about_kernels as about_kernels
from ._machine import Machine as Machine, gpu as gpu, here as here, tpu as tpu
from ._memory import Memory as Memory
from ._sheets import CHIPS as CHIPS, Chip as Chip
from ._torus import coordinates as coordinates, shape_of as shape_of
from ._tpu_errors import out_of_memory as out_of_memory

# The public names; the others are for mylib's other rooms.
__all__ = [
    "CHIPS",
    "Alive",
    "Argument",
    "Chip",
    "CompilerError",
    "Fit",
    "Machine",
    "Memory",
    "NotHereError",
    "OutOfMemoryError",
    "gpu",
    "here",
    "tpu",
]

# Tracebacks and pickles then show the public names.
for _class in (
    Alive,
    Argument,
    Chip,
    CompilerError,
    Fit,
    Machine,
    Memory,
    NotHereError,
    OutOfMemoryError,
):
    _class.__module__ = __name__

"""Machines that programs can be compiled for: GPUs and TPUs that you needn't have."""

from ..._core.errors import NotHereError as NotHereError
from .compilers import CompilerError as CompilerError, require as require
from .fit import (
    Alive as Alive,
    Argument as Argument,
    Fit as Fit,
    OutOfMemoryError as OutOfMemoryError,
    largest as largest,
)
from .gpu_errors import WITHOUT_TRITON as WITHOUT_TRITON, about_kernels as about_kernels
from .machine import Machine as Machine, gpu as gpu, here as here, tpu as tpu
from .memory import Memory as Memory
from .sheets import CHIPS as CHIPS, Chip as Chip
from .torus import coordinates as coordinates, shape_of as shape_of
from .tpu_errors import out_of_memory as out_of_memory

# Tracebacks and pickles then show the public names.
for _class in (Alive, Argument, Chip, CompilerError, Fit, Machine, Memory, OutOfMemoryError):
    _class.__module__ = "mylib.machines"

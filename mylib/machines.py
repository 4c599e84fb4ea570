"""Machines that programs can be compiled for: GPUs and TPUs that you needn't have."""

from ._programs.machines import (
    CHIPS as CHIPS,
    Alive as Alive,
    Argument as Argument,
    Chip as Chip,
    CompilerError as CompilerError,
    Fit as Fit,
    Machine as Machine,
    Memory as Memory,
    NotHereError as NotHereError,
    OutOfMemoryError as OutOfMemoryError,
    gpu as gpu,
    here as here,
    tpu as tpu,
)

"""Programs that are lowered and compiled ahead of time: audited, and saved in files."""

from .lowered import (
    Compiled as Compiled,
    Lowered as Lowered,
    Origin as Origin,
    argument as argument,
    call_with as call_with,
)

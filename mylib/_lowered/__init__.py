"""Programs that are lowered and compiled ahead of time: audited, and saved in files."""

from .files import replace_file as replace_file, versions as versions
from .lowered import (
    Compiled as Compiled,
    Lowered as Lowered,
    Origin as Origin,
    argument as argument,
)

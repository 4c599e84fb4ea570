"""Warnings after compiling: recompilation, redundant copies, undivided work."""

from .arrivals import about_arrivals as about_arrivals
from .captured import (
    about_captured as about_captured,
    captured_by as captured_by,
    code_of as code_of,
)
from .donation import about_not_taken as about_not_taken
from .misread import about_misread as about_misread
from .moved import Earlier as Earlier
from .numbers import ChangingNumbers as ChangingNumbers
from .replicated import about_replicated as about_replicated, devices_of as devices_of

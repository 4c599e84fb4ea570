"""Warnings after compiling: recompilation, redundant copies, undivided work."""

from .arrivals import about_arrivals as about_arrivals
from .captured import (
    about_captured as about_captured,
    captured_by as captured_by,
    code_of as code_of,
)
from .donation import about_not_taken as about_not_taken, about_spared as about_spared
from .gathered import about_gathered as about_gathered
from .misread import about_misread as about_misread
from .moved import Earlier as Earlier
from .numbers import ChangingNumbers as ChangingNumbers
from .order import about_order as about_order
from .pieces import about_pieces as about_pieces
from .replicated import (
    NewProgram as NewProgram,
    about_replicated as about_replicated,
    devices_of as devices_of,
)

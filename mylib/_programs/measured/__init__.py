"""What a profile measured, joined with a program by the names of its instructions."""

from .flights import SentStep as SentStep
from .joined import (
    InstructionOrigin as InstructionOrigin,
    JoinedProgram as JoinedProgram,
    Sent as Sent,
    measured_of as measured_of,
)
from .measured import (
    Measured as Measured,
    MeasuredCollective as MeasuredCollective,
    MeasuredDevice as MeasuredDevice,
    MeasuredPart as MeasuredPart,
)

# Tracebacks and pickles then show the public names.
for _class in (Measured, MeasuredCollective, MeasuredDevice, MeasuredPart):
    _class.__module__ = "mylib.results"

"""What a profile measured, joined with a program by the names of its instructions."""

from .flights import Step as Step
from .joined import (
    Origin as Origin,
    Program as Program,
    Sent as Sent,
    measured_of as measured_of,
)
from .measured import (
    Cost as Cost,
    Measured as Measured,
    MeasuredCollective as MeasuredCollective,
    MeasuredDevice as MeasuredDevice,
    MeasuredPart as MeasuredPart,
)

# Tracebacks and pickles then show the public names.
for _class in (Measured, MeasuredCollective, MeasuredDevice, MeasuredPart):
    _class.__module__ = "mylib"

"""What `audit`, `plan`, `show` and `explain` return."""

from ._core.show import (
    Changes as Changes,
    Explanation as Explanation,
    Move as Move,
    Overview as Overview,
    Row as Row,
)
from ._planning.plan import Candidate as Candidate
from ._programs.audit import (
    Collective as Collective,
    Estimate as Estimate,
    ProgramArray as ProgramArray,
    Report as Report,
    Work as Work,
)
from ._programs.measured import (
    Measured as Measured,
    MeasuredCollective as MeasuredCollective,
    MeasuredDevice as MeasuredDevice,
    MeasuredPart as MeasuredPart,
)

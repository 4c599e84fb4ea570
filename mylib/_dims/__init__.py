"""Which dimensions of a program's arrays must be split alike, and what it computes and sums."""

from .dims import Dims as Dims, Nodes as Nodes
from .equations import (
    Equation as Equation,
    bytes_of as bytes_of,
    is_kept as is_kept,
    is_literal as is_literal,
    shape_of as shape_of,
)
from .groups import (
    Event as Event,
    Reading as Reading,
    Scope as Scope,
    Sum as Sum,
    program_of as program_of,
    relate_as_operands as relate_as_operands,
)

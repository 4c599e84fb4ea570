"""Which dimensions of a program's arrays must be split alike, and what it computes and sums."""

from .dims import Dims as Dims, Nodes as Nodes, pairs_of_reshape as pairs_of_reshape
from .equations import (
    Equation as Equation,
    bytes_of as bytes_of,
    is_kept as is_kept,
    is_literal as is_literal,
)
from .program import Event as Event, Reading as Reading, Scope as Scope, Sum as Sum
from .reader import program_of as program_of, relate_as_operands as relate_as_operands

"""`filter_jit`, `filter_checkpoint` and `fully_shard`: functions and layers, with placements."""

from typing import TYPE_CHECKING

from .advice import captured_by as captured_by, code_of as code_of
from .checkpoint import (
    filter_checkpoint as filter_checkpoint,
    recompute_resharded as recompute_resharded,
)
from .fully_shard import fully_shard as fully_shard
from .inputs import Inputs as Inputs, Moves as Moves, Targets as Targets
from .jit import Jitted as Jitted, filter_jit as filter_jit
from .key import Key as Key
from .load import load_compiled as load_compiled
from .signature import Function as Function, about as about

if TYPE_CHECKING:
    from .lowered import Lowered as Lowered

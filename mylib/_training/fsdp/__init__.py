"""`fully_shard` and `filter_checkpoint`: layers that gather their weights where they run, and what
is computed again in the backward pass.
"""

from .accumulate import accumulate as accumulate
from .checkpoint import (
    filter_checkpoint as filter_checkpoint,
    recompute_resharded as recompute_resharded,
)
from .fully_shard import fully_shard as fully_shard
from .layer import LAYER_INPUT as LAYER_INPUT, is_layer as is_layer

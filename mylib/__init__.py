"""Puts the arrays of any PyTree where they belong, and keeps them there."""

from . import contracts, data, loops, machines, mpmd, rules, testing
from ._audit import Collective, Estimate, Parameter, ProgramMemory, Report, Work, audit
from ._errors import (
    AuditError,
    CapturedArrayWarning,
    DonationWarning,
    Fault,
    MylibWarning,
    PlacementError,
    PlacementWarning,
    PrefetchWarning,
    RecompilationWarning,
    ReplicaError,
    StaticNumberWarning,
    SummedTwiceWarning,
)
from ._functions import (
    filter_checkpoint,
    filter_jit,
    fully_shard,
    recompute_resharded,
)
from ._per_device import filter_shard_map, opaque, vary
from ._placement import Placement, Target, resolve
from ._processes import check_replicas
from ._show import Changes, Explanation, Move, Overview, Row, explain, show
from ._transfer import filter_device_put, filter_shard
from ._tree import Leaf
from .machines import Alive, make_mesh

__version__ = "0.1.0"

__all__ = [
    "Alive",
    "AuditError",
    "CapturedArrayWarning",
    "Changes",
    "Collective",
    "DonationWarning",
    "Estimate",
    "Explanation",
    "Fault",
    "Leaf",
    "Move",
    "MylibWarning",
    "Overview",
    "Parameter",
    "Placement",
    "PlacementError",
    "PlacementWarning",
    "PrefetchWarning",
    "ProgramMemory",
    "RecompilationWarning",
    "ReplicaError",
    "Report",
    "Row",
    "StaticNumberWarning",
    "SummedTwiceWarning",
    "Target",
    "Work",
    "audit",
    "check_replicas",
    "contracts",
    "data",
    "explain",
    "filter_checkpoint",
    "filter_device_put",
    "filter_jit",
    "filter_shard",
    "filter_shard_map",
    "fully_shard",
    "loops",
    "machines",
    "make_mesh",
    "mpmd",
    "opaque",
    "recompute_resharded",
    "resolve",
    "rules",
    "show",
    "testing",
    "vary",
]

# Tracebacks and pickles then show the public names.
for _name in __all__:
    if isinstance(globals()[_name], type):
        globals()[_name].__module__ = __name__

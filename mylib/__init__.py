"""Puts the arrays of any PyTree where they belong, and keeps them there."""

from typing import TYPE_CHECKING

from ._errors import (
    AuditError,
    CapturedArrayWarning,
    DonationWarning,
    Fault,
    MylibError,
    MylibWarning,
    PlacementError,
    PlacementWarning,
    PrefetchWarning,
    RecompilationWarning,
    ReplicaError,
    ReplicatedWarning,
    SavedProgramError,
    StaticNumberWarning,
    SummedTwiceWarning,
    WrongArgumentWarning,
)
from ._jit import filter_jit, load_compiled
from ._meshes import make_mesh
from ._placement import Placement, Target, resolve
from ._processes import check_replicas
from ._transfer import filter_device_put, filter_load, filter_shard
from ._tree import Leaf

# Most programs use only a part of these, so they are imported when they are asked for.
if TYPE_CHECKING:
    from . import contracts, data, loops, machines, mpmd, rules, testing
    from ._audit import Collective, Estimate, Parameter, Report, Work, audit
    from ._fsdp import accumulate, filter_checkpoint, fully_shard, recompute_resharded
    from ._matrices import by_matrix
    from ._measured import Measured, MeasuredCollective, MeasuredDevice, MeasuredPart
    from ._per_device import filter_shard_map, opaque, vary
    from ._plan import Candidate, Plan, PlanError, plan
    from ._show import Changes, Explanation, Move, Overview, Row, explain, show
    from ._watch import Watching, watch

__version__ = "0.1.0"

__all__ = [
    "AuditError",
    "Candidate",
    "CapturedArrayWarning",
    "Changes",
    "Collective",
    "DonationWarning",
    "Estimate",
    "Explanation",
    "Fault",
    "Leaf",
    "Measured",
    "MeasuredCollective",
    "MeasuredDevice",
    "MeasuredPart",
    "Move",
    "MylibError",
    "MylibWarning",
    "Overview",
    "Parameter",
    "Placement",
    "PlacementError",
    "PlacementWarning",
    "Plan",
    "PlanError",
    "PrefetchWarning",
    "RecompilationWarning",
    "ReplicaError",
    "ReplicatedWarning",
    "Report",
    "Row",
    "SavedProgramError",
    "StaticNumberWarning",
    "SummedTwiceWarning",
    "Target",
    "Watching",
    "Work",
    "WrongArgumentWarning",
    "accumulate",
    "audit",
    "by_matrix",
    "check_replicas",
    "contracts",
    "data",
    "explain",
    "filter_checkpoint",
    "filter_device_put",
    "filter_jit",
    "filter_load",
    "filter_shard",
    "filter_shard_map",
    "fully_shard",
    "load_compiled",
    "loops",
    "machines",
    "make_mesh",
    "mpmd",
    "opaque",
    "plan",
    "recompute_resharded",
    "resolve",
    "rules",
    "show",
    "testing",
    "vary",
    "watch",
]

if not TYPE_CHECKING:  # type checkers would take any name for one of them
    _ROOMS = {
        name: room
        for room, names in {
            "": "contracts data loops machines mpmd rules testing",
            "_audit": "Collective Estimate Parameter Report Work audit",
            "_fsdp": "accumulate filter_checkpoint fully_shard recompute_resharded",
            "_matrices": "by_matrix",
            "_measured": "Measured MeasuredCollective MeasuredDevice MeasuredPart",
            "_per_device": "filter_shard_map opaque vary",
            "_plan": "Candidate Plan PlanError plan",
            "_show": "Changes Explanation Move Overview Row explain show",
            "_watch": "Watching watch",
        }.items()
        for name in names.split()
    }

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name not in _ROOMS:
            from . import rules

            hint = f": it is {rules.__name__}.{name}" if name in rules.__all__ else ""
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
        room = _ROOMS[name]
        module = import_module(f".{room or name}", __name__)
        value = globals()[name] = getattr(module, name) if room else module
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


# Tracebacks and pickles then show the public names.
for _name in __all__:
    if isinstance(globals().get(_name), type):
        globals()[_name].__module__ = __name__

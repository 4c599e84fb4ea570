"""Puts the arrays of any PyTree where they belong, and keeps them there."""

from typing import TYPE_CHECKING

from . import loops, rules
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
    ReplicatedWarning,
    SavedProgramError,
    StaticNumberWarning,
    SummedTwiceWarning,
)
from ._fsdp import filter_checkpoint, fully_shard, recompute_resharded
from ._jit import filter_jit, load_compiled
from ._meshes import make_mesh
from ._per_device import filter_shard_map, opaque, vary
from ._placement import Placement, Target, resolve
from ._processes import check_replicas
from ._transfer import filter_device_put, filter_load, filter_shard
from ._tree import Leaf

# Most programs use only a part of these, so they are imported when they are asked for.
if TYPE_CHECKING:
    from . import contracts, data, machines, mpmd, testing
    from ._audit import Collective, Report, audit
    from ._matrices import by_matrix
    from ._plan import Plan, PlanError, plan
    from ._show import Changes, Explanation, Overview, explain, show
    from ._watch import Watching, watch

__version__ = "0.1.0"

__all__ = [
    "AuditError",
    "CapturedArrayWarning",
    "Changes",
    "Collective",
    "DonationWarning",
    "Explanation",
    "Fault",
    "Leaf",
    "MylibWarning",
    "Overview",
    "Placement",
    "Plan",
    "PlanError",
    "PlacementError",
    "PlacementWarning",
    "PrefetchWarning",
    "RecompilationWarning",
    "ReplicatedWarning",
    "ReplicaError",
    "Report",
    "SavedProgramError",
    "StaticNumberWarning",
    "SummedTwiceWarning",
    "Target",
    "Watching",
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
            "": "contracts data machines mpmd testing",
            "_audit": "Collective Report audit",
            "_matrices": "by_matrix",
            "_plan": "Plan PlanError plan",
            "_show": "Changes Explanation Overview explain show",
            "_watch": "Watching watch",
        }.items()
        for name in names.split()
    }

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name not in _ROOMS:
            rooms = (rules, loops)
            homes = [f"{room.__name__}.{name}" for room in rooms if name in room.__all__]
            hint = f": it is {homes[0]}" if homes else ""
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

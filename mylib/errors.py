"""Errors and warnings, which derive from `MylibError` and `MylibWarning`, and `Fault`."""

from ._core.errors import (
    AuditError as AuditError,
    CapturedArrayWarning as CapturedArrayWarning,
    DonationWarning as DonationWarning,
    Fault as Fault,
    MylibError as MylibError,
    MylibWarning as MylibWarning,
    PlacementError as PlacementError,
    PlacementWarning as PlacementWarning,
    PrefetchWarning as PrefetchWarning,
    RecompilationWarning as RecompilationWarning,
    ReplicaError as ReplicaError,
    ReplicatedWarning as ReplicatedWarning,
    SavedProgramError as SavedProgramError,
    StaticNumberWarning as StaticNumberWarning,
    SummedTwiceWarning as SummedTwiceWarning,
    TeamError as TeamError,
)
from ._planning.plan import PlanError as PlanError
from ._programs.audit import ContractError as ContractError

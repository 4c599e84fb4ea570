"""`audit`: what a compiled program communicates, and what it holds."""

from .attributes import factors_of as factors_of, labels_of as labels_of, window_of as window_of
from .attribution import callbacks_of as callbacks_of, tuned_kernels_of as tuned_kernels_of
from .audit import audit as audit, report_of as report_of
from .entries import Collective as Collective, ProgramArray as ProgramArray
from .groups import (
    Groups as Groups,
    MeshAxes as MeshAxes,
    axis_of as axis_of,
    groups_of as groups_of,
    pairs_of as pairs_of,
)
from .hlo import (
    Array as Array,
    Computation as Computation,
    HloModule as HloModule,
    Instruction as Instruction,
    arrays_of as arrays_of,
    elements_of as elements_of,
)
from .links import Message as Message, seconds as seconds
from .memory import memory_of as memory_of
from .opcodes import OPCODES as OPCODES, Likeness as Likeness, Meaning as Meaning
from .report import (
    Contract as Contract,
    ContractError as ContractError,
    Report as Report,
    bytes_of as bytes_of,
    no_mesh as no_mesh,
    size_of as size_of,
    sums_each_turn as sums_each_turn,
    times_of as times_of,
)
from .roofline import Estimate as Estimate
from .snapshot import check_snapshot as check_snapshot
from .speed import speeds as speeds
from .table import folded_names as folded_names, what_of as what_of
from .targets import TARGETS as TARGETS
from .work import Work as Work

# Tracebacks and pickles then show the public names.
for _class in (Collective, Estimate, ProgramArray, Report, Work):
    _class.__module__ = "mylib.results"
ContractError.__module__ = "mylib.errors"

"""Arrays, functions and pipelines over meshes that share no devices."""

from ..._moving.processes import TransferError as TransferError
from .actions import Action as Action, Pass as Pass
from .jit import jit as jit
from .pipeline import Pipeline as Pipeline, pipeline as pipeline
from .schedule import Schedule as Schedule
from .schedules import (
    gpipe as gpipe,
    interleaved as interleaved,
    one_f_one_b as one_f_one_b,
    zero_bubble as zero_bubble,
)
from .transfer import (
    fetch as fetch,
    initialize as initialize,
    is_remote as is_remote,
    split as split,
    transfer as transfer,
    transport as transport,
)

# Tracebacks and pickles then show the public names.
for _class in (Action, Pass, Pipeline, Schedule, TransferError):
    _class.__module__ = "mylib.mpmd"

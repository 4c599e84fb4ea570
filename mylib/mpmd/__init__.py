"""Arrays, functions and pipelines over meshes that share no devices."""

from .._processes import TransferError as TransferError
from ._actions import Action as Action, Pass as Pass
from ._jit import jit as jit
from ._pipeline import Pipeline as Pipeline, pipeline as pipeline
from ._schedule import Schedule as Schedule
from ._schedules import (
    gpipe as gpipe,
    interleaved as interleaved,
    one_f_one_b as one_f_one_b,
    zero_bubble as zero_bubble,
)
from ._transfer import (
    fetch as fetch,
    initialize as initialize,
    is_remote as is_remote,
    split as split,
    transfer as transfer,
    transport as transport,
)

# Tracebacks and pickles then show the public names.
for _class in (Action, Pass, Pipeline, Schedule, TransferError):
    _class.__module__ = __name__

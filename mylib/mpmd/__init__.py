"""Arrays, functions and pipelines over meshes that share no devices."""

from .._links import TransferError as TransferError
from ._jit import jit as jit
from ._meshes import split as split
from ._transfer import (
    fetch as fetch,
    initialize as initialize,
    is_remote as is_remote,
    transfer as transfer,
    transport as transport,
)

"""What programs may communicate and hold: for `Report.expect`, in tests.

A contract is a function from a [`mylib.Report`][] to a list of faults, each a sentence. You can
write your own.
"""

from .._audit import Contract
from ._limits import at_most, communicates, memory, never, sharded
from ._strategies import data_parallel, fsdp, tensor_parallel, two_d

__all__ = [
    "Contract",
    "at_most",
    "communicates",
    "data_parallel",
    "fsdp",
    "memory",
    "never",
    "sharded",
    "tensor_parallel",
    "two_d",
]

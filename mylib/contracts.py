"""What programs may communicate and hold: for `Report.expect`, in tests.

A contract is a function from a `mylib.results.Report` to a list of faults, each a sentence. You
can write your own.
"""

from ._programs.contracts import (
    Contract as Contract,
    at_most as at_most,
    communicates as communicates,
    data_parallel as data_parallel,
    fsdp as fsdp,
    memory as memory,
    never as never,
    sharded as sharded,
    tensor_parallel as tensor_parallel,
    two_d as two_d,
)

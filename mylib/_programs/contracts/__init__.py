"""What programs may communicate and hold: for `Report.expect`, in tests."""

from ..audit import Contract as Contract
from .limits import (
    at_most as at_most,
    communicates as communicates,
    memory as memory,
    never as never,
    sharded as sharded,
)
from .strategies import (
    data_parallel as data_parallel,
    fsdp as fsdp,
    tensor_parallel as tensor_parallel,
    two_d as two_d,
)

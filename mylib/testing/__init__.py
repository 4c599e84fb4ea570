"""Tools for testing code that places arrays, on one device or in many processes.

Its pytest plugin is `mylib_pytest`.
"""

from .._audit import check_snapshot as check_snapshot
from .._interpreter import run_here as run_here
from .._verify import (
    Compared as Compared,
    Verified as Verified,
    VerifyError as VerifyError,
    verify as verify,
)
from ._assertions import (
    assert_placed as assert_placed,
    assert_same_everywhere as assert_same_everywhere,
)
from ._backend import second_backend as second_backend
from ._body import (
    Info as Info,
    all_equal as all_equal,
    barrier as barrier,
    gather as gather,
    info as info,
    same_program as same_program,
)
from ._splits import assert_split as assert_split

# Tracebacks and pickles then show the public names.
for _class in (Compared, Info, Verified, VerifyError):
    _class.__module__ = __name__

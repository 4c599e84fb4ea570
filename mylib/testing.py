"""Tools for testing code that places arrays, on one device or in many processes.

Its pytest plugin is `mylib_pytest`. `python -m mylib.testing launch -n 4 script.py` runs a script
as several processes.
"""

from ._planning.verify import (
    Compared as Compared,
    Verified as Verified,
    VerifyError as VerifyError,
    verify as verify,
)
from ._programs.audit import check_snapshot as check_snapshot
from ._programs.interpreter import run_here as run_here
from ._testing import (
    Info as Info,
    assert_placed as assert_placed,
    assert_split as assert_split,
    barrier as barrier,
    gather as gather,
    info as info,
    same_program as same_program,
    second_backend as second_backend,
)

if __name__ == "__main__":
    import sys

    from ._testing import launch

    if sys.argv[1:2] != ["launch"]:
        sys.exit("usage: python -m mylib.testing launch -n N [--devices-per-process K] script.py")
    sys.exit(launch.main(sys.argv[2:]))

"""Tools for testing code that places arrays, on one device or in many processes.

Its pytest plugin is `mylib_pytest`.
"""

from .assertions import assert_placed as assert_placed
from .backend import second_backend as second_backend
from .body import (
    Info as Info,
    barrier as barrier,
    gather as gather,
    info as info,
    same_program as same_program,
)
from .splits import assert_split as assert_split

# Tracebacks and pickles then show the public names.
Info.__module__ = "mylib.testing"

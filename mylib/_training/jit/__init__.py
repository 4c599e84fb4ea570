"""`filter_jit`: functions compiled with placements in and out, and checks of errors in programs."""

from .donation import Donate as Donate
from .error_checks import without_checks as without_checks
from .inputs import Inputs as Inputs, Targets as Targets
from .jit import Jitted as Jitted, filter_jit as filter_jit, load_compiled as load_compiled
from .running import expect as expect
from .signature import Function as Function, about as about

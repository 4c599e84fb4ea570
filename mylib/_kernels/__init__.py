"""Calls that nobody can look into, such as kernels, and how they may be split."""

from .calls import HowSplit as HowSplit, program_at as program_at
from .primitive import Kernel as Kernel, kernel_p as kernel_p

"""Calls that nobody can look into, such as kernels, and how they may be split."""

from .axes import Axes as Axes, specs_of as specs_of
from .calls import HowSplit as HowSplit, KnownCall as KnownCall
from .checking import difference as difference, difference_of_parts as difference_of_parts
from .lowering import raise_as_in_compiler as raise_as_in_compiler
from .primitive import (
    Kernel as Kernel,
    NoDerivativeError as NoDerivativeError,
    kernel_p as kernel_p,
)
from .splits import Splits as Splits

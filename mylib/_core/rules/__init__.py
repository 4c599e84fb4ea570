"""Rules that choose placements. A rule is a callable from `Leaf` to a placement or `PASS`."""

from ..placement import PASS as PASS
from .axes import (
    by_axes as by_axes,
    dimensions_in_front as dimensions_in_front,
    has_names as has_names,
)
from .like import like as like
from .parallel import tensor_parallel as tensor_parallel
from .path import by_path as by_path
from .present import where_present as where_present
from .rule import Rule as Rule, as_rule as as_rule
from .simple import batch as batch, fsdp as fsdp, replicated as replicated, where_even as where_even

# Tracebacks and pickles then show the public names.
Rule.__module__ = "mylib.rules"

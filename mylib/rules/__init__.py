"""Rules that choose placements. A rule is a callable from `Leaf` to a placement or `PASS`."""

from .._placement import PASS as PASS
from ._axes import (
    by_axes as by_axes,
    dimensions_in_front as dimensions_in_front,
    has_names as has_names,
)
from ._like import like as like
from ._parallel import tensor_parallel as tensor_parallel
from ._path import by_path as by_path
from ._present import where_present as where_present
from ._rule import Rule as Rule, as_rule as as_rule
from ._simple import (
    batch as batch,
    fsdp as fsdp,
    replicated as replicated,
    where_even as where_even,
)

__all__ = [
    "PASS",
    "Rule",
    "batch",
    "by_axes",
    "by_path",
    "fsdp",
    "like",
    "replicated",
    "tensor_parallel",
    "where_even",
    "where_present",
]

# Tracebacks and pickles then show the public names.
Rule.__module__ = __name__

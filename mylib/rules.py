"""Rules that choose placements. A rule is a callable from `Leaf` to a placement or `PASS`."""

from ._core.rules import (
    PASS as PASS,
    Rule as Rule,
    batch as batch,
    by_axes as by_axes,
    by_path as by_path,
    fsdp as fsdp,
    like as like,
    replicated as replicated,
    tensor_parallel as tensor_parallel,
    where_even as where_even,
    where_present as where_present,
)

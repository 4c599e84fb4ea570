"""Choosing placements by rule. A rule is a callable `Leaf -> Placement`, or `PASS`."""

from .._placement import PASS as PASS
from ._axes import by_axes as by_axes
from ._explain import Explanation as Explanation, Row as Row
from ._like import like as like
from ._path import by_path as by_path
from ._rule import Rule as Rule
from ._simple import (
    batch as batch,
    fsdp as fsdp,
    replicated as replicated,
    where_even as where_even,
)

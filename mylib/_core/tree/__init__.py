"""Splits trees into array leaves and static leaves; prefixes, paths, patterns, annotations."""

from .annotations import Fit as Fit, name_dimensions as name_dimensions
from .lazy import annotations_of as annotations_of, signature_of as signature_of
from .leaves import (
    KeyPath as KeyPath,
    Kind as Kind,
    Leaf as Leaf,
    Leaves as Leaves,
    SelfPlaced as SelfPlaced,
    canonical_dtype as canonical_dtype,
    is_array as is_array,
    is_of_keys as is_of_keys,
    is_placed as is_placed,
    is_ref as is_ref,
    kind_of as kind_of,
    name_of as name_of,
    natively as natively,
    parts_of as parts_of,
    split as split,
)
from .outline import (
    Arrays as Arrays,
    Made as Made,
    Outline as Outline,
    Rest as Rest,
    outline_of as outline_of,
    outlined as outlined,
)
from .pattern import Pattern as Pattern, joined as joined, parts_in as parts_in, spelled as spelled
from .prefix import (
    MISFIT as MISFIT,
    broadcast_prefix as broadcast_prefix,
    first_difference as first_difference,
    is_none as is_none,
    spread_prefix as spread_prefix,
)
from .structure import (
    named_texts_of as named_texts_of,
    shortened as shortened,
    texts_of as texts_of,
    walk as walk,
)

# Tracebacks and pickles then show the public name.
Leaf.__module__ = "mylib"

"""Resolves placements to shardings, and checks them against shapes and the context of the call."""

from .checks import (
    lacks_axis as lacks_axis,
    show as show,
    show_mesh as show_mesh,
    unfit_rank as unfit_rank,
    unfit_shape as unfit_shape,
    unfit_spec as unfit_spec,
)
from .context import World as World, current_world as current_world
from .parts import (
    Bounds as Bounds,
    Shape as Shape,
    Span as Span,
    bytes_on_each as bytes_on_each,
    devices_of as devices_of,
    parts_of as parts_of,
    regions_of as regions_of,
)
from .resolve import (
    MOST_RULES as MOST_RULES,
    PASS as PASS,
    Decision as Decision,
    Placement as Placement,
    ask as ask,
    decide as decide,
    decide_each as decide_each,
    faults_of as faults_of,
    is_placement_leaf as is_placement_leaf,
    is_rule as is_rule,
    leaf_at as leaf_at,
    resolve as resolve,
    resolve_leaves as resolve_leaves,
)
from .shardings import (
    AnyMesh as AnyMesh,
    Target as Target,
    axes_in as axes_in,
    axis_names as axis_names,
    axis_types as axis_types,
    default_memory_kind as default_memory_kind,
    entries_of as entries_of,
    entries_over as entries_over,
    fill_free as fill_free,
    grounded as grounded,
    has_partial_sums as has_partial_sums,
    is_described as is_described,
    is_here as is_here,
    memory_kind as memory_kind,
    memory_space as memory_space,
    mesh_in_force as mesh_in_force,
    restricted as restricted,
    same_axes as same_axes,
    sharding_of as sharding_of,
    spec_over as spec_over,
    split_over as split_over,
    trimmed as trimmed,
    unusual_memory_kind as unusual_memory_kind,
    without_partial_sums as without_partial_sums,
)
from .varying import (
    AxisSet as AxisSet,
    axes_of_type as axes_of_type,
    cast as cast,
    manual_axes as manual_axes,
    union as union,
    varying as varying,
)

"""Compares where an array is with its target."""

from typing import Any, TypeGuard

from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, Sharding

from ..._core.placement import (
    Target,
    axis_names,
    fill_free,
    memory_kind,
    partial_sums,
    spec_over,
)


def wants_layout(target: Target) -> TypeGuard[Format]:
    return isinstance(target, Format) and target.layout is not None


def has_layout(array: Any, target: Target) -> bool:
    if not (isinstance(target, Format) and isinstance(target.layout, Layout)):
        return True
    layout, requested = array.format.layout, target.layout
    if layout is None or layout.major_to_minor != requested.major_to_minor:
        return False
    return requested.tiling is None or layout.tiling == requested.tiling


def same_place(source: Sharding, target: Sharding, ndim: int) -> bool:
    """Whether an array at `source` is at `target`."""
    if isinstance(source, NamedSharding) or isinstance(target, NamedSharding):
        # `is_equivalent_to` ignores names and types of axes, but arrays that differ in them can't
        # be combined.
        if not (isinstance(source, NamedSharding) and isinstance(target, NamedSharding)):
            return False
        if source.mesh != target.mesh:
            return False
        target = fill_free(target, source, ndim)
        if target.mesh.explicit_axes and not same_type(source, target, ndim):
            return False
    has_kind = source.memory_kind == target.memory_kind or (
        memory_kind(source) == memory_kind(target)
    )
    return has_kind and source.is_equivalent_to(target, ndim)


def same_type(source: NamedSharding, target: NamedSharding, ndim: int) -> bool:
    """Whether two shardings over one mesh with Explicit axes give arrays the same type, which
    includes axes of size 1.
    """

    def signature(sharding: NamedSharding) -> tuple[object, ...]:
        spec = sharding.spec
        entries = map(axis_names, spec_over(target.mesh, sharding, ndim))
        return list(entries), partial_sums(spec)

    return signature(source) == signature(target)

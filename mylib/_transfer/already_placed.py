"""Checks whether an array is at its target already, so that it can stay the same object."""

from collections.abc import Sequence
from typing import Any

from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, NamedSharding, Sharding

from .._placement import Target, axis_names, fill_free, memory_kind, sharding_of, spec_over
from .._tree import Kind


def not_there(
    arrays: Sequence[Any], kinds: Sequence[Kind], targets: Sequence[Any], index: Sequence[int]
) -> list[int]:
    """The positions in `index` of arrays that must be moved to their targets."""
    # Caches which pairs of shardings agree, for this call: most leaves share a few. The shardings
    # are kept alive, because their ids are the keys.
    known: dict[tuple[int, int, int], tuple[bool, Any]] = {}
    moving: list[int] = []
    for i in index:
        x, target = arrays[i], targets[i]
        if kinds[i] is Kind.DEVICE and x.committed:
            here = x.sharding
            key = id(here), id(target), len(x.shape)
            answer = known.get(key)
            if answer is None:
                answer = known[key] = same_place(here, sharding_of(target), x.ndim), here
            if answer[0] and _has_layout(x, target):
                continue
        moving.append(i)
    return moving


def _has_layout(x: Any, target: Target) -> bool:
    if not isinstance(target, Format) or not isinstance(target.layout, Layout):
        return True
    here, wanted = x.format.layout, target.layout
    if here is None or here.major_to_minor != wanted.major_to_minor:
        return False
    return wanted.tiling is None or here.tiling == wanted.tiling


def same_place(here: Sharding, wanted: Sharding, ndim: int) -> bool:
    """Whether an array at `here` is at `wanted`."""
    if isinstance(here, NamedSharding) or isinstance(wanted, NamedSharding):
        # `is_equivalent_to` ignores names and types of axes, but arrays that differ in them can't
        # be combined.
        if not (isinstance(here, NamedSharding) and isinstance(wanted, NamedSharding)):
            return False
        if here.mesh != wanted.mesh:
            return False
        wanted = fill_free(wanted, here, ndim)
        if AxisType.Explicit in wanted.mesh.axis_types and not same_type(here, wanted, ndim):
            return False
    return memory_kind(here) == memory_kind(wanted) and here.is_equivalent_to(wanted, ndim)


def same_type(here: NamedSharding, wanted: NamedSharding, ndim: int) -> bool:
    """Whether two shardings over one mesh with Explicit axes give arrays the same type, which
    includes axes of size 1.
    """

    def signature(sharding: NamedSharding) -> Any:
        spec = sharding.spec
        entries = map(axis_names, spec_over(wanted.mesh, sharding, ndim))
        return list(entries), spec.unreduced, spec.reduced

    return signature(here) == signature(wanted)

"""Weights that are sent in 8 bits: `send_dtype=` of `fully_shard`.

A weight is divided by its scales and rounded where it is kept, sent, and multiplied by its scales
where it is used. Each device finds the scales of its own part, one for each index of the dimension
that is gathered. So they are sent with the weight, and nothing is sent to find them.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from .._placement import Target, axis_names, entries_of

# What a weight may be sent in, and the largest number that is sent.
IN_8_BITS = {jnp.dtype(jnp.float8_e4m3fn): 448.0, jnp.dtype(jnp.int8): 127.0}
# A scale takes as much as so many numbers in 8 bits.
_WORTH = 4


@dataclass(frozen=True)
class Scales:
    """The scales of a weight. `shape` is the weight's, with a dimension for the parts of each
    dimension that stays split; numbers that differ only in the dimensions `over` share a scale.
    Where the scales are kept and used.
    """

    shape: tuple[int, ...]
    over: tuple[int, ...]
    kept: NamedSharding
    used: NamedSharding


def unfit_for_8_bits(x: Any) -> str:
    """Why a weight of a layer is sent as it is, wherever it is kept and used; else empty."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return f"its dtype is {x.dtype}"
    return f"it has {x.ndim} dimension{'s' * (not x.ndim)}" if x.ndim < 2 else ""


def scales_of(x: Any, kept: Target | None, used: Target | None) -> Scales | str:
    """The scales of a weight, or why it is sent as it is."""
    if unfit := unfit_for_8_bits(x):
        return unfit
    if not (isinstance(kept, NamedSharding) and isinstance(used, NamedSharding)):
        return "no PartitionSpec gives where it is kept and used"
    size = kept.mesh.shape
    over_axes = [[a for a in axis_names(e) if size[a] > 1] for e in entries_of(kept.spec, x.ndim)]
    stay = [
        [a for a in axes if a in axis_names(entry)]
        for axes, entry in zip(over_axes, entries_of(used.spec, x.ndim), strict=True)
    ]
    gathered = [i for i in range(x.ndim) if stay[i] != over_axes[i]]
    if not gathered:
        return "it is not gathered"
    rows = max(gathered, key=lambda i: x.shape[i])
    shape: list[int] = []
    over: list[int] = []
    entries: list[tuple[Any, Any]] = []
    for i, n in enumerate(x.shape):
        parts = math.prod(size[a] for a in over_axes[i])
        if i == rows or parts > 1:
            shape.append(n if i == rows else parts)
            entries.append((tuple(over_axes[i]), tuple(stay[i])))
        if i != rows:
            over.append(len(shape))
            shape.append(n // parts)
            entries.append((None, None))
    if math.prod(shape[i] for i in over) <= _WORTH:
        return "its scales would need as much"
    kept_spec, used_spec = (PartitionSpec(*spec) for spec in zip(*entries, strict=True))
    return Scales(
        tuple(shape),
        tuple(over),
        NamedSharding(kept.mesh, kept_spec),
        NamedSharding(used.mesh, used_spec),
    )


def quantised(x: Any, scales: Scales, dtype: Any) -> tuple[Any, Any]:
    """A weight in the dtype that it is sent in, and its scales."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    parts = x.astype(wide).reshape(scales.shape)
    scale = jnp.max(jnp.abs(parts), scales.over, keepdims=True) / IN_8_BITS[dtype]
    # Of zeros. A mask instead would be sent, too.
    scale = jnp.maximum(scale, jnp.finfo(wide).tiny)
    parts = parts / scale
    parts = jnp.round(parts) if jnp.issubdtype(dtype, jnp.integer) else parts
    return parts.astype(dtype).reshape(x.shape), scale


def restored(sent: Any, scale: Any, scales: Scales, dtype: Any) -> Any:
    """A weight that was sent."""
    parts = sent.reshape(scales.shape).astype(scale.dtype) * scale
    return parts.astype(dtype).reshape(sent.shape)

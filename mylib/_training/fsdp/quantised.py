"""Weights that are sent in 8 bits: `send_dtype=` of `fully_shard`.

A weight is divided by its scales and rounded where it is kept, sent, and multiplied by its scales
where it is used. Each device finds the scales of its own part, one for each index of the dimension
that is gathered. So they are sent with the weight, and nothing is sent to find them.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from ..._core.placement import Target, axis_names, entries_of

# What a weight may be sent in, and the largest number that is sent.
IN_8_BITS = {jnp.dtype(jnp.float8_e4m3fn): 448.0, jnp.dtype(jnp.int8): 127.0}
# A scale takes as much as so many numbers in 8 bits.
_WORTH = 4


@dataclass(frozen=True)
class Scales:
    """The scales of a weight. `shape` is the weight's, with a dimension for the parts of each
    dimension that stays split; numbers that differ only in the dimensions `over` share a scale.
    Where the scales are kept and used, if they are sent.
    """

    shape: tuple[int, ...]
    over: tuple[int, ...]
    kept: Target | None = None
    used: Target | None = None


def unfit_for_8_bits(weight: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether a weight of a layer is sent as it is, wherever it is kept and used."""
    return weight.ndim < 2 or not jnp.issubdtype(weight.dtype, jnp.floating)


def scales_of(weight: jax.Array, kept: Target | None, used: Target | None) -> Scales | None:
    """The scales of a weight; None if it is sent as it is."""
    if unfit_for_8_bits(weight):
        return None
    if not (isinstance(kept, NamedSharding) and isinstance(used, NamedSharding)):
        return None
    size, rank = kept.mesh.shape, weight.ndim
    over_axes = [[a for a in axis_names(e) if size[a] > 1] for e in entries_of(kept.spec, rank)]
    stay = [
        [a for a in axes if a in axis_names(entry)]
        for axes, entry in zip(over_axes, entries_of(used.spec, rank), strict=True)
    ]
    gathered = [i for i in range(rank) if stay[i] != over_axes[i]]
    if not gathered:
        return None
    rows = max(gathered, key=lambda i: weight.shape[i])
    shape: list[int] = []
    over: list[int] = []
    entries: list[tuple[tuple[str, ...] | None, tuple[str, ...] | None]] = []
    for i, n in enumerate(weight.shape):
        parts = math.prod(size[a] for a in over_axes[i])
        if i == rows or parts > 1:
            shape.append(n if i == rows else parts)
            entries.append((tuple(over_axes[i]), tuple(stay[i])))
        if i != rows:
            over.append(len(shape))
            shape.append(n // parts)
            entries.append((None, None))
    if math.prod(shape[i] for i in over) <= _WORTH:
        return None
    kept_spec, used_spec = (PartitionSpec(*spec) for spec in zip(*entries, strict=True))
    return Scales(
        tuple(shape),
        tuple(over),
        NamedSharding(kept.mesh, kept_spec),
        NamedSharding(used.mesh, used_spec),
    )


def quantised(weight: jax.Array, scales: Scales, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """A weight in the dtype that it is sent in, and its scales."""
    wide = jnp.promote_types(weight.dtype, jnp.float32)
    parts = weight.astype(wide).reshape(scales.shape)
    scale = jnp.max(jnp.abs(parts), scales.over, keepdims=True) / IN_8_BITS[dtype]
    # Of zeros. A mask instead would be sent, too.
    scale = jnp.maximum(scale, jnp.finfo(wide).tiny)
    parts = parts / scale
    parts = jnp.round(parts) if jnp.issubdtype(dtype, jnp.integer) else parts
    return parts.astype(dtype).reshape(weight.shape), scale


def restored(sent: jax.Array, scale: jax.Array, scales: Scales, dtype: DTypeLike) -> jax.Array:
    """A weight that was sent."""
    parts = sent.reshape(scales.shape).astype(scale.dtype) * scale
    return parts.astype(dtype).reshape(sent.shape)


def as_sent(weight: jax.Array, dtype: DTypeLike | None, send_dtype: DTypeLike | None) -> jax.Array:
    """A weight on one device, rounded as if it were sent, to a scale for all of it. Its derivatives
    are those of a weight that is sent as it is.
    """
    if send_dtype is None or unfit_for_8_bits(weight):
        return cast(weight, dtype)
    scales = Scales(tuple(weight.shape), tuple(range(weight.ndim)))
    rounded = restored(*quantised(weight, scales, jnp.dtype(send_dtype)), scales, weight.dtype)
    return cast(weight + lax.stop_gradient(rounded - weight), dtype)


def cast(x: jax.Array, dtype: DTypeLike | None) -> jax.Array:
    return x.astype(dtype) if dtype is not None and jnp.issubdtype(x.dtype, jnp.floating) else x

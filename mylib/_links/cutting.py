"""Cuts shards into pieces, and joins pieces to shards: one program for each device and tree."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Cut(NamedTuple):
    """A piece of shard number `shard`."""

    shard: int
    start: tuple[int, ...]
    shape: tuple[int, ...]


class Join(NamedTuple):
    """A shard made of pieces, each with its number and where it begins."""

    shape: tuple[int, ...]
    dtype: Any
    parts: tuple[tuple[int, tuple[int, ...]], ...]


def cut(shards: Sequence[jax.Array], cuts: Sequence[Cut]) -> list[jax.Array]:
    """Copies pieces out of shards of one device, also a piece that is a whole shard. The last
    result is a small array that is ready when the pieces are.

    The server keeps no buffer alive: if a shard is donated or deleted before another process has
    pulled it, that process gets JAX's error of a deleted buffer (50 of 50 times, in JAX 0.10.2 and
    0.12). So the server gets copies, which nobody else can delete. They are most of what makes a
    transfer of 1 MB or more to the same spec take 1.2 to 1.5 times as long as `jax.device_put`.
    """
    return _cut(tuple(cuts), list(shards))


def join(pieces: Sequence[jax.Array], joins: Sequence[Join]) -> list[jax.Array]:
    """Joins pieces that are on one device."""
    return _join(tuple(joins), list(pieces)) if joins else []


@partial(jax.jit, static_argnums=0)
def _cut(cuts: tuple[Cut, ...], shards: list[jax.Array]) -> list[jax.Array]:
    pieces = []
    for number, start, shape in cuts:
        shard = shards[number]
        stop = [a + n for a, n in zip(start, shape, strict=True)]
        pieces.append(jnp.copy(shard) if shard.shape == shape else lax.slice(shard, start, stop))
    return [*pieces, jnp.zeros((), bool)]


@partial(jax.jit, static_argnums=0)
def _join(joins: tuple[Join, ...], pieces: list[jax.Array]) -> list[jax.Array]:
    shards = []
    for shape, dtype, parts in joins:
        shard = jnp.zeros(shape, dtype)
        for number, start in parts:
            shard = lax.dynamic_update_slice(shard, pieces[number], start)
        shards.append(shard)
    return shards

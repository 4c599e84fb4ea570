"""Puts batches from any loader onto the mesh ahead of time, on one host or many."""

from ._moving.data import (
    Prefetch as Prefetch,
    ReaderShard as ReaderShard,
    Timing as Timing,
    prefetch as prefetch,
    reader_shard as reader_shard,
    to_global as to_global,
)

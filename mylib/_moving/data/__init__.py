"""Puts batches from any loader onto the mesh ahead of time, on one host or many."""

from .prefetch import Prefetch as Prefetch, prefetch as prefetch
from .rows import ReaderShard as ReaderShard, reader_shard as reader_shard
from .timing import Timing as Timing
from .to_global import to_global as to_global

# Tracebacks and pickles then show the public names.
for _class in (Prefetch, ReaderShard, Timing):
    _class.__module__ = "mylib.data"

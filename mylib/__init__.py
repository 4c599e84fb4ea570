"""Puts the arrays of any PyTree where they belong, and keeps them there."""

from . import data as data, loops as loops, rules as rules
from ._checkpoint import (
    filter_checkpoint as filter_checkpoint,
    recompute_resharded as recompute_resharded,
)
from ._errors import (
    Fault as Fault,
    PlacementError as PlacementError,
    ReplicaError as ReplicaError,
)
from ._jit import filter_jit as filter_jit
from ._leaves import Leaf as Leaf
from ._opaque import opaque as opaque
from ._placement import Placement as Placement, resolve as resolve
from ._replicas import check_replicas as check_replicas
from ._shard import filter_device_put as filter_device_put, filter_shard as filter_shard
from ._shard_map import filter_shard_map as filter_shard_map
from ._target import Target as Target
from ._varying import vary as vary
from .rules._explain import explain as explain

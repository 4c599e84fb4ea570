"""Puts the arrays of any PyTree where they belong, and keeps them there."""

from . import rules as rules
from ._errors import Fault as Fault, PlacementError as PlacementError
from ._jit import filter_jit as filter_jit
from ._leaves import Leaf as Leaf
from ._placement import Placement as Placement, resolve as resolve
from ._shard import filter_device_put as filter_device_put, filter_shard as filter_shard
from ._target import Target as Target
from .rules._explain import explain as explain

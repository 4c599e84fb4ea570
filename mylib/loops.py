"""Loops inside `shard_map`: the carry may start equal on all devices and become different, and all
devices can agree when to stop.
"""

from ._training.loops import scan as scan, while_loop as while_loop

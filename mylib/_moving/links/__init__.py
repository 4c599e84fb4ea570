"""Moves arrays between processes that share no devices, over connections of their own."""

from .connections import (
    explained_errors as explained_errors,
    get_ready as get_ready,
    open_links as open_links,
    transport as transport,
)
from .crossings import (
    Crossing as Crossing,
    count_moves as count_moves,
    crosses as crosses,
    handle as handle,
    handles as handles,
    is_nowhere_here as is_nowhere_here,
    move_across as move_across,
)
from .leaf import next_call as next_call, set_origin as set_origin

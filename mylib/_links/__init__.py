"""Moves arrays between processes that share no devices, over connections of their own."""

from .across import (
    Crossing as Crossing,
    crosses as crosses,
    handle as handle,
    handles as handles,
    is_handle as is_handle,
    is_nowhere_here as is_nowhere_here,
    move_across as move_across,
)
from .connections import (
    TransferError as TransferError,
    explained_errors as explained_errors,
    get_ready as get_ready,
    open_links as open_links,
    transport as transport,
)
from .identity import give_names as give_names, name_of as name_of, next_name as next_name

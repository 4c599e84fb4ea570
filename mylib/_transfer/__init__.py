"""`filter_shard`, `filter_device_put`, `filter_load`: move, constrain, and read arrays."""

from .already_placed import not_there as not_there, same_place as same_place, same_type as same_type
from .host import LocalData as LocalData, assemble as assemble
from .load import filter_load as filter_load
from .staged import (
    constrain_auto_p as constrain_auto_p,
    transfer_and_constrain as transfer_and_constrain,
)
from .verbs import (
    filter_device_put as filter_device_put,
    filter_shard as filter_shard,
    let_go as let_go,
    place_leaves as place_leaves,
    transfer as transfer,
)

"""`filter_shard`, `filter_device_put`, `filter_load`: move, constrain, and read arrays."""

from .already_placed import same_place as same_place, same_type as same_type
from .host import from_local as from_local
from .load import filter_load as filter_load
from .relocation import Options as Options, is_there as is_there
from .staged import (
    constrain_auto_p as constrain_auto_p,
    transfer_and_constrain as transfer_and_constrain,
)
from .verbs import (
    filter_device_put as filter_device_put,
    filter_shard as filter_shard,
    is_flag as is_flag,
    let_go as let_go,
    place_leaves as place_leaves,
    transfer as transfer,
)

"""`filter_shard_map`, `opaque` and `vary`: one program on each device, refused if a device would
wait for ever.
"""

from .hazards import communicates_over as communicates_over
from .opaque import opaque as opaque
from .shard_map import filter_shard_map as filter_shard_map
from .vary import vary as vary

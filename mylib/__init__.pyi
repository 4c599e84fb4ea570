from . import (
    contracts as contracts,
    data as data,
    elastic as elastic,
    errors as errors,
    loops as loops,
    machines as machines,
    mpmd as mpmd,
    results as results,
    rules as rules,
    testing as testing,
)
from ._core.errors import (
    MylibError as MylibError,
    MylibWarning as MylibWarning,
    PlacementError as PlacementError,
)
from ._core.meshes import make_mesh as make_mesh
from ._core.placement import Placement as Placement, Target as Target, resolve as resolve
from ._core.show import explain as explain, show as show
from ._core.tree import Leaf as Leaf
from ._moving.processes import check_replicas as check_replicas
from ._moving.transfer import (
    filter_device_put as filter_device_put,
    filter_load as filter_load,
    filter_shard as filter_shard,
)
from ._moving.watch import Watching as Watching, watch as watch
from ._planning.plan import Plan as Plan, plan as plan
from ._programs.audit import audit as audit
from ._training.fsdp import (
    accumulate as accumulate,
    filter_checkpoint as filter_checkpoint,
    fully_shard as fully_shard,
    recompute_resharded as recompute_resharded,
)
from ._training.jit import filter_jit as filter_jit, load_compiled as load_compiled
from ._training.matrices import by_matrix as by_matrix
from ._training.per_device import (
    filter_shard_map as filter_shard_map,
    opaque as opaque,
    vary as vary,
)

__version__: str
__all__: list[str]

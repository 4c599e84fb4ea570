"""Values whose types name no mesh: what is computed with them says nothing of where they are, on any
type of axes.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

NO_MESH = AbstractMesh((), ())


def without_mesh(xs: Sequence[Any]) -> list[Any]:
    """The values, without the Auto axes in their types."""
    return over_mesh(xs, NO_MESH)


def over_mesh(xs: Sequence[Any], mesh: AbstractMesh) -> list[Any]:
    """The values, with the Auto axes of a mesh in their types."""
    return [_over(x, mesh) for x in xs]


def _over(x: Any, mesh: AbstractMesh) -> Any:
    return x if jax.typeof(x).sharding.mesh == mesh else over_mesh_p.bind(x, mesh=mesh)


# Only the type is another one: nothing is computed, and the compiler is told nothing.
over_mesh_p = Primitive("over_mesh")
over_mesh_p.def_impl(lambda x, **_: x)
over_mesh_p.def_abstract_eval(
    lambda x, mesh: x.update(sharding=NamedSharding(mesh, PartitionSpec(*[None] * x.ndim)))
)
ad.deflinear2(over_mesh_p, lambda ct, x, **_: [_over(ct, x.aval.sharding.mesh)])
batching.primitive_batchers[over_mesh_p] = lambda xs, dims, **params: (
    over_mesh_p.bind(*xs, **params),
    *dims,
)
mlir.register_lowering(over_mesh_p, lambda ctx, x, **_: [x])

"""Warns of arguments of a mapped function that `vmap` maps over a dimension that is split over
devices. `shard_map` gathers it, without saying so.

What `vmap` maps is known while the function is traced. How that is split is known of arrays, and
in `jax.jit` only when the program is lowered: of its arguments, and of what is constrained.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.tree_util as jtu
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding

from .._compat import axes_of_lowered, vmapped_axes
from .._errors import PlacementWarning, warn
from .._jit import Function
from .._placement import axis_names


def watched(function: Function, arguments: Any) -> Any:
    """The arguments of a function that is called now."""
    if not any(map(_is_unnamed, vmapped_axes())):
        return arguments

    def watch(path: Any, x: Any) -> Any:
        if not isinstance(x, Tracer):
            return x
        return watched_p.bind(x, argument=_MappedArgument(function.name, function.naming(path)))

    return jtu.tree_map_with_path(watch, arguments)


def _is_unnamed(axis: Any) -> bool:
    return axis.spmd_name is None and axis.explicit_mesh_axis is None


@dataclass(frozen=True)
class _MappedArgument:
    """The name of a function, that of its argument, and the dimensions that `vmap` maps."""

    of: str
    name: str
    dims: tuple[int, ...] = ()

    def warn_if_split(self, entries: Sequence[Any]) -> None:
        """Warns if one of the dimensions is split. `entries` has the axes of each."""
        for dim in self.dims:
            axes = axis_names(entries[dim]) if dim < len(entries) else ()
            if axes:
                entry = axes[0] if len(axes) == 1 else tuple(axes)
                warn(
                    f"{self.of} is called under jax.vmap, which maps a dimension of {self.name} "
                    f"that is split over {entry!r}: each device gathers all of it. Write "
                    f"jax.vmap({self.of}, spmd_axis_name={entry!r}), and leave {entry!r} out of "
                    "its in_specs",
                    PlacementWarning,
                )


# The identity.
watched_p = Primitive("watched_argument")
watched_p.def_abstract_eval(lambda x, *, argument: x)


@watched_p.def_impl
def _warn_of_array(x: Any, *, argument: _MappedArgument) -> Any:
    sharding = x.sharding if isinstance(x, jax.Array) else None
    if isinstance(sharding, NamedSharding):
        argument.warn_if_split(sharding.spec.partitions)
    return x


def _lower(ctx: Any, x: Any, *, argument: _MappedArgument) -> Sequence[Any]:
    argument.warn_if_split(axes_of_lowered(x))
    return [x]


def _batch(
    axis: Any, args: Sequence[Any], dims: Sequence[Any], *, argument: _MappedArgument
) -> tuple[Any, Any]:
    ((x,), (dim,)) = args, dims
    if dim is None:
        return watched_p.bind(x, argument=argument), None
    before = tuple(i if i < dim else i + 1 for i in argument.dims)
    mapped = (*before, dim) if _is_unnamed(axis) else before
    return watched_p.bind(x, argument=_MappedArgument(argument.of, argument.name, mapped)), dim


def _jvp(primals: Any, tangents: Any, *, argument: _MappedArgument) -> tuple[Any, Any]:
    return watched_p.bind(*primals, argument=argument), *tangents


ad.primitive_jvps[watched_p] = _jvp
ad.primitive_transposes[watched_p] = lambda cotangent, x, *, argument: [cotangent]
batching.fancy_primitive_batchers[watched_p] = _batch
# Not cached: JAX would lower the first of equal calls alone, as a function of its own.
mlir.register_lowering(watched_p, _lower, cacheable=False)

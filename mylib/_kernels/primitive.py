"""A call that nobody can look into, as a primitive that knows how it may be split."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from .._compat import requires_devices, without_types_of_shard_map
from .._products import flops_of_kernel, products_in
from .._programs import KERNEL, opaque_calls
from .._tree import Outline, outlined
from .axes import agreed, operands_of, specs_of
from .lowering import lowered
from .splits import Splits


class Type(NamedTuple):
    """The shape and dtype of a result."""

    shape: tuple[int, ...]
    dtype: Any


@dataclass(frozen=True, repr=False)
class Kernel:
    """The user's function as one of arrays, and one of plain JAX that computes the same. `outline`
    has the rest of the arguments; `parameters` are the names of those that are positional.
    """

    fun: Callable[..., Any]
    like: Callable[..., Any] | None
    outline: Outline
    parameters: tuple[str, ...]

    def __repr__(self) -> str:
        return self.name

    def __call__(self, *arrays: Any) -> Sequence[Any]:
        args, kwargs = self.outline.fill(arrays)
        return outlined(self.fun(*args, **kwargs))[0]

    def reference(self, arrays: Sequence[Any]) -> tuple[list[Any], Outline]:
        """What `like` returns: arrays, and the rest; without it, what the function itself does."""
        args, kwargs = self.outline.fill(arrays)
        return outlined((self.like or self.fun)(*args, **kwargs))

    def program(self, types: Sequence[Any]) -> tuple[Any, Outline]:
        """The reference's jaxpr for arrays of these types, and what it returns without arrays."""
        outlines: list[Outline] = []

        def arrays_of(*arrays: Any) -> list[Any]:
            returned, outline = self.reference(arrays)
            outlines.append(outline)
            return returned

        return traced(arrays_of, types), outlines[-1]

    def work(self, types: Sequence[Any]) -> float | None:
        """The FLOPs of a call: the reference's, or what Pallas kernels report of themselves."""
        program, _ = self.program(types)
        return flops_of(program)

    @property
    def name(self) -> str:
        return getattr(self.fun, "__name__", "the function")

    @property
    def paths(self) -> list[str]:
        """What each array is called in errors: `q`, or `weights['up']`."""
        filled = self.outline.fill(map(_Position, range(self.outline.count)))
        found = jtu.tree_flatten_with_path(filled)[0]
        return [self._shown(path) for path, x in found if isinstance(x, _Position)]

    def _shown(self, path: Any) -> str:
        (_, kind), (_, first), *rest = ((x, getattr(x, "idx", x)) for x in path)
        keys = jtu.keystr(tuple(x for x, _ in rest))
        if kind == 0 and first < len(self.parameters):
            return self.parameters[first] + keys
        return jtu.keystr(tuple(path[1:]))


def traced(fun: Callable[..., Any], types: Sequence[Any]) -> Any:
    """The jaxpr of a function of arrays, outside of meshes: what is traced here doesn't run."""
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())), without_types_of_shard_map():
        return jax.make_jaxpr(fun)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in types))


def flops_of(program: Any) -> float | None:
    """The FLOPs of a jaxpr: its kernels', or without any those of plain JAX."""
    known = list(map(flops_of_kernel, opaque_calls(program)))
    if known:
        return None if None in known else sum(x for x in known if x is not None)
    counted = products_in(program, each_turn=True)
    return None if counted is None else 2.0 * counted.products


class _Position(int):
    """Stands for an array."""


@dataclass(frozen=True, repr=False)
class _MappedKernel:
    """A kernel under `jax.vmap`."""

    kernel: Any
    are_mapped: tuple[bool, ...]

    def __repr__(self) -> str:
        return f"vmap({self.kernel})"

    def __call__(self, *arrays: Any) -> Sequence[Any]:
        in_axes = [0 if is_mapped else None for is_mapped in self.are_mapped]
        return jax.vmap(self.kernel, in_axes)(*arrays)

    @property
    def like(self) -> Any:
        return self.kernel.like

    def reference(self, arrays: Sequence[Any]) -> tuple[list[Any], None]:
        in_axes = [0 if is_mapped else None for is_mapped in self.are_mapped]
        return jax.vmap(lambda *xs: self.kernel.reference(xs)[0], in_axes)(*arrays), None

    def work(self, types: Sequence[Any]) -> float | None:
        size = next(x.shape[0] for x, mapped in zip(types, self.are_mapped, strict=True) if mapped)
        inner = [
            jax.ShapeDtypeStruct(x.shape[1:], x.dtype) if mapped else x
            for x, mapped in zip(types, self.are_mapped, strict=True)
        ]
        work = self.kernel.work(inner)
        return None if work is None else size * work

    @property
    def name(self) -> str:
        return self.kernel.name

    @property
    def paths(self) -> list[str]:
        return self.kernel.paths


class NoDerivativeError(TypeError):
    """A kernel without a derivative is differentiated."""


kernel_p = Primitive(KERNEL)
kernel_p.multiple_results = True
requires_devices(kernel_p)


@kernel_p.def_abstract_eval
def _abstract(*avals: Any, kernel: Any, splits: Splits, types: Sequence[Type], **_: Any) -> Any:
    mesh = next((x.sharding.mesh for x in avals if not x.sharding.mesh.empty), None)
    specs = [PartitionSpec(*[None] * len(type_.shape)) for type_ in types]
    if mesh is not None and mesh.explicit_axes:
        split = agreed(kernel.name, operands_of(kernel, splits, avals), splits, mesh)
        specs = specs_of(splits.results, [x.shape for x in types], split)
    results: list[Any] = []
    for type_, spec in zip(types, specs, strict=True):
        sharding = NamedSharding(mesh, spec) if mesh is not None else None
        like = avals[0] if avals else ShapedArray((), type_.dtype)
        kept = {} if sharding is None else {"sharding": sharding}
        results.append(like.update(shape=type_.shape, dtype=type_.dtype, weak_type=False, **kept))
    return results


@kernel_p.def_impl
def _run(*arrays: Any, **params: Any) -> Any:
    return _compiled(tuple(params.items()))(*arrays)


@functools.lru_cache(maxsize=256)
def _compiled(params: tuple[tuple[str, Any], ...]) -> Any:
    return jax.jit(functools.partial(kernel_p.bind, **dict(params)))


def _batch(
    axis: Any, args: Sequence[Any], dims: Sequence[Any], *, types: Sequence[Type], **params: Any
) -> tuple[Any, Any]:
    are_mapped = tuple(dim is not None for dim in dims)
    args = [
        x if dim is None else batching.bdim_at_front(x, dim, axis.size, axis.explicit_mesh_axis)
        for x, dim in zip(args, dims, strict=True)
    ]
    results = kernel_p.bind(
        *args,
        types=tuple(Type((axis.size, *x.shape), x.dtype) for x in types),
        **_mapped(axis, are_mapped, **params),
    )
    return results, [0] * len(results)


def _mapped(
    axis: Any, are_mapped: tuple[bool, ...], *, kernel: Any, splits: Splits, axes: Any, layer: Any
) -> dict[str, Any]:
    """The parameters of a call under `vmap`, whose `spmd_axis_name` splits the new letter."""
    splits = splits.under_vmap(axis.size, are_mapped)
    if axes is not None and axis.spmd_name is not None:
        named = axis.spmd_name if isinstance(axis.spmd_name, tuple) else (axis.spmd_name,)
        axes = ((splits.results[0][0], named), *axes)
    kernel = _MappedKernel(kernel, are_mapped)
    return {"kernel": kernel, "splits": splits, "axes": axes, "layer": layer}


def _no_derivative(primals: Any, tangents: Any, *, kernel: Any, **_: Any) -> Any:
    raise NoDerivativeError(
        f"opaque: {kernel.name} has no derivative. Give fwd= and bwd=, or like=, whose derivative "
        "is then that of the call"
    )


ad.primitive_jvps[kernel_p] = _no_derivative
batching.fancy_primitive_batchers[kernel_p] = _batch
mlir.register_lowering(kernel_p, functools.partial(lowered, on_tpu=False))
mlir.register_lowering(kernel_p, functools.partial(lowered, on_tpu=True), platform="tpu")

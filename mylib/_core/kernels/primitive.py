"""A call that nobody can look into, as a primitive that knows how it may be split."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Never

import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, NamedSharding

from ..compat import requires_devices, without_types_of_shard_map
from ..jaxprs import KERNEL, opaque_calls
from ..products import flops_of_kernel, products_in
from ..tree import Arrays, KeyPath, Outline, outlined
from .axes import Axes, Called, agreed, specs_of
from .checking import Types
from .lowering import lowered
from .splits import Splits


def type_of(array: jax.Array | ShapedArray) -> jax.ShapeDtypeStruct:
    """Its shape and dtype."""
    return jax.ShapeDtypeStruct(tuple(array.shape), array.dtype)


@dataclass(frozen=True, repr=False)
class Kernel:
    """The user's function as one of arrays, and one of plain JAX that computes the same. `outline`
    has the rest of the arguments; `parameters` are the names of those that are positional.
    """

    fun: Callable[..., Any]
    like: Callable[..., Any] | None
    outline: Outline
    parameters: tuple[str, ...]
    # Whether `like` says how it may be split, and whether that is checked.
    is_read: bool = False
    is_checked: bool = False

    def __repr__(self) -> str:
        return self.name

    def __call__(self, *arrays: jax.Array) -> Arrays:
        args, kwargs = self.outline.fill(arrays)
        return outlined(self.fun(*args, **kwargs))[0]

    def reference(self, arrays: Sequence[jax.Array]) -> tuple[Arrays, Outline]:
        """What `like` returns: arrays, and the rest; without it, what the function itself does."""
        args, kwargs = self.outline.fill(arrays)
        return outlined((self.like or self.fun)(*args, **kwargs))

    def program(self, types: Types) -> tuple[ClosedJaxpr, Outline]:
        """The reference's jaxpr for arrays of these types, and what it returns without arrays."""
        outlines: list[Outline] = []

        def arrays_of(*arrays: jax.Array) -> Arrays:
            returned, outline = self.reference(arrays)
            outlines.append(outline)
            return returned

        return traced(arrays_of, types), outlines[-1]

    def letter(self, key: str | tuple[str, int], splits: Splits) -> str:
        """The letter of a dimension in `axes=` and `whole=`: there it is an argument and a number
        if nobody has chosen letters.
        """
        if not self.is_read:
            return str(key)
        places = zip(self.paths, splits.operands, strict=True)
        named = {(path, i): x for path, letters in places for i, x in enumerate(letters)}
        if isinstance(key, str) or key not in named:
            shown = ", ".join(self.paths) or "none"
            raise TypeError(
                f"opaque: {key!r} is no dimension of {self.name}. With like=, axes= and whole= "
                'name an argument and the number of its dimension, as in axes={("x", 0): "data"} '
                f'and whole=[("x", 1)]; its arguments are: {shown}'
            )
        return named[key]

    def shown(self, letter: str, splits: Splits) -> str:
        """A letter as `axes=` names it."""
        for path, letters in zip(self.paths, splits.operands, strict=False):
            if self.is_read and letter in letters:
                return f'("{path}", {letters.index(letter)})'
        return f'"{letter}"'

    def work(self, types: Types) -> float | None:
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
        return [self._shown(path) for path, leaf in found if isinstance(leaf, _Position)]

    def _shown(self, path: KeyPath) -> str:
        (_, first, *rest) = path
        # Of positional arguments, and of keyword arguments.
        name = self.parameters[first.idx] if hasattr(first, "idx") else first.key
        return f"{name}{jtu.keystr(tuple(rest))}"


def traced(fun: Callable[..., object], types: Types) -> ClosedJaxpr:
    """The jaxpr of a function of arrays, outside of meshes: what is traced here doesn't run."""
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())), without_types_of_shard_map():
        return jax.make_jaxpr(fun)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in types))


def flops_of(program: ClosedJaxpr) -> float | None:
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

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked of one that is being copied, which has no kernel yet
            raise AttributeError(name)
        return getattr(self.kernel, name)

    def __call__(self, *arrays: jax.Array) -> Sequence[jax.Array]:
        return self._mapped(self.kernel)(*arrays)

    def _mapped(self, fun: Callable[..., Arrays]) -> Callable[..., Arrays]:
        return jax.vmap(fun, [0 if is_mapped else None for is_mapped in self.are_mapped])

    def shown(self, letter: str, splits: Splits) -> str:
        pairs = zip(splits.operands, self.are_mapped, strict=True)
        operands = tuple(letters[is_mapped:] for letters, is_mapped in pairs)
        return self.kernel.shown(letter, replace(splits, operands=operands))

    def reference(self, arrays: Sequence[jax.Array]) -> tuple[Arrays, None]:
        return self._mapped(lambda *rows: self.kernel.reference(rows)[0])(*arrays), None

    def work(self, types: Types) -> float | None:
        pairs = [*zip(types, self.are_mapped, strict=True)]
        size = next(type_.shape[0] for type_, is_mapped in pairs if is_mapped)
        rows = [jax.ShapeDtypeStruct(x.shape[is_mapped:], x.dtype) for x, is_mapped in pairs]
        work = self.kernel.work(rows)
        return None if work is None else size * work


class NoDerivativeError(TypeError):
    """A kernel without a derivative is differentiated."""


kernel_p = Primitive(KERNEL)
kernel_p.multiple_results = True
requires_devices(kernel_p)


@kernel_p.def_abstract_eval
def _abstract(
    *avals: ShapedArray, kernel: Called, splits: Splits, types: Types, **_: object
) -> list[ShapedArray]:
    mesh = next((aval.sharding.mesh for aval in avals if not aval.sharding.mesh.empty), None)
    split: Axes = {}
    if mesh is not None and mesh.explicit_axes:
        split = agreed(kernel, splits, avals, mesh)
    like = avals[0] if avals else ShapedArray((), np.dtype(np.float32))
    results: list[ShapedArray] = []
    for type_, spec in zip(types, specs_of(splits.results, types, split), strict=True):
        kept = {} if mesh is None else {"sharding": NamedSharding(mesh, spec)}
        results.append(like.update(shape=type_.shape, dtype=type_.dtype, weak_type=False, **kept))
    return results


@kernel_p.def_impl
def _run(*arrays: jax.Array, **params: object) -> list[jax.Array]:
    return _compiled(tuple(params.items()))(*arrays)


@functools.lru_cache(maxsize=256)
def _compiled(params: tuple[tuple[str, object], ...]) -> Callable[..., list[jax.Array]]:
    return jax.jit(functools.partial(kernel_p.bind, **dict(params)))


def _batch(
    axis: Any,
    args: Sequence[jax.Array],
    dims: Sequence[int | None],
    *,
    kernel: Called,
    splits: Splits,
    types: Types,
    axes: Any,
    layer: Any,
) -> tuple[list[jax.Array], list[int]]:
    """A call under `vmap`, whose `spmd_axis_name` splits the new letter."""
    are_mapped = tuple(dim is not None for dim in dims)
    args = [
        x if dim is None else batching.bdim_at_front(x, dim, axis.size, axis.explicit_mesh_axis)
        for x, dim in zip(args, dims, strict=True)
    ]
    splits = splits.under_vmap(axis.size, are_mapped)
    if axes is not None and axis.spmd_name is not None:
        named = axis.spmd_name if isinstance(axis.spmd_name, tuple) else (axis.spmd_name,)
        axes = ((splits.results[0][0], named), *axes)
    types = tuple(jax.ShapeDtypeStruct((axis.size, *x.shape), x.dtype) for x in types)
    about = {"splits": splits, "types": types, "axes": axes, "layer": layer}
    results = kernel_p.bind(*args, kernel=_MappedKernel(kernel, are_mapped), **about)
    return results, [0] * len(results)


def _no_derivative(primals: object, tangents: object, *, kernel: Called, **_: object) -> Never:
    raise NoDerivativeError(
        f"opaque: {kernel.name} has no derivative. Give fwd= and bwd=, or like=, whose derivative "
        "is then that of the call"
    )


ad.primitive_jvps[kernel_p] = _no_derivative
batching.fancy_primitive_batchers[kernel_p] = _batch
mlir.register_lowering(kernel_p, functools.partial(lowered, on_tpu=False))
mlir.register_lowering(kernel_p, functools.partial(lowered, on_tpu=True), platform="tpu")

"""How the kernels in a layer are split, for compilers that can't tell: those for TPUs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from ..._core.compat import vmapped_axes
from ..._core.contexts import kernel_axes
from ..._core.dims import Reading, program_of
from ..._core.kernels import Axes, Splits
from ..._core.placement import Target, axes_in, axis_names
from ..._core.tree import Arrays, Leaves, Outline, outline_of, outlined
from .gather import is_float

Shape = tuple[int, ...]
Types = tuple[tuple[Shape, jnp.dtype], ...]


@dataclass(frozen=True, repr=False)
class LayerAxes:
    """What a layer knows of its kernels: letters that are split as `used` splits weights, and as
    rows are, over all other axes. JAX traces functions anew for layers that differ in this.

    It is read from the layer's operations, and only when a program for TPUs is lowered.
    """

    method: Callable[..., object]
    layer: Outline
    arguments: Outline
    weights: Types
    inputs: Types
    used: Sequence[Target | None]
    is_mapped: bool

    @staticmethod
    def of(
        method: Callable[..., object],
        leaves: Leaves,
        inputs: Arrays,
        arguments: Outline,
        used: Sequence[Target | None],
    ) -> "LayerAxes | None":
        """None if what is static can't be hashed: then JAX couldn't tell layers apart."""
        weights, given = (
            tuple((tuple(x.shape), x.dtype) for x in map(jax.typeof, side))
            for side in (leaves.arrays, inputs)
        )
        is_mapped = next(vmapped_axes(), None) is not None
        known = LayerAxes(
            method, outline_of(leaves), arguments, weights, given, tuple(used), is_mapped
        )
        try:
            hash(known)
        except TypeError:
            return None
        return known

    @cached_property
    def rows(self) -> tuple[str, ...]:
        """The axes over which `used` splits no weight."""
        placed = [x for x in self.used if isinstance(x, NamedSharding)]
        taken = {axis for x in placed for axis in axes_in(x.spec)}
        return tuple(x for x in placed[0].mesh.axis_names if x not in taken) if placed else ()

    def axes_of(self, name: str, splits: Splits, shapes: Sequence[Shape]) -> Axes | None:
        """How the letters of a kernel that the layer calls are split; None if it calls no such."""
        arrays = [[jax.ShapeDtypeStruct(*x) for x in side] for side in (self.weights, self.inputs)]
        for run in (self._run, self._gradient):
            with kernel_axes(None):
                read = program_of(jax.make_jaxpr(run)(*arrays))
            split = self._groups(read)
            for called, nodes in read.kernels:
                if called == name and [read.dims.sizes(x) for x in nodes] == list(shapes):
                    pairs = zip(splits.operands, map(read.dims.groups, nodes), strict=True)
                    letters = [pair for x, y in pairs for pair in zip(x, y, strict=True)]
                    return {x: split[y] for x, y in letters if x in splits.parts and y in split}
        return None

    def _groups(self, read: Reading) -> dict[int, tuple[str, ...]]:
        """For groups of dimensions the axes that split them."""
        split: dict[int, tuple[str, ...]] = {}
        for nodes, target in zip(read.inputs, self.used, strict=False):
            if isinstance(target, NamedSharding):
                for node, entry in zip(nodes, target.spec.partitions, strict=False):
                    if axis_names(entry):
                        split[read.dims.group(node)] = tuple(axis_names(entry))
        first = next((x for x in read.inputs[len(self.weights) :] if x), ())
        if first and not self.is_mapped and self.rows:
            split.setdefault(read.dims.group(first[0]), self.rows)
        return split

    def _run(self, weights: Arrays, inputs: Arrays) -> Arrays:
        args, kwargs = self.arguments.fill(inputs)
        return outlined(self.method(self.layer.fill(weights), *args, **kwargs))[0]

    def _gradient(self, weights: Arrays, inputs: Arrays) -> Arrays:
        def run(weights: Arrays, inputs: Arrays) -> Arrays:
            return list(filter(is_float, self._run(weights, inputs)))

        results, backward = jax.vjp(run, weights, inputs)
        return list(filter(is_float, jax.tree.leaves(backward(list(map(jnp.ones_like, results))))))

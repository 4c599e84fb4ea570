"""How the kernels in a layer are split, for compilers that can't tell: those for TPUs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from .._dims import Reading, program_of
from .._kernels import Axes, Splits
from .._placement import Target, axes_in, axis_names, kernel_axes
from .._tree import Arrays

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False, repr=False)
class LayerAxes:
    """What a layer knows of its kernels: letters that are split as `used` splits weights, and as
    rows are, over all other axes. `key` tells layers apart: JAX traces functions anew for each.

    It is read from the layer's operations, and only when a program for TPUs is lowered.
    """

    run: Callable[[Arrays, Arrays], Arrays]
    weights: Sequence[jax.ShapeDtypeStruct]
    inputs: Sequence[jax.ShapeDtypeStruct]
    used: Sequence[Target | None]
    is_mapped: bool
    key: Any

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, LayerAxes) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @cached_property
    def rows(self) -> tuple[str, ...]:
        """The axes over which `used` splits no weight."""
        placed = [x for x in self.used if isinstance(x, NamedSharding)]
        taken = {axis for x in placed for axis in axes_in(x.spec)}
        return tuple(x for x in placed[0].mesh.axis_names if x not in taken) if placed else ()

    def axes_of(self, name: str, splits: Splits, shapes: Sequence[Shape]) -> Axes | None:
        """How the letters of a kernel that the layer calls are split; None if it calls no such."""
        for run in (self.run, self._gradient):
            with kernel_axes(None):
                read = program_of(jax.make_jaxpr(run)(self.weights, self.inputs))
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
                for node, entry in zip(nodes, target.spec, strict=False):
                    if axis_names(entry):
                        split[read.dims.group(node)] = tuple(axis_names(entry))
        first = next((x for x in read.inputs[len(self.weights) :] if x), ())
        if first and not self.is_mapped and self.rows:
            split.setdefault(read.dims.group(first[0]), self.rows)
        return split

    def _gradient(self, weights: Arrays, inputs: Arrays) -> Any:
        def run(weights: Arrays, inputs: Arrays) -> Arrays:
            return list(filter(_is_float, self.run(weights, inputs)))

        results, backward = jax.vjp(run, weights, inputs)
        return list(filter(_is_float, jax.tree.leaves(backward(list(map(jnp.ones_like, results))))))


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)

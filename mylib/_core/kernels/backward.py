"""A kernel's own derivative, as a kernel that each device calls for its parts."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from ..compat import names
from ..jaxprs import opaque_calls
from .checking import Types
from .primitive import Kernel, flops_of, traced
from .splits import Splits


def calls_kernels(program: ClosedJaxpr) -> bool:
    return any(True for _ in opaque_calls(program))


def has_derivative(program: ClosedJaxpr) -> bool:
    """Whether JAX can differentiate it: all calls that can't be analysed are in functions with
    derivatives of their own.
    """
    return not any(True for _ in opaque_calls(program, without=_WITH_DERIVATIVES))


_WITH_DERIVATIVES = {names.CUSTOM_JVP_CALL, names.CUSTOM_VJP_CALL}


def is_moving(array: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether it has a cotangent."""
    return jnp.issubdtype(array.dtype, jnp.inexact)


@dataclass(frozen=True, repr=False)
class Backward:
    """The derivative that JAX takes of a kernel's function: from its arguments, and the cotangents
    of its results, the cotangents of the arguments. The function is computed again.
    """

    kernel: Kernel
    are_moving: tuple[bool, ...]
    cotangents: int
    like = None
    is_checked = False

    def __repr__(self) -> str:
        return self.name

    def __call__(self, *arrays: jax.Array) -> Sequence[jax.Array]:
        args = arrays[: len(self.are_moving)]

        def of_moving(*moving: jax.Array) -> list[jax.Array]:
            rest = iter(moving)
            pairs = zip(self.are_moving, args, strict=True)
            results = self.kernel(*(next(rest) if is_moved else x for is_moved, x in pairs))
            return list(filter(is_moving, results))

        _, backward = jax.vjp(of_moving, *compress(args, self.are_moving))
        return backward(list(arrays[len(args) :]))

    def work(self, types: Types) -> float | None:
        return flops_of(traced(self, types))

    def shown(self, letter: str, splits: Splits) -> str:
        return self.kernel.shown(letter, splits)

    @property
    def name(self) -> str:
        return f"{self.kernel.name}_backward"

    @property
    def paths(self) -> list[str]:
        return [*self.kernel.paths, *(f"cotangent {i}" for i in range(self.cotangents))]


def splits_backward(splits: Splits, types: Types, results: Types) -> Splits:
    """How the derivative may be split. Over dimensions that an argument lacks its cotangent is
    summed, so these are whole.
    """
    moving = tuple(compress(splits.operands, map(is_moving, types)))
    large = [
        {letter for letter, n in zip(letters, type_.shape, strict=True) if n > 1}
        for letters, type_ in zip(moving, filter(is_moving, types), strict=True)
    ]
    parts = {x: n for x, n in splits.parts.items() if all(x in letters for letters in large)}
    cotangents = compress(splits.results, map(is_moving, results))
    return Splits((*splits.operands, *cotangents), moving, parts)

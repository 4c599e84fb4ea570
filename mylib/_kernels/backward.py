"""A kernel's own derivative, as a kernel that each device calls for its parts."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp

from .._compat import names
from .._programs import opaque_calls
from .primitive import Type, flops_of, traced
from .splits import Splits


def calls_kernels(program: Any) -> bool:
    return any(True for _ in opaque_calls(program))


def has_derivative(program: Any) -> bool:
    """Whether JAX can differentiate it: all calls that can't be analysed are in functions with
    derivatives of their own.
    """
    return not any(True for _ in opaque_calls(program, without=_WITH_DERIVATIVES))


_WITH_DERIVATIVES = {names.CUSTOM_JVP_CALL, names.CUSTOM_VJP_CALL}


def is_moving(x: Any) -> bool:
    """Whether it has a cotangent."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


@dataclass(frozen=True, repr=False)
class Backward:
    """The derivative that JAX takes of a kernel's function: from its arguments, and the cotangents
    of its results, the cotangents of the arguments. The function is computed again.
    """

    kernel: Any
    are_moving: tuple[bool, ...]
    cotangents: int
    like = None

    def __repr__(self) -> str:
        return self.name

    def __call__(self, *arrays: Any) -> Sequence[Any]:
        args = arrays[: len(self.are_moving)]

        def of_moving(*moving: Any) -> list[Any]:
            rest = iter(moving)
            pairs = zip(self.are_moving, args, strict=True)
            results = self.kernel(*(next(rest) if is_moved else x for is_moved, x in pairs))
            return list(filter(is_moving, results))

        _, backward = jax.vjp(of_moving, *compress(args, self.are_moving))
        return backward(list(arrays[len(args) :]))

    def work(self, types: Sequence[Any]) -> float | None:
        return flops_of(traced(self, types))

    @property
    def name(self) -> str:
        return f"{self.kernel.name}_backward"

    @property
    def paths(self) -> list[str]:
        return [*self.kernel.paths, *(f"cotangent {i}" for i in range(self.cotangents))]


def splits_backward(splits: Splits, types: Sequence[Type], results: Sequence[Type]) -> Splits:
    """How the derivative may be split. Over dimensions that an argument lacks its cotangent is
    summed, so these are whole.
    """
    moving = [
        (letters, {letter for letter, n in zip(letters, x.shape, strict=True) if n > 1})
        for x, letters in zip(types, splits.operands, strict=True)
        if is_moving(x)
    ]
    parts = {x: n for x, n in splits.parts.items() if all(x in split for _, split in moving)}
    cotangents = (y for x, y in zip(results, splits.results, strict=True) if is_moving(x))
    return Splits((*splits.operands, *cotangents), tuple(x for x, _ in moving), parts)
